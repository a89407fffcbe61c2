"""Per-sample gradients of any module with parameters, through `torch.func`.

This covers attention, recurrent cells and custom modules. The gradient of sample i is the gradient
of ⟨output_i, δ_i⟩ with respect to the module's parameters, for that sample alone. `vmap` maps it
over the samples. If PyTorch cannot map over shared parameters (recurrent layers write in place),
each sample gets its own copy of them. If that fails too, the samples are processed one at a time.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_leaves

from evenclip.gradients.axis import Axis

__all__ = ["AnyLayer", "Mode", "call_with"]

_TENSOR = object()  # placeholder for a tensor among the constants of a call


class Mode(enum.Enum):
    """How the gradients of a module are split by sample, fastest first."""

    SHARED = "mapped over samples, parameters shared"
    COPIES = "mapped over samples, each with its own copy of the parameters"
    LOOP = "one sample at a time"


@dataclass(frozen=True)
class AnyLayer:
    """Per-sample gradients of `module` for calls with fixed sample axes.

    Attributes:
        module: the module.
        inputs: sample axis of each tensor among the inputs, in `tree_flatten` order.
        outputs: sample axis of each output that takes a gradient.
        picks: indices of these outputs among the output tensors.
        mode: how the module is mapped over the samples.
    """

    module: nn.Module
    inputs: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    picks: tuple[int, ...]
    mode: Mode

    def __call__(
        self, inputs: Any, deltas: Sequence[Tensor], names: Sequence[str], n: int
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return name -> per-sample gradients [sample, *parameter], and ⟨output_i, δ_i⟩ [sample].

        Args:
            inputs: (args, kwargs) of the call.
            deltas: δ for each output in `outputs`.
            names: the module's own names of the requested parameters.
            n: number of samples.
        """
        own = dict(self.module.named_parameters())
        parameters = {name: own[name].detach() for name in names}
        leaves, spec = tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = _Call(self, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        if self.mode is Mode.LOOP:
            return self._loop(call, parameters, tensors, deltas, n)
        return self._mapped(call, parameters, tensors, deltas, n)

    def _mapped(
        self,
        call: _Call,
        parameters: dict[str, Tensor],
        tensors: list[Tensor],
        deltas: Sequence[Tensor],
        n: int,
    ) -> tuple[dict[str, Tensor], Tensor]:
        copies = self.mode is Mode.COPIES
        if copies:
            parameters = {name: p.expand(n, *p.shape) for name, p in parameters.items()}
        dims = (0 if copies else None, [a.at for a in self.inputs], [a.at for a in self.outputs])
        with warnings.catch_warnings():
            # torch maps some operations with an internal loop. This is slow but correct.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            each = vmap(grad_and_value(call), in_dims=dims, randomness="different")
            return each(parameters, tensors, list(deltas))

    def _loop(
        self,
        call: _Call,
        parameters: dict[str, Tensor],
        tensors: list[Tensor],
        deltas: Sequence[Tensor],
        n: int,
    ) -> tuple[dict[str, Tensor], Tensor]:
        rows = [
            _alone(
                call, parameters, _sample(tensors, self.inputs, i), _sample(deltas, self.outputs, i)
            )
            for i in range(n)
        ]
        gradients = {name: torch.stack([g[name] for g, _ in rows]) for name in parameters}
        return gradients, torch.stack([value for _, value in rows])


class _Call:
    """⟨output, δ⟩ of one sample as a function of the parameters."""

    def __init__(self, layer: AnyLayer, constants: list[Any], spec: Any) -> None:
        self._layer, self._constants, self._spec = layer, constants, spec

    def __call__(
        self, parameters: dict[str, Tensor], tensors: list[Tensor], deltas: list[Tensor]
    ) -> Tensor:
        layer = self._layer
        given = iter(
            t if axis.at is None else t.unsqueeze(axis.at)
            for t, axis in zip(tensors, layer.inputs, strict=True)
        )
        leaves = [next(given) if constant is _TENSOR else constant for constant in self._constants]
        args, kwargs = self._spec.unflatten(leaves)
        output = call_with(layer.module, parameters, args, kwargs)
        outputs = [o for o in tree_leaves(output) if isinstance(o, Tensor)]
        products = [
            (outputs[pick].squeeze(axis.at or 0) * delta).sum()
            for pick, axis, delta in zip(layer.picks, layer.outputs, deltas, strict=True)
        ]
        return torch.stack(products).sum()


def call_with(
    module: nn.Module,
    parameters: dict[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call the module with other tensors as its parameters, named as in `named_parameters`.

    If a layer occurs twice in the module, `functional_call(tie_weights=True)` never removes the
    tensors from the module (https://github.com/pytorch/pytorch/issues/164759). This function
    therefore fills each occurrence itself.
    """
    own = dict(module.named_parameters())
    given = {id(own[name]): tensor for name, tensor in parameters.items()}
    places = {
        f"{path}.{name}".lstrip("."): given[id(p)]
        for path, child in module.named_modules()  # each module once
        for name, p in child._parameters.items()
        if id(p) in given
    }
    return functional_call(module, places, args, kwargs, tie_weights=False)


def _sample(tensors: Sequence[Tensor], axes: Sequence[Axis], i: int) -> list[Tensor]:
    """Return the i-th sample of each tensor."""
    return [
        t if axis.at is None else t.select(axis.at, i)
        for t, axis in zip(tensors, axes, strict=True)
    ]


def _alone(
    call: _Call, parameters: dict[str, Tensor], tensors: list[Tensor], deltas: list[Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return gradient and value for one sample by ordinary autograd."""
    with torch.enable_grad():
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        value = call(leaves, tensors, deltas)
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    zeros = (torch.zeros_like(p) for p in leaves.values())
    # The gradients of embeddings may be sparse.
    filled = [z if g is None else g.to_dense() for g, z in zip(gradients, zeros, strict=True)]
    return dict(zip(leaves, filled, strict=True)), value.detach()
