"""Second derivatives of a loss along lines, by forward propagation of Taylor coefficients.

Along θ + εv the loss is φ(ε), and φ''(0) = vᵀHv. Every activation a(ε) has a value, a slope and a
curvature, which follow from those of the previous layer (Griewank, Walther 2008, "Evaluating
Derivatives", ch. 13). Convolutions are linear layers here.

    linear         z = Wa + b     z' = W'a + Wa' + b'     z'' = 2W'a' + Wa''
    elementwise f  a = f(z)       a' = f'(z) z'           a'' = f'(z) z'' + f''(z) z'²
    loss           φ'' = ⟨∇ℓ, z''⟩ + z'ᵀ(∇²ℓ)z'

There is no backward pass. A linear layer takes one product for the value and four for each line,
instead of the six of a Hessian product. Every sample has its own φ''. This module supports chains
of such layers; `evenclip.audit.curvature` supports all models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from evenclip.gradients.losses import Loss

__all__ = ["forms", "takes"]


class _Jet(NamedTuple):
    """The Taylor coefficients of an activation along every line.

    Attributes:
        value: the same for all lines.  # [sample, ...]
        slope: None if the activation does not depend on the parameters.  # [line, sample, ...]
        curve: None if the activation does not depend on the parameters.  # [line, sample, ...]
    """

    value: Tensor
    slope: Tensor | None
    curve: Tensor | None


def takes(model: nn.Module) -> bool:
    """Return whether the model is a chain of supported torch layers without shared parameters."""
    if type(model) is not nn.Sequential:
        return False
    layers = _layers(model)
    own = [id(item) for layer in layers for item in (layer, *layer.parameters())]
    return len(set(own)) == len(own) and all(map(_is_plain, layers))


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a supported torch layer with its usual parameters and no hooks."""
    hooks = (
        *layer._forward_hooks,
        *layer._forward_pre_hooks,
        *layer._backward_hooks,
        *layer._backward_pre_hooks,
    )
    weighted = isinstance(layer, nn.Linear | nn.Conv2d)
    usual = {"weight", "bias"} if weighted else set()
    return (
        type(layer) in _KNOWN
        and not hooks
        and set(dict(layer.named_parameters())) <= usual
        and (not weighted or isinstance(layer.weight, nn.Parameter))
    )


