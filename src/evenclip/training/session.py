"""What accompanies a training without changing it: progress, checkpoints, logs and Ctrl-C."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenclip import check
from evenclip.training import checkpoint as checkpoints
from evenclip.training.checkpoint import CheckpointError
from evenclip.training.logs.log import Log, flat
from evenclip.training.progress import Interrupt, Progress
from evenclip.training.result import Result
from evenclip.training.run import Run
from evenclip.training.step import Step

__all__ = ["AfterStep", "EpochLogger", "Observer", "Session", "start"]

Observer = Callable[[Step], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Session:
    """Observers, logs, checkpoints and progress of a training; see the arguments of `fit`."""

    observers: Sequence[Observer] = ()
    logs: Sequence[Log] = ()
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            check.natural(checkpoint_every=self.checkpoint_every)

    @property
    def folder(self) -> Path | None:
        """The folder for checkpoints."""
        return None if self.checkpoint is None else Path(self.checkpoint)


def start(run: Run, folder: Path | None, resume: bool) -> None:
    """Restore the last checkpoint in the folder, if there is one and `resume` is True."""
    last = None if folder is None else run.ranks.first(checkpoints.latest(folder))
    if resume and folder is None:
        raise ValueError(
            "resume=True needs the folder with the checkpoint; pass checkpoint=DIR too."
        )
    if folder is not None and last is None and run.ranks.leads:
        _create(folder)
    if last is None:
        return
    if not resume:
        raise CheckpointError(
            f"{folder} already holds a checkpoint ({last.name}); pass resume=True to continue "
            "from it, or choose another folder."
        )
    run.restore(last)


class EpochLogger:
    """Write every finished epoch and the privacy report to the logs."""

    def __init__(self, run: Run, logs: Sequence[Log]) -> None:
        self._run, self._logs, self._written = run, logs, len(run.trace.rows)
        self._groups = run.data.group_names

    def __call__(self) -> None:
        """Write the epochs that have ended since the last call."""
        for row in self._run.trace.rows[self._written :]:
            self._written += 1
            for log in self._logs:
                log.epoch(row["epoch"], flat(row, self._groups))

    def end(self, result: Result) -> None:
        """Write the privacy report."""
        if self._logs:
            report = result.privacy
            for log in self._logs:
                log.end(report)


class AfterStep:
    """What `fit` does after each step: progress, checkpoints, logs, and stopping on Ctrl-C."""

    def __init__(
        self,
        run: Run,
        session: Session,
        logger: EpochLogger,
        progress: Progress,
        interrupt: Interrupt,
    ) -> None:
        self._run, self._folder, self._every = run, session.folder, session.checkpoint_every
        self._logger, self._progress, self._interrupt = logger, progress, interrupt

    def __call__(self, t: int) -> None:
        """Do this after `t` steps; raise KeyboardInterrupt if Ctrl-C was pressed."""
        run, settings = self._run, self._run.settings
        self._progress(t, f"epoch {math.ceil(t / settings.epoch)}")
        # Read once: if Ctrl-C came between saving and the message, the message would be wrong.
        stop = run.ranks.stops(self._interrupt.came, t)
        if self._folder is not None and (
            stop or settings.ends(t) or (self._every and t % self._every == 0)
        ):
            run.save(self._folder)
        self._logger()
        if stop:
            self._progress.close()
            if run.ranks.leads:
                _print_stopped(self._folder, t, settings.steps)
            raise KeyboardInterrupt


def _create(folder: Path) -> None:
    """Create the folder for checkpoints now, so that errors surface before the first epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot hold checkpoints ({error.strerror}); choose another folder."
        ) from error


def _print_stopped(folder: Path | None, t: int, steps: int) -> None:
    """Print where an interrupted run stopped, and whether it was saved."""
    if folder is None:
        outcome = "; nothing was saved (no checkpoint folder was given)."
    else:
        outcome = f", saved in {folder}; continue with resume=True."
    print(f"Stopped after step {t} of {steps}{outcome}", file=sys.stderr)
