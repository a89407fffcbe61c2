"""What a key was derived from must not change while steps are taken with that key."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from evenclip.data import Dataset, Streamed
from evenclip.training.config import TrainConfig
from evenclip.training.contents import NoDigest, contents, shape
from evenclip.training.identity import digest
from evenclip.training.interventions import check_interventions
from evenclip.training.machine import machine
from evenclip.training.patches import patches

__all__ = ["Unchanged"]


class Unchanged:
    """Digests of what the key of a run with a seed was derived from, to compare with later.

    Not compared are the numbers in the model and the state of optimiser and schedule, which
    training changes, and data that are not in memory.

    Args:
        model: the model in training; None: it is not compared.
        data: the training data of this process.
        digested: their digest, as the key depends on it.
        config: the settings of the training.
        device: device of the model.
    """

    def __init__(
        self,
        model: nn.Module | None,
        data: Dataset | Streamed,
        digested: str,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        self._model, self._data, self._config, self._device = model, data, config, device
        self._before = {"data": digested, **dict(self._objects())}

    def check(self, *, after_steps: bool) -> None:
        """Raise if something has changed since.

        The model's own passes may change it, which belongs to the steps. So after steps the model
        is not compared, and later checks compare with the model as the steps left it.

        Args:
            after_steps: whether steps have been taken since the last check.

        Raises:
            RuntimeError: something has changed; the message says what.
            ValueError: a hook, a mode or an operator acts in every computation.
        """
        check_interventions()
        now = dict(self._objects())
        if after_steps:
            self._before["model"] = now["model"]
        if isinstance(self._data, Dataset):
            now["data"] = digest(self._data)
        differing = [name for name in now if now[name] != self._before[name]]
        if differing:
            raise _changed(differing)

    def check_loss(self) -> None:
        """Raise if the loss has changed since, before the guard of a step puts it back.

        Raises:
            RuntimeError: it has changed.
        """
        try:
            is_same = contents(self._config.loss) == self._before["loss"]
        except NoDigest:
            is_same = False
        if not is_same:
            raise _changed(["loss"])

    def _objects(self) -> Iterator[tuple[str, str]]:
        """Yield name and digest of what the sums are computed with."""
        config = self._config
        objects = {
            "loss": config.loss,
            "rule": config.rule,
            "functions of torch": patches(),
        }
        try:
            yield "model", shape(self._model)
            for name, value in objects.items():
                yield name, contents(value)
        except NoDigest as why:
            raise RuntimeError(
                f"Since the run was prepared, its model or its loss has changed: {why}. Leave seed "
                "out, or keep them as they are."
            ) from why
        yield from machine(self._device).items()


def _changed(names: list[str]) -> RuntimeError:
    return RuntimeError(
        f"Since the run was prepared, these have changed: {', '.join(names)}. With a seed, the "
        "noise is a function of them, so a run with the same noise and without the change would "
        "show the difference. Prepare the run again after the change, or leave seed out; do not "
        "publish what this run has released."
    )
