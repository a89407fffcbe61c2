"""Update the parameters with the noisy gradient, using any torch optimiser.

This is post-processing and costs no privacy.

An elementwise optimiser updates all parameters at once. During training they are views of one
vector, which is the only parameter that the optimiser has. Other optimisers get the parameters one
by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from evenclip import check
from evenclip.gradients import Layout

__all__ = ["Update", "check_pieces", "constructed"]

_CALL = "optimizer(parameters, lr=lr)"
# Optimisers whose update of an element depends on the gradients of that element alone. Parameters
# may be joined into one vector for them.
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
    )
)


def constructed(name: str, called: str, make: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return what a function of the user constructs; `name` and `called` are for messages."""
    try:
        return make(*given, **named)
    except Exception as error:
        raise ValueError(
            f"{name} failed when it was called as {called}; it raised {check.reason(error)}"
        ) from error


class Update:
    """The optimiser of a run, and the parameters it updates.

    Attributes:
        is_plain: whether the update is exactly θ ← θ − lr·g̃.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, make: Callable[..., Optimizer], lr: float
    ) -> None:
        self._model, self._layout, self._parameters = (
            model,
            layout,
            [p for p in model.parameters() if p.requires_grad],
        )
        self._joined = (
            self._join() if is_elementwise(make) and are_alike(self._parameters) else None
        )
        self._make, self._lr = (
            partial(make, self._parameters if self._joined is None else [self._joined], lr=lr),
            lr,
        )
        self.is_plain = self._joined is not None and make is SGD
        if not self.is_plain:
            _ = self.optimizer  # construct now, so that errors surface early

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimiser, for schedulers and checkpoints.

        Plain SGD constructs it only on use: with the first optimiser torch imports its compiler,
        which is slow.
        """
        optimizer: Optimizer = constructed("optimizer", _CALL, self._make)
        return optimizer

    @property
    def vector(self) -> Tensor:
        """The current parameters; do not change them in place.  # [parameter]"""
        if self._joined is not None:
            return self._joined.detach()
        return torch.cat([p.detach().reshape(-1).to(self._layout.blank) for p in self._parameters])

    def __call__(self, gradient: Tensor) -> None:
        """Update the parameters with a gradient [parameter], which is not kept or changed."""
        if self.is_plain and self._joined is not None:  # as the optimiser would, in one operation
            lr = self.optimizer.param_groups[0]["lr"] if "optimizer" in vars(self) else self._lr
            with torch.no_grad():
                self._joined.add_(gradient, alpha=-lr)
            return
        if self._joined is not None:
            self._joined.grad = gradient.to(self._joined.dtype)
        else:
            for parameter, part in zip(
                self._parameters, self._layout.split(gradient).values(), strict=True
            ):
                parameter.grad = part.to(parameter, copy=True)
        self.optimizer.step()

    @property
    def common(self) -> Tensor | None:
        """The parameters that must be equal on all ranks: all of them.  # [parameter]"""
        return self.vector

    def close(self) -> nn.Module:
        """Return the model; each parameter has separate memory again, and no gradient."""
        for parameter in self._parameters:
            parameter.grad = None
            if self._joined is not None:
                parameter.data = parameter.data.clone()
        return self._model

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's and the optimiser's state, for the checkpoint."""
        return self._model.state_dict(), self.optimizer.state_dict()

    def set_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Continue from a state; raise if it is that of another model."""
        self._model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def _join(self) -> nn.Parameter | None:
        """Return all parameters as one vector, and make each parameter a view of it."""
        with torch.no_grad():
            vector = torch.cat([parameter.reshape(-1) for parameter in self._parameters])
        self._view(vector)
        return nn.Parameter(vector)

    def _view(self, vector: Tensor) -> None:
        """Make each parameter a view of the vector."""
        views = self._layout.split(vector).values()
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy, in which no parameter is a view any more."""
        vars(self).update(state)
        if self._joined is not None:
            self._view(self._joined.data)


def is_elementwise(make: Callable[..., Optimizer]) -> bool:
    """Return whether `make` is an elementwise optimiser of torch, possibly with options.

    Any other function may inspect the parameters.
    """
    return (make.func if isinstance(make, partial) else make) in _ELEMENTWISE


def are_alike(parameters: list[nn.Parameter]) -> bool:
    """Return whether the parameters can be joined into one vector; False if there are none."""
    kinds = {(type(p), p.dtype, p.device, p.layout) for p in parameters}
    return len(kinds) == 1 and kinds.pop()[0] is nn.Parameter


def check_pieces(make: Callable[..., Optimizer], parameters: list[nn.Parameter]) -> None:
    """Raise if the optimiser or the parameters do not allow a piece per rank."""
    if not is_elementwise(make):
        raise ValueError(
            "The optimiser may use whole parameters, but each rank holds a piece of them; choose "
            "an elementwise one, such as torch.optim.AdamW, or leave sharded out of Ranks()."
        )
    if not are_alike(parameters):
        raise ValueError(
            "The parameters have several dtypes; give them one, or leave sharded out of Ranks()."
        )
