"""Nothing that a step leaves in the model may leave with it, or reach the next step."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import nn

from evenclip.gradients import AnyTape, Tape
from evenclip.gradients.bits import sums
from evenclip.gradients.calls import count
from evenclip.gradients.errors import ModelError
from evenclip.gradients.losses import user_loss
from evenclip.gradients.mixing import mixing_module
from evenclip.gradients.state import ModelState
from evenclip.gradients.tape import Independence
from evenclip.training.passes import Chunk
from evenclip.training.processes import Processes

__all__ = ["ModelGuard", "state_of"]


def state_of(model: nn.Module, ranks: Processes) -> ModelState:
    """Return the state of a model that steps must not change."""
    return ModelState(model, trained=False, frozen=not ranks.sharded)


class ModelGuard:
    """Compare the state of model and loss around each step, with that before the first one.

    Layers that are known by their types keep no state, so their models are not compared.

    Args:
        tape: the tape of the run.
        independence: why samples are independent.
        ranks: the processes that train together.
        state: the model's state to compare with; None: as it is now.
    """

    def __init__(
        self,
        tape: AnyTape,
        independence: Independence,
        ranks: Processes,
        state: ModelState | None = None,
    ) -> None:
        self._tape, self._independence, self._ranks = tape, independence, ranks
        self._state: ModelState | None = None
        if independence is not Independence.LAYERS:
            self._state = state or state_of(tape.model, ranks)
        loss, own = getattr(tape, "loss", None), map(id, tape.model.parameters())
        is_compared = loss is not None and self._state is not None
        self._loss = (
            ModelState(user_loss(loss), "the loss", without={*own}) if is_compared else None
        )
        self._before: list[Any] = []

    @property
    def _states(self) -> list[ModelState]:
        return [state for state in (self._state, self._loss) if state is not None]

    @property
    def is_loss_same(self) -> bool:
        """Whether the loss holds what it held after the last step."""
        return self._loss is None or self._loss.is_same

    def reset(self) -> None:
        """Put everything back; raise for what cannot be, and for tensors that have changed."""
        for state in self._states:
            state.check()

    def _put_back(self) -> None:
        """Do the same between the passes of a step, without reading numbers."""
        for state in self._states:
            state.put_back()

    def __enter__(self) -> None:
        """Put back what the model holds, and remember the parameters."""
        for state in self._states:
            state.accept()
        if self._state is not None:
            self._before = self._trained()
            self._tape.between = self._put_back

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise if the step has changed anything."""
        self._tape.between = None
        if isinstance(error, RuntimeError) and "mutate a captured Tensor" in str(error):
            raise ModelError(
                "A pass through the model or the loss changes a tensor that it holds. What a batch "
                "leaves there would reach later steps; compute the value from one sample alone."
            ) from error
        if self._state is None or error is not None:
            return
        self.reset()
        if self._trained() != self._before:
            raise ModelError(
                "A pass through the model changes its trainable parameters, which only the noisy "
                "update may change. Build embeddings without max_norm, and layers without "
                "initialisation by their first batch."
            )

    def test(self, chunks: Sequence[Chunk]) -> None:
        """Test on a batch that its samples do not influence each other, if that is not known.

        Raises:
            ModelError: they do, on any rank.
        """
        if self._independence is not Independence.TESTED or not isinstance(self._tape, Tape):
            return
        if self._ranks.sharded:  # the test needs copies of the model
            return
        found = [self._mixing(self._tape, chunk) for chunk in chunks]
        where = next((place for place in self._ranks.each(found) for place in place if place), None)
        if where is not None:
            raise ModelError(
                f"The samples of a batch influence each other in {where}, which showed on a batch "
                "of records only. Nothing of this step is published; compute each sample by itself."
            )

    def _mixing(self, tape: Tape, chunk: Chunk) -> str | None:
        """Return what mixes the samples of a chunk; None if nothing is seen."""
        n = count(chunk.x)
        if n < 2:
            return None
        try:
            return mixing_module(tape.model, tape.loss, chunk.x, chunk.y, alone=n, changed=False)
        finally:
            self._put_back()

    def _trained(self) -> list[Any]:
        """Return what shows a change of the trainable parameters: torch's counts, sums of bits."""
        if self._ranks.sharded:
            return []
        trained = [p for p in self._tape.model.parameters() if p.requires_grad]
        return [*(p._version for p in trained), *sums(trained)]
