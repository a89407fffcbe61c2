"""Code that would see a whole batch although a pass is mapped over its samples.

An `autograd.Function` with a `vmap` method, and an operator outside of torch's own with a mapping
rule, are called once for all samples. A model that uses one is not independent by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import autograd_function
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchRuleError", "foreign_operator", "no_batch_rules"]

_OWN = frozenset(("aten", "prim", "prims"))


class BatchRuleError(RuntimeError):
    """A function with a mapping rule of its own, which would see the whole batch."""


@contextmanager
def no_batch_rules() -> Iterator[None]:
    """Raise `BatchRuleError` where an `autograd.Function` with its own `vmap` is mapped."""
    before = autograd_function.has_overridden_vmap_rule

    def refuse(function: type[torch.autograd.Function]) -> bool:
        if before(function):
            raise BatchRuleError(
                f"{function.__name__} has its own vmap method, which sees the whole batch; use "
                "generate_vmap_rule = True instead."
            )
        return False

    autograd_function.has_overridden_vmap_rule = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        autograd_function.has_overridden_vmap_rule = before


def foreign_operator(compute: Callable[[], Any]) -> str | None:
    """Return the name of an operator outside of torch's own that `compute` calls; None if none."""
    seen = _Foreign()  # type: ignore[no-untyped-call]  # torch's class has no types
    with seen:
        compute()
    return seen.name


class _Foreign(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Remember the first operator outside of torch's own."""

    name: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func.namespace not in _OWN:
            self.name = self.name or str(func.name())
        return func(*args, **(kwargs or {}))
