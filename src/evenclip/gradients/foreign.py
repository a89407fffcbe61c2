"""Code that would see a whole batch although a pass is mapped over its samples.

An `autograd.Function` with a `vmap` method, and an operator outside of torch's own with a mapping
rule, are called once for all samples. A model that uses one is not independent by construction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch import autograd_function
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchRuleError", "foreign_operator", "no_batch_rules"]

_OWN = frozenset(("aten", "prim", "prims"))


class BatchRuleError(RuntimeError):
    """A function with a mapping rule of its own, which would see the whole batch."""


@contextmanager
def no_batch_rules() -> Iterator[None]:
    """Raise `BatchRuleError` where code with its own mapping rule is mapped.

    That is an `autograd.Function` with a `vmap` method, or an operator outside of torch's own.
    Functions that `torch.compile` made run as they were written, so that all calls are seen.
    """
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
        with _uncompiled(), _Refuse():
            yield
    finally:
        autograd_function.has_overridden_vmap_rule = before


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions without their graphs; importing torch's compiler is slow."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def foreign_operator(compute: Callable[[], Any]) -> str | None:
    """Return the name of an operator outside of torch's own that `compute` calls; None if none."""
    seen = _Foreign()  # type: ignore[no-untyped-call]  # torch's class has no types
    with _uncompiled(), seen:
        compute()
    return seen.name


class _Refuse(TorchFunctionMode):
    """Raise for calls of operators outside of torch's own.

    They are seen before they are mapped, also those that would be split into torch's own. In the
    derivative of an `autograd.Function` torch switches this off, and `foreign_operator` sees them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if isinstance(func, OpOverload | OpOverloadPacket):
            packet = func.overloadpacket if isinstance(func, OpOverload) else func
            name = packet._qualified_op_name
            if name.partition("::")[0] not in _OWN:
                raise BatchRuleError(
                    f"The operator {name} may have a mapping rule, which sees the whole batch; use "
                    'torch\'s own operators, or independence="tested".'
                )
        return func(*args, **(kwargs or {}))


class _Foreign(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Remember the first operator outside of torch's own."""

    name: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Import no compiler for `__torch_dispatch__`; that is slow."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func.namespace not in _OWN:
            self.name = self.name or str(func.name())
        return func(*args, **(kwargs or {}))
