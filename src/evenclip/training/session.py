"""What accompanies a training without changing it: progress, checkpoints, logs and Ctrl-C."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evenclip import check, terminal
from evenclip.arguments import check_fields, shown
from evenclip.training import checkpoint as checkpoints
from evenclip.training.checkpoint import CheckpointError
from evenclip.training.logs.log import Log, flat
from evenclip.training.progress import Interrupt, Progress
from evenclip.training.result import Result
from evenclip.training.resume import begin, is_used
from evenclip.training.run import Run
from evenclip.training.step import Step

__all__ = ["AfterStep", "EpochLogger", "Observer", "Resume", "Session", "start"]

Observer = Callable[[Step], Mapping[str, Any] | None]
Resume = bool | Literal["exact"]


@dataclass(frozen=True)
class Session:
    """Observers, logs, checkpoints and progress of a training; see the arguments of `fit`."""

    observers: Sequence[Observer] = ()
    logs: Sequence[Log] = ()
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    resume: Resume = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_fields(Session, self, [name for name in vars(self) if name != "resume"])
        if self.checkpoint_every is not None:
            check.natural(checkpoint_every=self.checkpoint_every)
        if not isinstance(self.resume, bool) and not (
            isinstance(self.resume, str) and self.resume == "exact"
        ):
            raise ValueError(
                f"resume is {shown(self.resume)}; give True to continue with new noise, 'exact' to "
                "repeat the steps that a seed determines, or False."
            )

    @property
    def folder(self) -> Path | None:
        """The folder for checkpoints."""
        return None if self.checkpoint is None else Path(self.checkpoint)


def start(run: Run, folder: Path | None, resume: Resume) -> None:
    """Restore the last checkpoint in the folder, if `resume` allows it, and write ahead there.

    If an attempt ended before its first checkpoint, the run starts from the beginning, with new
    noise unless `resume` is "exact", and the steps in the folder's journal are counted.
    """
    if resume == "exact" and run.settings.seed is None:
        raise ValueError(
            'resume="exact" repeats the steps that a seed determines; give the seed that the run '
            "was started with, or pass resume=True, which draws new noise."
        )
    if folder is None:
        if resume:
            raise ValueError(
                f"resume={resume!r} needs the folder with the checkpoint; pass checkpoint=DIR too."
            )
        return
    last = run.ranks.first(checkpoints.latest(folder))
    if not resume and (last is not None or is_used(run, folder)):
        held = "the journal of a run" if last is None else f"a checkpoint ({last.name})"
        raise CheckpointError(
            f"{folder} already holds {held}; pass resume=True to continue from it, or choose "
            "another folder."
        )
    if last is None:
        begin(run, folder, exact=resume == "exact")
    else:
        run.restore(last, exact=resume == "exact")
    run.write_ahead(folder)


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


def _print_stopped(folder: Path | None, t: int, steps: int) -> None:
    """Print where an interrupted run stopped, and whether it was saved."""
    if folder is None:
        outcome = "; nothing was saved (no checkpoint folder was given)."
    else:
        outcome = f", saved in {folder}; continue with resume=True."
    terminal.say(f"Stopped after step {t} of {steps}{outcome}", error=True)
