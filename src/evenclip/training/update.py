"""From the noisy gradient to the next parameters, by any torch optimiser. Post-processing: it costs
no privacy.

An optimiser that treats every number alike takes its step on all parameters at once: while training
runs, they lie side by side in one vector, which is the only parameter that the optimiser knows.
Others get them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from evenclip.gradients import Layout

__all__ = ["Update", "check_pieces"]

# Each number's step depends on that number's own gradients alone, so that parameters may be joined.
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


class Update:
    """The optimiser of a run, and the parameters it moves.

    Attributes:
        is_plain: whether they are moved by θ ← θ − lr·g̃ and nothing else.
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
        """For schedulers and checkpoints. Plain SGD does without: with its first optimiser torch
        imports its compiler, which takes most of a second.
        """
        return self._make()

    @property
    def vector(self) -> Tensor:
        """The parameters as they stand, not to be changed.  # [parameter]"""
        if self._joined is not None:
            return self._joined.detach()
        return torch.cat([p.detach().reshape(-1).to(self._layout.blank) for p in self._parameters])

    def __call__(self, gradient: Tensor) -> None:
        """Move the parameters along this gradient [parameter], which is not kept or changed."""
        if self.is_plain and self._joined is not None:  # as the optimiser would, in one operation
            lr = self.optimizer.param_groups[0]["lr"] if "optimizer" in vars(self) else self._lr
            with torch.no_grad():
                self._joined.add_(gradient, alpha=-lr)
            return
        if self._joined is not None:
            self._joined.grad = gradient
        else:
            for parameter, part in zip(
                self._parameters, self._layout.split(gradient).values(), strict=True
            ):
                parameter.grad = part.to(parameter, copy=True)
        self.optimizer.step()

    @property
    def common(self) -> Tensor | None:
        """What all ranks of a run must have the same of: everything.  # [parameter]"""
        return self.vector

    def close(self) -> nn.Module:
        """The model; each parameter has memory of its own again, and no gradient."""
        for parameter in self._parameters:
            parameter.grad = None
            if self._joined is not None:
                parameter.data = parameter.data.clone()
        return self._model

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's and the optimiser's, for the checkpoint."""
        return self._model.state_dict(), self.optimizer.state_dict()

    def set_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Go on from there; raises for another model's."""
        self._model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def _join(self) -> nn.Parameter | None:
        """All parameters in one vector, of which each becomes a view."""
        with torch.no_grad():
            vector = torch.cat([parameter.reshape(-1) for parameter in self._parameters])
        for parameter, view in zip(
            self._parameters, self._layout.split(vector).values(), strict=True
        ):
            parameter.data = view
        return nn.Parameter(vector)


def is_elementwise(make: Callable[..., Optimizer]) -> bool:
    """Whether these are torch's own, with options: somebody's own function may look at the
    parameters.
    """
    return (make.func if isinstance(make, partial) else make) in _ELEMENTWISE


def are_alike(parameters: list[nn.Parameter]) -> bool:
    """Whether they can lie in one vector, and there are any."""
    kinds = {(type(p), p.dtype, p.device, p.layout) for p in parameters}
    return len(kinds) == 1 and kinds.pop()[0] is nn.Parameter


def check_pieces(make: Callable[..., Optimizer], parameters: list[nn.Parameter]) -> None:
    """Raise for an optimiser or parameters that cannot be cut into pieces, one for each rank."""
    if not is_elementwise(make):
        raise ValueError(
            "The optimiser may look at whole parameters, and each rank has a piece of them; "
            "choose one that treats every number alike, such as torch.optim.AdamW, or leave "
            "sharded out of Ranks()."
        )
    if not are_alike(parameters):
        raise ValueError(
            "The parameters have several dtypes; give them one, or leave sharded out of Ranks()."
        )
