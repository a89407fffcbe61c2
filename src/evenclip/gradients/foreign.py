"""Code that would see a whole batch although a pass is mapped over its samples.

An `autograd.Function` with a `vmap` method, and an operator outside of torch's own with a mapping
rule, are called once for all samples. So are the operations of a tensor of another class than
torch's own, and of a dispatch mode, below the mapping. A model that uses one is not independent by
construction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._functorch import autograd_function
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["BatchRuleError", "foreign_operator", "is_plain_tensor", "no_batch_rules"]

_OWN = frozenset(("aten", "prim", "prims"))
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class BatchRuleError(RuntimeError):
    """A function with a mapping rule of its own, which would see the whole batch."""


@contextmanager
def no_batch_rules() -> Iterator[None]:
    """Raise `BatchRuleError` where code with its own mapping rule is mapped.

    That is an `autograd.Function` with a `vmap` method, an operator outside of torch's own, or a
    dispatch mode. Functions that `torch.compile` made run as they were written, so that all calls
    are seen.
    """
    before = autograd_function.has_overridden_vmap_rule

    def refuse(function: type[torch.autograd.Function]) -> bool:
        if before(function):
            raise BatchRuleError(
                f"{function.__name__} has its own vmap method, which sees the whole batch; use "
                "generate_vmap_rule = True instead."
            )
        return False

    def refuse_mode(mode: TorchDispatchMode) -> Any:
        if type(mode).__module__.startswith("torch."):  # torch's own, for tracing
            return enter(mode)  # type: ignore[no-untyped-call]
        raise BatchRuleError(
            f"The dispatch mode {type(mode).__name__} sees the whole batch; compute without it, or "
            'choose independence="tested".'
        )

    enter = TorchDispatchMode.__enter__
    autograd_function.has_overridden_vmap_rule = refuse  # type: ignore[assignment]
    TorchDispatchMode.__enter__ = refuse_mode  # type: ignore[method-assign]
    try:
        with _uncompiled(), _Refuse():
            yield
    finally:
        autograd_function.has_overridden_vmap_rule = before
        TorchDispatchMode.__enter__ = enter  # type: ignore[method-assign]


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions without their graphs; importing torch's compiler is slow."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def is_plain_tensor(value: Any) -> bool:
    """Return whether a tensor is of a class of torch's own, whose operations see one sample."""
    return type(value) in _TENSORS or is_wrapped(value)


def foreign_operator(compute: Callable[[], Any]) -> str | None:
    """Return what `compute` calls that is not torch's own; None if nothing.

    That is an operator, or one of torch's operators with a tensor of another class.
    """
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
            self.name = self.name or f"its operator {func.name()}"
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        other = next((leaf for leaf in given if not is_plain_tensor(leaf)), None)
        if other is not None:
            self.name = self.name or f"its tensor of the class {type(other).__name__}"
        return func(*args, **(kwargs or {}))
