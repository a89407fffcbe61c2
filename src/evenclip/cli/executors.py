"""`--on` and what belongs to it: who carries out the runs of a command."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from evenclip.sweep import Executor

__all__ = [
    "Account",
    "Cpus",
    "Gpus",
    "Jobs",
    "Minutes",
    "On",
    "OnOption",
    "Partition",
    "RayAddress",
    "Workers",
    "executor",
]


class On(StrEnum):
    """The executors, by name."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


_PANEL = "On a cluster"

Workers = Annotated[int | None, typer.Option(help="Processes at a time; one per core by default.")]
OnOption = Annotated[
    On, typer.Option("--on", help="Who carries out the runs.", rich_help_panel=_PANEL)
]
RayAddress = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray head; RAY_ADDRESS by default.", rich_help_panel=_PANEL),
]
Cpus = Annotated[
    int | None, typer.Option(help="Processors of a task or job.", rich_help_panel=_PANEL)
]
Gpus = Annotated[
    float | None, typer.Option(help="GPUs of a task or job; Ray takes 0.2.", rich_help_panel=_PANEL)
]
Partition = Annotated[str | None, typer.Option(help="Slurm's.", rich_help_panel=_PANEL)]
Account = Annotated[str | None, typer.Option(help="Slurm's.", rich_help_panel=_PANEL)]
Minutes = Annotated[
    int | None, typer.Option(help="Until Slurm ends a job; 60 by default.", rich_help_panel=_PANEL)
]
Jobs = Annotated[
    int | None, typer.Option(help="Slurm jobs at a time; 16 by default.", rich_help_panel=_PANEL)
]

# Option -> field, of each executor.
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


def executor(on: On, **options: Any) -> Executor:
    """The executor with the options that were given.

    Raises:
        ValueError: if one of them is another executor's.
    """
    from evenclip.sweep import Local, Ray, Slurm

    known, given = (
        _FIELDS[on],
        {name: value for name, value in options.items() if value is not None},
    )
    for name in given:
        if name not in known:
            theirs = [f"--on {other}" for other, names in _FIELDS.items() if name in names]
            raise ValueError(
                f"--{name.replace('_', '-')} is for {' and '.join(theirs)}, and this is --on {on}."
            )
    kinds: dict[On, type[Executor]] = {On.LOCAL: Local, On.RAY: Ray, On.SLURM: Slurm}
    return kinds[on](**{known[name]: value for name, value in given.items()})
