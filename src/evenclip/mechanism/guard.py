"""What a custom rule holds is put back after every call of one of its methods.

A method is called once for all samples of a chunk, and how many chunks there are depends on the
batch. So a value that a method keeps, in an attribute, a list or a variable of a module, would
carry numbers of records to later calls, and a bound that a method changes would depend on how often
it was called. What a rule may carry from step to step is its state, which is public.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from evenclip.gradients.state import ModelState
from evenclip.rules import Rule

__all__ = ["RuleGuard"]


class RuleGuard:
    """A `with` block around a call of a rule, after which the rule holds what it held before.

    A copy guards the copied rule.

    Args:
        rule: a custom rule.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._state: ModelState | None = None

    def __enter__(self) -> None:
        """Remember what the rule holds."""
        if self._state is None:
            self._state = ModelState(self.rule, f"the rule {self.rule.name}")
        else:
            self._state.accept()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put it back.

        Raises:
            ModelError: a tensor has been changed, or something cannot be put back.
        """
        assert self._state is not None
        if error is None:
            self._state.check()

    def __getstate__(self) -> dict[str, Any]:
        return {"rule": self.rule, "_state": None}
