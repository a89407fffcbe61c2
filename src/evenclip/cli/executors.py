"""`--on` and its options: the executor that carries out a command's runs."""

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
    """Names of the executors."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


_PANEL = "On a cluster"

Workers = Annotated[int | None, typer.Option(help="Number of processes; default: one per core.")]
OnOption = Annotated[
    On, typer.Option("--on", help="Where to carry out the runs.", rich_help_panel=_PANEL)
]
RayAddress = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray head; default: $RAY_ADDRESS.", rich_help_panel=_PANEL),
]
Cpus = Annotated[
    int | None, typer.Option(help="Processors per task or job.", rich_help_panel=_PANEL)
]
Gpus = Annotated[
    float | None,
    typer.Option(help="GPUs per task or job; Ray accepts 0.2.", rich_help_panel=_PANEL),
]
Partition = Annotated[
    str | None, typer.Option(help="Slurm partition to submit to.", rich_help_panel=_PANEL)
]
Account = Annotated[
    str | None, typer.Option(help="Slurm account to charge.", rich_help_panel=_PANEL)
]
Minutes = Annotated[
    int | None, typer.Option(help="Time limit of a Slurm job; default: 60.", rich_help_panel=_PANEL)
]
Jobs = Annotated[
    int | None, typer.Option(help="Slurm jobs at a time; default: 16.", rich_help_panel=_PANEL)
]

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


def executor(on: On, **options: Any) -> Executor:
    """Return the executor with the given options; None values are ignored.

    Raises:
        ValueError: an option belongs to another executor.
    """
    from evenclip.sweep import Local, Ray, Slurm

    known = _FIELDS[on]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known:
            owners = [f"--on {other}" for other, names in _FIELDS.items() if name in names]
            raise ValueError(
                f"--{name.replace('_', '-')} is for {' and '.join(owners)}, not for --on {on}."
            )
    kinds: dict[On, type[Executor]] = {On.LOCAL: Local, On.RAY: Ray, On.SLURM: Slurm}
    return kinds[on](**{known[name]: value for name, value in given.items()})