def forms(
    model: nn.Module,
    loss: Loss,
    x: Tensor,
    y: Tensor,
    lines: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Return vᵀH_i v of every sample i, for each line.

    Args:
        model: a model that `takes` accepts.
        loss: returns one value per sample.
        x: [sample, ...]
        y: targets.
        lines: name of a parameter -> its part of every v.  # [line, *parameter]
        parameters: current parameters by name.

    Returns:
        [line, sample], float64
    """
    jet = _Jet(x, None, None)
    for name, layer in _named(model):
        jet = _KNOWN[type(layer)](layer, name, jet, lines, parameters)
    value, slope, curve = jet

    def total(output: Tensor) -> Tensor:
        return loss(output, y).sum()

    slopes = grad(total)(value)
    number = len(next(iter(lines.values())))
    if slope is None or curve is None:
        return value.new_zeros(number, len(value), dtype=torch.float64)
    with warnings.catch_warnings():
        # torch itself raises this on the first use.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        bent = vmap(lambda along: jvp(grad(total), (value,), (along,))[1])(slope)
    each: Tensor = slopes * curve + slope * bent
    return each.flatten(2).sum(dim=2, dtype=torch.float64)


def _named(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the layers in order, with their names in the model."""
    layers = []
    # `named_children` would list a layer that is used twice only once.
    for name, child in model._modules.items():
        if child is None:
            continue
        full = f"{prefix}{name}"
        layers += _named(child, f"{full}.") if type(child) is nn.Sequential else [(full, child)]
    return layers


def _layers(model: nn.Module) -> list[nn.Module]:
    return [layer for _, layer in _named(model)]


def _linear(
    layer: nn.Module,
    name: str,
    jet: _Jet,
    lines: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
) -> _Jet:
    assert isinstance(layer, nn.Linear)
    if jet.value.ndim != 2:
        raise NotImplementedError("Linear layers need one position per sample.")
    weight = parameters.get(f"{name}.weight", layer.weight.detach())
    bias = None if layer.bias is None else parameters.get(f"{name}.bias", layer.bias.detach())
    turned = lines.get(f"{name}.weight")  # W' [line, out, in]
    shifted = lines.get(f"{name}.bias")  # b' [line, out]
    value = nn.functional.linear(jet.value, weight, bias)
    slope = curve = None
    if jet.slope is not None:
        slope = jet.slope @ weight.T
        curve = None if jet.curve is None else jet.curve @ weight.T
    if turned is not None:
        first = jet.value @ turned.transpose(1, 2)  # W'a on all lines
        slope = first if slope is None else slope.add_(first)
        if jet.slope is not None:
            second = torch.bmm(jet.slope, turned.transpose(1, 2)).mul_(2)
            curve = second if curve is None else curve.add_(second)
    if shifted is not None:
        along = shifted.unsqueeze(1)
        slope = (
            along.expand(len(along), *value.shape).clone() if slope is None else slope.add_(along)
        )
    if slope is not None and curve is None:
        curve = torch.zeros_like(slope)
    return _Jet(value, slope, curve)


def _convolution(
    layer: nn.Module,
    name: str,
    jet: _Jet,
    lines: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
) -> _Jet:
    assert isinstance(layer, nn.Conv2d)
    if jet.value.ndim != 4 or layer.groups != 1 or layer.padding_mode != "zeros":
        raise NotImplementedError("Convolutions need one group and zero padding.")
    weight = parameters.get(f"{name}.weight", layer.weight.detach())
    bias = None if layer.bias is None else parameters.get(f"{name}.bias", layer.bias.detach())
    turned = lines.get(f"{name}.weight")  # W' [line, out, in, ...]
    shifted = lines.get(f"{name}.bias")  # b' [line, out]

    def convolved(a: Tensor, kernel: Tensor, groups: int = 1) -> Tensor:
        return nn.functional.conv2d(
            a, kernel, None, layer.stride, layer.padding, layer.dilation, groups
        )

    def on_lines(a: Tensor) -> Tensor:
        """Convolve with W, with the lines as further samples."""
        out = convolved(a.flatten(0, 1), weight)
        return out.reshape(*a.shape[:2], *out.shape[1:])

    def by_lines(a: Tensor, groups: int = 1) -> Tensor:
        """Convolve each line with its own W', with the lines as further channels."""
        assert turned is not None
        out = convolved(a, turned.flatten(0, 1), groups)
        return out.reshape(len(a), *turned.shape[:2], *out.shape[2:]).transpose(0, 1)

    value = convolved(jet.value, weight)
    if bias is not None:
        value = value + bias[:, None, None]
    slope = curve = None
    if jet.slope is not None:
        slope, curve = on_lines(jet.slope), None if jet.curve is None else on_lines(jet.curve)
    if turned is not None:
        first = by_lines(jet.value)
        slope = first if slope is None else slope.add_(first)
        if jet.slope is not None:
            second = by_lines(jet.slope.transpose(0, 1).flatten(1, 2), len(turned)).mul_(2)
            curve = second if curve is None else curve.add_(second)
    if shifted is not None:
        along = shifted[:, None, :, None, None]
        slope = (
            along.expand(len(along), *value.shape).clone() if slope is None else slope.add_(along)
        )
    if slope is not None and curve is None:
        curve = torch.zeros_like(slope)
    return _Jet(value, slope, curve)


Derivatives = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]  # f, f', f''; None: 0


def _elementwise(derivatives: Derivatives) -> Callable[..., _Jet]:
    def through(layer: nn.Module, name: str, jet: _Jet, lines: object, parameters: object) -> _Jet:
        del layer, name, lines, parameters
        value, first, second = derivatives(jet.value)
        if jet.slope is None or jet.curve is None:
            return _Jet(value, None, None)
        curve = jet.curve.mul_(first)
        if second is not None:
            curve.addcmul_(jet.slope.square(), second)
        return _Jet(value, jet.slope.mul_(first), curve)

    return through


def _tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    t = torch.tanh(z)
    first = 1 - t * t
    return t, first, -2 * t * first


def _sigmoid(z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    s = torch.sigmoid(z)
    first = s * (1 - s)
    return s, first, first * (1 - 2 * s)


def _relu(z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return torch.relu(z), (z > 0).to(z.dtype), None


def _same(layer: nn.Module, name: str, jet: _Jet, lines: object, parameters: object) -> _Jet:
    del layer, name, lines, parameters
    return jet


def _flatten(layer: nn.Module, name: str, jet: _Jet, lines: object, parameters: object) -> _Jet:
    del name, lines, parameters
    assert isinstance(layer, nn.Flatten)
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise NotImplementedError("Flatten must flatten all axes of a sample.")
    if jet.slope is None or jet.curve is None:
        return _Jet(jet.value.flatten(1), None, None)
    return _Jet(jet.value.flatten(1), jet.slope.flatten(2), jet.curve.flatten(2))


_KNOWN: dict[type[nn.Module], Callable[..., _Jet]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.Tanh: _elementwise(_tanh),
    nn.Sigmoid: _elementwise(_sigmoid),
    nn.ReLU: _elementwise(_relu),
    nn.Identity: _same,
    nn.Dropout: _same,
    nn.Flatten: _flatten,
}
