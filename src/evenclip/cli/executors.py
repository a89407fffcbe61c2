"""`--on` and its options: the executor that carries out a command's runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from evenclip.sweep import Executor

__all__ = ["ExecutorOptions", "On"]


class On(StrEnum):
    """Names of the executors."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


# For each executor: option -> field.
_FIELDS: dict[On, dict[str, str]] = {
    On.LOCAL: {"workers": "workers"},
    On.RAY: {"ray_address": "address", "cpus_per_run": "cpus", "gpus_per_run": "gpus"},
    On.SLURM: {
        "slurm_partition": "partition",
        "slurm_account": "account",
        "slurm_minutes": "minutes",
        "slurm_jobs": "jobs",
        "cpus_per_run": "cpus",
        "gpus_per_run": "gpus",
    },
}

_PANEL = "On a cluster"


@dataclass(frozen=True)
class ExecutorOptions:
    """Options that choose an executor; see `evenclip.cli.options.grouped`."""

    workers: Annotated[
        int | None, typer.Option(help="Number of processes; default: one per core.")
    ] = None
    on: Annotated[
        On, typer.Option("--on", help="Where to carry out the runs.", rich_help_panel=_PANEL)
    ] = On.LOCAL
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a Ray head; default: $RAY_ADDRESS.", rich_help_panel=_PANEL
        ),
    ] = None
    cpus_per_run: Annotated[
        int | None,
        typer.Option(
            help="Processors per task or job; a run uses one thread.", rich_help_panel=_PANEL
        ),
    ] = None
    gpus_per_run: Annotated[
        float | None,
        typer.Option(help="GPUs per task or job; Ray accepts 0.2.", rich_help_panel=_PANEL),
    ] = None
    slurm_partition: Annotated[
        str | None, typer.Option(help="Slurm partition to submit to.", rich_help_panel=_PANEL)
    ] = None
    slurm_account: Annotated[
        str | None, typer.Option(help="Slurm account to charge.", rich_help_panel=_PANEL)
    ] = None
    slurm_minutes: Annotated[
        int | None,
        typer.Option(help="Time limit of a Slurm job; default: 60.", rich_help_panel=_PANEL),
    ] = None
    slurm_jobs: Annotated[
        int | None, typer.Option(help="Slurm jobs at a time; default: 16.", rich_help_panel=_PANEL)
    ] = None

    def executor(self) -> Executor:
        """Return the executor that `--on` names, with the given options.

        Raises:
            ValueError: an option belongs to another executor.
        """
        from evenclip.sweep import Local, Ray, Slurm

        known = _FIELDS[self.on]
        given = {n: value for n, value in vars(self).items() if n != "on" and value is not None}
        for name in given:
            if name not in known:
                owners = [f"--on {other}" for other, names in _FIELDS.items() if name in names]
                raise ValueError(
                    f"--{name.replace('_', '-')} is for {' and '.join(owners)}, "
                    f"not for --on {self.on}."
                )
        kinds: dict[On, type[Executor]] = {On.LOCAL: Local, On.RAY: Ray, On.SLURM: Slurm}
        return kinds[self.on](**{known[name]: value for name, value in given.items()})
