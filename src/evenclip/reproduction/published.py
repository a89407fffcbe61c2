"""The paper's printed numbers: Tables 1 to 5, and the differences that it calls significant.

    load("adult").cell("dpsgd", "accuracy", "Male")      69.9 ± 0.4

Esipova et al. 2023, "Disparate Impact in Differential Privacy from Gradient Misalignment".
Accuracies and privacy costs are in percent. Two things to know before comparing with them:

* Loss and excessive risk of Tables 2 to 5 are of the running training loss of the last epoch,
  although the text speaks of the test set.
* A printed gap is that of the printed means, up to rounding. Two gaps of Adult have a standard
  error above their mean, which the mean over seeds of |π_a − π_b| cannot have; so compare with the
  gap of the means.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import product
from typing import Any

__all__ = ["NAMES", "Claim", "Printed", "PublishedTable", "claims", "load"]

NAMES = ("directions", "mnist", "celeba", "adult", "dutch")
"""The tables, in the paper's order: Table 1 to Table 5."""

_PRINTED = re.compile(r"(-?\d+\.(\d+))(?: ± (\d+\.(\d+)))?")


@dataclass(frozen=True)
class Printed:
    """A number as printed.

    >>> print(Printed.parse("0.520 ± 0.001"), Printed.parse("5.90"))
    0.520 ± 0.001 5.90

    Attributes:
        mean: the number.
        se: its standard error; None where none is printed.
        digits: how many digits stand behind the point, of both.
    """

    mean: float
    se: float | None
    digits: int

    @classmethod
    def parse(cls, text: str) -> Printed:
        """From "69.9 ± 0.4" or "69.9"; both numbers have the same digits.

        Raises:
            ValueError: for any other form.
        """
        match = _PRINTED.fullmatch(text)
        if match is None or (match[4] is not None and len(match[4]) != len(match[2])):
            raise ValueError(
                f"{text!r} is no printed number; write 69.9 ± 0.4 or 69.9, with as many digits in "
                "both."
            )
        return cls(float(match[1]), None if match[3] is None else float(match[3]), len(match[2]))

    def __str__(self) -> str:
        mean = f"{self.mean:.{self.digits}f}"
        return mean if self.se is None else f"{mean} ± {self.se:.{self.digits}f}"


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper.

    Attributes:
        name: what it is asked for by: of its dataset, or "directions".
        title: its caption.
        number: its number in the paper.
        label: its label in the paper's source.
        groups: the two groups in printed order, by the dataset's names for them.
        epsilon: the dataset's ε, of DPSGD; that of DPSGD-F is "negligibly higher" and that of
            DPSGD-Global-Adapt is the same "to three significant digits". None for Table 1, which is
            without noise.
        delta: its δ; None for Table 1.
        rows: row -> column -> one number for each group, or one alone for a gap. Rows are rules by
            name, and the kept error in Table 1; columns are accuracy, privacy_cost,
            privacy_cost_gap, loss, excessive_risk and excessive_risk_gap, less those that a row
            does not have.
    """

    name: str
    title: str
    number: int
    label: str
    groups: tuple[str, str]
    epsilon: Printed | None
    delta: float | None
    rows: Mapping[str, Mapping[str, tuple[Printed, ...]]]

    def cell(self, row: str, column: str, group: str | None = None) -> Printed:
        """One number; a gap has no group.

        >>> print(load("mnist").cell("dpsgd", "privacy_cost", "8"), load("mnist").cell("dpsgd", "privacy_cost_gap"))
        57.9 ± 1.3 48.9 ± 1.3

        Raises:
            ValueError: if it is not in the table.
        """
        columns = self.rows[_known(row, self.rows, f"Table {self.number} has no row")]
        numbers = columns[
            _known(column, columns, f"Table {self.number} has in row {row!r} no column")
        ]
        if len(numbers) == 1:
            if group is not None:
                raise ValueError(
                    f"{column} is one number for both groups; ask for it without the group "
                    f"{group!r}."
                )
            return numbers[0]
        if group is None:
            raise ValueError(
                f"{column} is printed for each group; name one of {', '.join(self.groups)}."
            )
        return numbers[
            self.groups.index(_known(group, self.groups, f"Table {self.number} has no group"))
        ]


@dataclass(frozen=True)
class Claim:
    """A comparison of two rules on a dataset, as the text states it.

    Attributes:
        dataset: by name.
        better: the rule that is said to be better.
        worse: the rule that it is compared with.
        metric: accuracy (higher is better), loss, privacy_cost_gap or excessive_risk_gap (lower is
            better).
        p_below: what p is said to be below, one-sided Wilcoxon signed rank test; None where the two
            are said to be comparable.
    """

    dataset: str
    better: str
    worse: str
    metric: str
    p_below: float | None


def load(name: str) -> PublishedTable:
    """A table by name; see `NAMES`.

    >>> table = load("dutch")
    >>> table.number, table.groups, str(table.epsilon)
    (5, ('Male', 'Female'), '2.27')

    Raises:
        ValueError: for a name that is not one of them.
    """
    read = _read(_known(name, NAMES, "The paper has no table"))
    first, second = read["groups"]
    return PublishedTable(
        name=name,
        title=read["title"],
        number=read["number"],
        label=read["label"],
        groups=(first, second),
        epsilon=Printed.parse(read["epsilon"]) if "epsilon" in read else None,
        delta=read.get("delta"),
        rows={
            row: {column: tuple(map(Printed.parse, texts)) for column, texts in columns.items()}
            for row, columns in read["rows"].items()
        },
    )


def claims(dataset: str) -> tuple[Claim, ...]:
    """What the text says of a dataset's table, the stated exceptions included; nothing of Table 1.

    >>> [claim.metric for claim in claims("dutch") if claim.p_below is None]
    ['loss']

    Raises:
        ValueError: for a dataset that is not in `NAMES`.
    """
    _known(dataset, NAMES, "The paper has no table")
    read = _read("claims")
    comparable = [(e["dataset"], e["better"], e["worse"], e["metric"]) for e in read["exceptions"]]
    return tuple(
        Claim(*stated, p_below=None if stated in comparable else read["p_below"])
        for several in read["claims"]
        for stated in product(
            several["datasets"], several["better"], several["worse"], several["metrics"]
        )
        if stated[0] == dataset
    )


def _read(name: str) -> dict[str, Any]:
    """A file of this package."""
    return tomllib.loads(
        resources.files("evenclip.reproduction")
        .joinpath("published", f"{name}.toml")
        .read_text("utf-8")
    )


def _known(name: str, known: Iterable[str], otherwise: str) -> str:
    """The name, if it is known."""
    if name not in known:
        raise ValueError(f"{otherwise} {name!r}; choose among {', '.join(known)}.")
    return name
