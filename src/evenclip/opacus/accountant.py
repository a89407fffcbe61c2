"""An accountant for Opacus that reads ε from a ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from opacus.accountants.accountant import IAccountant

from evenclip.mechanism import Ledger
from evenclip.mechanism.accounting import epsilon

__all__ = ["LedgerAccountant"]


class LedgerAccountant(IAccountant):  # type: ignore[misc]  # Opacus has no types
    """The accountant of an engine whose optimizers write a ledger.

    Its ε is that of `evenclip.mechanism.accounting`, by PLD. It holds the distance of the drawn
    noise from Gaussian noise, the bounds on rounding and the rate at which batches are drawn.

    Attributes:
        ledger: every release of the engine's optimizers. May be published.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()

    @property
    def history(self) -> list[tuple[float, float | None, int]]:
        """(joint multiplier, rate, number of steps) of each entry, as Opacus lists them."""
        return [(entry.joint, entry.q, entry.steps) for entry in self.ledger.entries]

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Refuse a step with Opacus's own noise, which has no entry in the ledger.

        Raises:
            RuntimeError: always.
        """
        del noise_multiplier, sample_rate
        raise RuntimeError(
            "This step has Opacus's own noise and is not in the ledger; take steps with the "
            "optimizer that even() or EvenPrivacyEngine returned."
        )

    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Return ε at δ of all steps so far; infinite if there is no valid one."""
        del args, kwargs
        spent = epsilon(self.ledger, delta)
        return math.inf if spent is None else spent

    def __len__(self) -> int:
        return self.ledger.steps

    @classmethod
    def mechanism(cls) -> str:
        """Return the name of the accountant in checkpoints."""
        return "evenclip"

    def state_dict(self, destination: Any = None) -> Any:
        """Return the ledger as plain values."""
        state = {} if destination is None else destination
        state.update(mechanism=self.mechanism(), ledger=self.ledger.to_json())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Add the steps of a checkpoint to the ledger; none is counted twice.

        Raises:
            ValueError: if the checkpoint has no ledger.
        """
        if "ledger" not in state_dict:
            raise ValueError(
                f"This checkpoint is of Opacus's accountant {state_dict.get('mechanism')!r}, whose "
                "ε is of another noise; load a checkpoint that evenclip's accountant saved."
            )
        self.add(Ledger.from_json(state_dict["ledger"]))

    def add(self, ledger: Ledger) -> None:
        """Add the steps of a ledger; none is counted twice."""
        self.ledger.entries = Ledger.union(self.ledger, ledger).entries
