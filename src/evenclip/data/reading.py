"""How new rows were read: what a model could not read as the rows that it was trained with.

A value that cannot be read counts as missing, and a category that training did not have as another
one. Both change predictions, so they are counted for every column.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

from evenclip.data.values import shortened

__all__ = ["ColumnReading", "Reading"]

MOST_COLUMNS = 12  # that are described one by one


@dataclass(frozen=True)
class ColumnReading:
    """How the values of one column were read.

    Attributes:
        column: its name.
        expected: what it should hold, as the end of a sentence.
        remedy: how to write it.
        rows: number of values.
        missing: how many are missing.
        unreadable: how many are not of the kind that training had, and count as missing.
        unseen: how many are categories that training did not have, or had too rarely.
        outside: how many lie outside of the encoder's range, and count as its nearer end.
        example: the first value that is unreadable, unseen or outside, for messages.
        gaps: whether the rows of training had missing values.
        remark: what else may differ from training, as a clause.
    """

    column: str
    expected: str
    remedy: str
    rows: int
    missing: int = 0
    unreadable: int = 0
    unseen: int = 0
    outside: int = 0
    example: str | None = None
    gaps: bool = True
    remark: str | None = None

    @property
    def refused(self) -> bool:
        """Whether no value can be read although some are not missing."""
        return self.unreadable > 0 and self.unreadable + self.missing == self.rows

    @property
    def note(self) -> str | None:
        """A sentence on what is unlike training, or None."""
        number = f"of {self.rows} values"
        clauses = []
        if self.unreadable:
            clauses.append(f"{self.unreadable} {number} are not {self.expected} (read as missing)")
        if self.unseen:
            clauses.append(f"{self.unseen} {number} are not {self.expected}")
        if self.outside:
            clauses.append(f"{self.outside} {number} lie outside of its range (read as its end)")
        if clauses and self.example is not None:
            clauses[0] += f", such as {self.example}"
        if self.missing and (not self.gaps or self.missing == self.rows > 1):
            had = "" if self.gaps else ", and in training none was"
            clauses.append(f"{self.missing} {number} are missing{had}")
        if self.remark is not None:
            clauses.append(self.remark)
        return f"Column {shortened(self.column)}: {'; '.join(clauses)}." if clauses else None

    def merged(self, other: ColumnReading) -> ColumnReading:
        """Return the reading of these rows and of further ones of the same column."""
        unlike = other.unreadable + other.unseen + other.outside
        better = other.unreadable and not self.unreadable and unlike
        return replace(
            self,
            rows=self.rows + other.rows,
            missing=self.missing + other.missing,
            unreadable=self.unreadable + other.unreadable,
            unseen=self.unseen + other.unseen,
            outside=self.outside + other.outside,
            example=other.example if better or self.example is None else self.example,
            remark=other.remark if self.remark is None else self.remark,
        )


@dataclass(frozen=True)
class Reading:
    """How new rows were read, column by column.

    Attributes:
        rows: number of rows.
        columns: the columns that the model uses, in the order of its features.
    """

    rows: int
    columns: tuple[ColumnReading, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each column that is unlike training, the worst first.

        At most `MOST_COLUMNS`, and one more that counts the others.
        """
        unlike = [column for column in self.columns if column.note is not None]
        unlike.sort(key=lambda column: (-column.unreadable, -column.unseen, -column.missing))
        notes = [str(column.note) for column in unlike[:MOST_COLUMNS]]
        rest = unlike[MOST_COLUMNS:]
        if rest:
            notes.append(
                f"And {len(rest)} more columns: {sum(column.unreadable for column in rest)} values "
                f"are unreadable, {sum(column.unseen for column in rest)} are categories that "
                f"training did not have, {sum(column.missing for column in rest)} are missing."
            )
        return tuple(notes)

    def text(self, width: int = 80) -> str:
        """Return the notes as lines of at most this width; empty if there are none."""
        lines = [
            line
            for note in self.notes
            for line in textwrap.wrap(
                note, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
        ]
        if not lines:
            return ""
        return "\n".join([f"Not all of the {self.rows} rows are like those of training:", *lines])

    def check(self) -> None:
        """Raise if a column cannot be read at all.

        Raises:
            ValueError: no value of a column is of its kind, and some are not missing.
        """
        refused = [column for column in self.columns if column.refused]
        if not refused:
            return
        first = refused[0]
        others = ", ".join(repr(column.column) for column in refused[1:4])
        also = f" (nor can {others}{' and others' if len(refused) > 4 else ''})" if others else ""
        raise ValueError(
            f"Column {shortened(first.column)} cannot be read{also}: its values, such as "
            f"{first.example}, are not {first.expected}; {first.remedy}, as in the table that the "
            "model was trained with."
        )

    def merged(self, other: Reading) -> Reading:
        """Return the reading of these rows and of further ones."""
        pairs = zip(self.columns, other.columns, strict=True)
        return Reading(self.rows + other.rows, tuple(one.merged(two) for one, two in pairs))
