"""Skeletons: schemas with the names of columns and nothing else, to be filled in by hand.

The names are those of `evenclip.data.formats.column_names`, which reads no row. Nothing in a
skeleton is a function of a value, so a schema that is filled in from public knowledge says nothing
about the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenclip.data.columns import listed

__all__ = ["check_filled", "skeleton"]

FILL_IN = (
    "Only the names of the columns were read from the table. Write for each of them what is "
    "publicly known: its kind, and its range or its values."
)
EXAMPLES = (
    '{"kind": "number", "range": [0, 100]}, {"kind": "date", "range": ["1990-01-01", '
    '"2030-12-31"]}, {"kind": "category", "values": ["yes", "no"]} or {"kind": "boolean"}'
)


def skeleton(names: Sequence[str], target: str | None = None) -> dict[str, Any]:
    """Return a schema of these columns without kinds, ranges and values.

    Args:
        names: the names of the columns.
        target: the column to predict, which needs the names of its classes.

    >>> skeleton(["age", "late"], target="late")["columns"]
    {'age': {'kind': None}, 'late': {'kind': 'category', 'values': []}}
    """
    if target is not None and target not in names:
        raise ValueError(
            f"--target is {target!r}; the columns of the table are {', '.join(map(repr, names))}."
        )
    entries: dict[str, dict[str, Any]] = {name: {"kind": None} for name in names}
    if target is not None:
        entries[target] = {"kind": "category", "values": []}
    return {"evenclip_schema": 1, "fill_in": FILL_IN, "columns": entries}


def check_filled(schema: Mapping[str, Any], name: str) -> None:
    """Raise if columns of a skeleton are not filled in.

    Raises:
        ValueError: a column has no kind or no values; the message refers to the schema as `name`.
    """
    empty = [key for key, entry in schema["columns"].items() if _is_empty(entry)]
    if empty:
        raise ValueError(
            f"{name} is not filled in: {listed(empty, 20)} "
            f"{'has' if len(empty) == 1 else 'have'} no kind or no values yet. Write what is "
            f'publicly known, such as {EXAMPLES}; {{"kind": "ignore"}} leaves a column out.'
        )


def _is_empty(entry: Any) -> bool:
    """Return whether an entry is as `skeleton` wrote it."""
    return isinstance(entry, dict) and (entry.get("kind") is None or entry.get("values") == [])
