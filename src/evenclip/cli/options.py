"""Groups of options that several commands share.

A group is a dataclass whose fields are the options. A command takes the whole group as one
parameter, and `grouped` shows Typer the fields instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

__all__ = ["DataDir", "DataOptions", "grouped"]

DataDir = Annotated[
    Path | None, typer.Option(help="Folder with dataset files; default: $EVENCLIP_DATA.")
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter that is a group of options by the options of the group.

    Typer reads the options of a command from its signature, so the returned function has a
    signature with the fields in place of each group. When it is called, it builds the groups from
    the values of their fields and calls `command`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    parameters = []
    for parameter in _parameters(command):
        group = groups.get(parameter.name)
        parameters += [parameter] if group is None else _parameters(group)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters as keywords, with their annotations evaluated."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    ]


@dataclass(frozen=True)
class DataOptions:
    """Options for the preparation of a table."""

    test: Annotated[Path | None, typer.Option(help="File with the test rows.")] = None
    schema: Annotated[
        Path | None, typer.Option(help="Public ranges and categories; see `evenclip data schema`.")
    ] = None
    keep: Annotated[
        list[str] | None, typer.Option(help="Column to use although it would be dropped.")
    ] = None
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out.")] = None
    exclude_group: Annotated[
        bool, typer.Option("--exclude-group", help="Keep the group out of the features.")
    ] = False
    group_bins: Annotated[
        int | None, typer.Option(help="Number of bins for a numeric group column.")
    ] = None
    unit: Annotated[
        str | None, typer.Option(help="Column that identifies people; keeps one row per person.")
    ] = None
    records: Annotated[
        int | None,
        typer.Option(help="Public number of rows (of people, with --unit); default: counted."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by the names that `evenclip.data.table` uses."""
        # 0 is given, although it equals False.
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False
        }
