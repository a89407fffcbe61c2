"""Recurrent layers: LSTM, GRU and RNN, any number of layers, in one direction or in both.

Over time such a layer is two linear layers, one of what comes in and one of what is remembered,

    u_t = W_ih x_t + b_ih        v_t = W_hh h_{t−1} + b_hh        (h_t, c_t) = cell(u_t, v_t, h_{t−1}, c_{t−1})

so that with δ for u and v its gradients are those of linear layers over positions. torch's own
implementation keeps these to itself: the steps are taken once more here, with zeros added to u and
v, and differentiated by the zeros.
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
    """Whether this call of a module is one that `gradient` knows: torch's own layer on a batch of
    whole sequences.
    """
    if type(module) not in (nn.LSTM, nn.GRU, nn.RNN) or not args:
        return False
    assert isinstance(module, Recurrent)
    drops = module.dropout > 0 and module.training and module.num_layers > 1
    own = {
        f"{name}_l{cell.name}"
        for cell in _cells(module)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    known = {
        name for name, _ in module.named_parameters()
    } <= own  # weight_norm and the like bring others
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
    """The gradients of a recurrent layer.

    Args:
        module: the layer.
        x: [sample, time, in]
        state: what is remembered at the start: (h, c) or (h,), [sample, layer · direction, out]
            each; none for zeros.
        deltas: δ of the output [sample, time, direction · out], and of (h, c) at the end; None for
            zeros.
        names: of the parameters that are asked for.
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
    found = iter(pull(tuple(signals)))
    parts = []
    for cell, (a, memory) in zip(steps.cells, into, strict=True):
        u = next(found)
        v = next(found) if steps.taps == 2 else u
        for side, given, delta in (("ih", a, u), ("hh", memory, v)):
            mine = {own: f"{own}_{side}_l{cell.name}" for own in ("weight", "bias")}
            asked = {own: full for own, full in mine.items() if full in names}
            if asked:
                parts.append((Positions(given, delta, asked), asked))
    return _Joined(parts)


class _Cell(NamedTuple):
    """One layer in one direction."""

    name: str
    backwards: bool
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None


def _cells(module: Recurrent) -> Iterator[_Cell]:
    """Layer by layer, forwards first."""
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
    """The layer's steps, as a function of what is added to every u (and, where it matters apart,
    every v).
    """

    def __init__(self, module: Recurrent, x: Tensor, state: Sequence[Tensor]) -> None:
        self.cells = tuple(_cells(module))
        self.taps = 2 if isinstance(module, nn.GRU) else 1
        self._x, self._cell = x, _cell(module)
        self._directions = 2 if module.bidirectional else 1
        zeros = x.new_zeros(x.shape[0], len(self.cells), module.hidden_size)
        self._state = [
            *state,
            *(zeros for _ in range(2 - len(state))),
        ]  # those without a c have one that stays 0
        self._remembers = 2 if isinstance(module, nn.LSTM) else 1

    def __call__(self, *zeros: Tensor) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
        """(output, what is remembered at the end), and what went into every cell's two linear
        layers.
        """
        x, ends, outs, into, added = (
            self._x,
            list[State](),
            list[Tensor](),
            list[tuple[Tensor, Tensor]](),
            iter(zeros),
        )
        for i, cell in enumerate(self.cells):
            taps = [next(added) for _ in range(self.taps)]
            out, memory, end = self._one(i, cell, x, taps)
            outs.append(out)
            ends.append(end)
            into.append((x, memory))
            if len(outs) == self._directions:
                x, outs = torch.cat(outs, dim=2), []
        return (
            x,
            *(torch.stack([end[k] for end in ends], dim=1) for k in range(self._remembers)),
        ), into

    def _one(
        self, i: int, cell: _Cell, x: Tensor, taps: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, State]:
        """One cell over all times: what comes out, what was remembered before each, and at the end."""
        u = nn.functional.linear(x, cell.weight_ih, cell.bias_ih) + taps[0]
        us, vs = u.unbind(1), taps[1].unbind(1) if len(taps) == 2 else None
        h, c = (part[:, i] for part in self._state)
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
    """Hochreiter and Schmidhuber 1997, as torch has it."""
    del h
    i, f, g, o = (u + v).chunk(4, dim=1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> State:
    """Cho et al. 2014, as torch has it: the gate is on what is remembered, after its product."""
    (u_r, u_z, u_n), (v_r, v_z, v_n) = u.chunk(3, dim=1), v.chunk(3, dim=1)
    r, z = (u_r + v_r).sigmoid(), (u_z + v_z).sigmoid()
    n = torch.addcmul(u_n, r, v_n).tanh()
    return torch.lerp(n, h, z), c


class _Joined(LayerGradient):
    """Several linear layers that are one layer to everybody else."""

    def __init__(self, parts: Sequence[tuple[LayerGradient, dict[str, str]]]) -> None:
        self._parts = tuple(parts)  # gradient, its own names -> the layer's

    def square_norms(self) -> Tensor:
        return torch.stack([part.square_norms() for part, _ in self._parts]).sum(dim=0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {
            names[own]: g
            for part, names in self._parts
            for own, g in part.weighted_sum(weights).items()
        }

    def per_sample(self) -> dict[str, Tensor]:
        return {
            names[own]: g for part, names in self._parts for own, g in part.per_sample().items()
        }

    def masked(self, keep: Tensor) -> _Joined:
        return _Joined([(part.masked(keep), names) for part, names in self._parts])
