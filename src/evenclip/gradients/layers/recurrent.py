"""Recurrent layers: LSTM, GRU and RNN, any number of layers, in one direction or in both.

Over time such a layer is two linear layers, one of the input and one of the hidden state:

    u_t = W_ih x_t + b_ih
    v_t = W_hh h_{t−1} + b_hh
    (h_t, c_t) = cell(u_t, v_t, h_{t−1}, c_{t−1})

With δ for u and v, its gradients are those of linear layers over positions. torch's implementation
does not expose u and v. This module therefore computes the steps again with zeros added to u and v,
and differentiates with respect to the zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp

from evenclip.gradients.layers.layer import LayerGradient
from evenclip.gradients.layers.linear import Positions

__all__ = ["gradient", "takes"]

Recurrent = nn.LSTM | nn.GRU | nn.RNN
State = tuple[Tensor, Tensor]


def takes(module: nn.Module, args: Sequence[Any]) -> bool:
    """Return whether `gradient` supports this call: torch's own layer on padded sequences."""
    if type(module) not in (nn.LSTM, nn.GRU, nn.RNN) or not args:
        return False
    assert isinstance(module, Recurrent)
    drops = module.dropout > 0 and module.training and module.num_layers > 1
    own = {
        f"{name}_l{cell.name}"
        for cell in _cells(module)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    known = {name for name, _ in module.named_parameters()} <= own  # weight_norm adds others
    return (
        known
        and not drops
        and not module.proj_size
        and isinstance(args[0], Tensor)
        and args[0].ndim == 3
    )


def gradient(
    module: Recurrent,
    x: Tensor,
    state: Sequence[Tensor],
    deltas: Sequence[Tensor | None],
    names: Collection[str],
) -> LayerGradient:
    """Return the gradients of a recurrent layer.

    Args:
        module: the layer.
        x: [sample, time, in]
        state: initial state (h, c) or (h,), each [sample, layer · direction, out]; empty for zeros.
        deltas: δ of the output [sample, time, direction · out] and of the final (h, c); None for
            zeros.
        names: the requested parameters.
    """
    steps = _Steps(module, x, state)
    zeros = [
        x.new_zeros(*x.shape[:2], cell.weight_ih.shape[0])
        for cell in steps.cells
        for _ in range(steps.taps)
    ]
    outputs, pull, into = vjp(steps, *zeros, has_aux=True)  # type: ignore[misc]  # typed for has_aux=False
    signals = [
        torch.zeros_like(o) if d is None else d for o, d in zip(outputs, deltas, strict=True)
    ]
    tap_deltas = iter(pull(tuple(signals)))
    layers = []
    for cell, (a, memory) in zip(steps.cells, into, strict=True):
        u = next(tap_deltas)
        v = next(tap_deltas) if steps.taps == 2 else u
        for side, given, delta in (("ih", a, u), ("hh", memory, v)):
            own_names = {own: f"{own}_{side}_l{cell.name}" for own in ("weight", "bias")}
            requested = {own: full for own, full in own_names.items() if full in names}
            if requested:
                layers.append((Positions(given, delta, requested), requested))
    return _Joined(layers)


class _Cell(NamedTuple):
    """One layer in one direction."""

    name: str
    backwards: bool
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None


def _cells(module: Recurrent) -> Iterator[_Cell]:
    """Yield the cells layer by layer, the forward direction first."""
    for layer in range(module.num_layers):
        for suffix in ("", "_reverse") if module.bidirectional else ("",):
            name = f"{layer}{suffix}"
            weights = [getattr(module, f"weight_{side}_l{name}").detach() for side in ("ih", "hh")]
            biases = [
                getattr(module, f"bias_{side}_l{name}").detach() if module.bias else None
                for side in ("ih", "hh")
            ]
            yield _Cell(name, bool(suffix), weights[0], weights[1], biases[0], biases[1])


class _Steps:
    """The layer's steps as a function of the terms added to every u.

    A GRU uses u and v differently, so there every v has its own added term.
    """

    def __init__(self, module: Recurrent, x: Tensor, state: Sequence[Tensor]) -> None:
        self.cells = tuple(_cells(module))
        self.taps = 2 if isinstance(module, nn.GRU) else 1
        self._x, self._cell = x, _cell(module)
        self._directions = 2 if module.bidirectional else 1
        zeros = x.new_zeros(x.shape[0], len(self.cells), module.hidden_size)
        # A layer without c gets one that stays 0.
        self._state = [*state, *(zeros for _ in range(2 - len(state)))]
        self._state_size = 2 if isinstance(module, nn.LSTM) else 1

    def __call__(self, *zeros: Tensor) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
        """Return (output, final state) and the inputs of every cell's two linear layers."""
        x, added = self._x, iter(zeros)
        ends, outs, into = list[State](), list[Tensor](), list[tuple[Tensor, Tensor]]()
        for i, cell in enumerate(self.cells):
            taps = [next(added) for _ in range(self.taps)]
            out, memory, end = self._run_cell(i, cell, x, taps)
            outs.append(out)
            ends.append(end)
            into.append((x, memory))
            if len(outs) == self._directions:
                x, outs = torch.cat(outs, dim=2), []
        states = (torch.stack([end[k] for end in ends], dim=1) for k in range(self._state_size))
        return (x, *states), into

    def _run_cell(
        self, i: int, cell: _Cell, x: Tensor, taps: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, State]:
        """Run one cell over all times; return its outputs, previous hidden states, final state."""
        u = nn.functional.linear(x, cell.weight_ih, cell.bias_ih) + taps[0]
        us, vs = u.unbind(1), taps[1].unbind(1) if len(taps) == 2 else None
        h, c = (state[:, i] for state in self._state)
        before, after = [h] * len(us), [h] * len(us)
        for t in reversed(range(len(us))) if cell.backwards else range(len(us)):
            v = nn.functional.linear(h, cell.weight_hh, cell.bias_hh)
            before[t] = h
            h, c = self._cell(us[t], v if vs is None else v + vs[t], h, c)
            after[t] = h
        return torch.stack(after, dim=1), torch.stack(before, dim=1), (h, c)


def _cell(module: Recurrent) -> Callable[[Tensor, Tensor, Tensor, Tensor], State]:
    if isinstance(module, nn.LSTM):
        return _lstm
    if isinstance(module, nn.GRU):
        return _gru
    activation = torch.tanh if module.nonlinearity == "tanh" else torch.relu
    return lambda u, v, h, c: (activation(u + v), c)


def _lstm(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> State:
    """One LSTM step (Hochreiter and Schmidhuber 1997) as in torch."""
    del h
    i, f, g, o = (u + v).chunk(4, dim=1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> State:
    """One GRU step (Cho et al. 2014) as in torch: the reset gate is applied after W_hh h + b_hh."""
    (u_r, u_z, u_n), (v_r, v_z, v_n) = u.chunk(3, dim=1), v.chunk(3, dim=1)
    r, z = (u_r + v_r).sigmoid(), (u_z + v_z).sigmoid()
    n = torch.addcmul(u_n, r, v_n).tanh()
    return torch.lerp(n, h, z), c


class _Joined(LayerGradient):
    """The gradients of several linear layers, combined into those of one layer."""

    def __init__(self, layers: Sequence[tuple[LayerGradient, dict[str, str]]]) -> None:
        self._layers = tuple(layers)  # (gradient, names in the linear layer -> recurrent layer)
        self.cancels = any(layer.cancels for layer, _ in layers)

    def square_norms(self) -> Tensor:
        return torch.stack([layer.square_norms() for layer, _ in self._layers]).sum(dim=0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {
            names[own]: g
            for layer, names in self._layers
            for own, g in layer.weighted_sum(weights).items()
        }

    def per_sample(self) -> dict[str, Tensor]:
        return {
            names[own]: g for layer, names in self._layers for own, g in layer.per_sample().items()
        }

    def masked(self, keep: Tensor) -> _Joined:
        return _Joined([(layer.masked(keep), names) for layer, names in self._layers])
