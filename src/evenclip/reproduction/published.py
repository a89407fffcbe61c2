"""The paper's printed numbers: Tables 1 to 5, and its claims of significance.

    load("adult").cell("dpsgd", "accuracy", "Male")      69.9 ± 0.4

Esipova et al. 2023, "Disparate Impact in Differential Privacy from Gradient Misalignment".
Accuracies and privacy costs are in percent. Two caveats apply to comparisons:

- Loss and excessive risk in Tables 2 to 5 are those of the running training loss of the last epoch,
  although the text speaks of the test set.
- A printed gap is the gap of the printed means, up to rounding. Two gaps of Adult have a standard
  error above their mean, which is impossible for the mean of |π_a − π_b| over seeds. So compare
  with the gap of the means.
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
"""The names of Tables 1 to 5, in this order."""

_PRINTED = re.compile(r"(-?\d+\.(\d+))(?: ± (\d+\.(\d+)))?")


@dataclass(frozen=True)
class Printed:
    """A printed number.

    >>> print(Printed.parse("0.520 ± 0.001"), Printed.parse("5.90"))
    0.520 ± 0.001 5.90

    Attributes:
        mean: the number.
        se: its standard error; None if none is printed.
        digits: number of digits after the point, in both.
    """

    mean: float
    se: float | None
    digits: int

    @classmethod
    def parse(cls, text: str) -> Printed:
        """Parse "69.9 ± 0.4" or "69.9"; both numbers must have the same number of decimals.

        Raises:
            ValueError: if the text has another form.
        """
        match = _PRINTED.fullmatch(text)
        if match is None or (match[4] is not None and len(match[4]) != len(match[2])):
            raise ValueError(
                f"{text!r} is not a printed number; write 69.9 ± 0.4 or 69.9, with the same number "
                "of decimals in both."
            )
        return cls(float(match[1]), None if match[3] is None else float(match[3]), len(match[2]))

    def __str__(self) -> str:
        mean = f"{self.mean:.{self.digits}f}"
        return mean if self.se is None else f"{mean} ± {self.se:.{self.digits}f}"


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper.

    Attributes:
        name: name of the dataset, or "directions".
        title: caption.
        number: number in the paper.
        label: label in the paper's source.
        groups: names of the two groups, in printed order.
        epsilon: ε of DPSGD. That of DPSGD-F is "negligibly higher", and that of DPSGD-Global-Adapt
            is the same "to three significant digits". None for Table 1, which has no noise.
        delta: δ; None for Table 1.
        rows: row -> column -> one number for each group, or one number for a gap. A row is a rule,
            or in Table 1 the kept error. The columns are accuracy, privacy_cost, privacy_cost_gap,
            loss, excessive_risk and excessive_risk_gap; a row may lack some of them.
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
        """Return one number; a gap has no group.

        >>> print(load("mnist").cell("dpsgd", "privacy_cost", "8"))
        57.9 ± 1.3
        >>> print(load("mnist").cell("dpsgd", "privacy_cost_gap"))
        48.9 ± 1.3

        Raises:
            ValueError: if the number is not in the table.
        """
        columns = self.rows[_known(row, self.rows, f"Table {self.number} has no row")]
        numbers = columns[
            _known(column, columns, f"Row {row!r} of Table {self.number} has no column")
        ]
        if len(numbers) == 1:
            if group is not None:
                raise ValueError(
                    f"{column} is one number for both groups; leave out the group {group!r}."
                )
            return numbers[0]
        if group is None:
            raise ValueError(
                f"{column} is printed for each group; give one of {', '.join(self.groups)}."
            )
        return numbers[
            self.groups.index(_known(group, self.groups, f"Table {self.number} has no group"))
        ]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper that one rule is better than another on a dataset.

    Attributes:
        dataset: name of the dataset.
        better: name of the better rule.
        worse: name of the worse rule.
        metric: accuracy (higher is better), loss, privacy_cost_gap or excessive_risk_gap (lower is
            better).
        p_below: upper bound on p of the one-sided Wilcoxon signed-rank test; None if the paper
            calls the two rules comparable.
    """

    dataset: str
    better: str
    worse: str
    metric: str
    p_below: float | None


def load(name: str) -> PublishedTable:
    """Return a table by its name in `NAMES`.

    >>> table = load("dutch")
    >>> table.number, table.groups, str(table.epsilon)
    (5, ('Male', 'Female'), '2.27')

    Raises:
        ValueError: if there is no table of that name.
    """
    table = _read(_known(name, NAMES, "The paper has no table"))
    first, second = table["groups"]
    return PublishedTable(
        name=name,
        title=table["title"],
        number=table["number"],
        label=table["label"],
        groups=(first, second),
        epsilon=Printed.parse(table["epsilon"]) if "epsilon" in table else None,
        delta=table.get("delta"),
        rows={
            row: {column: tuple(map(Printed.parse, texts)) for column, texts in columns.items()}
            for row, columns in table["rows"].items()
        },
    )


def claims(dataset: str) -> tuple[Claim, ...]:
    """Return the text's claims about a dataset, including the stated exceptions.

    There is no claim about Table 1.

    >>> [claim.metric for claim in claims("dutch") if claim.p_below is None]
    ['loss']

    Raises:
        ValueError: if the dataset is not in `NAMES`.
    """
    _known(dataset, NAMES, "The paper has no table")
    stated = _read("claims")
    comparable = [
        (e["dataset"], e["better"], e["worse"], e["metric"]) for e in stated["exceptions"]
    ]
    return tuple(
        Claim(*claim, p_below=None if claim in comparable else stated["p_below"])
        for sentence in stated["claims"]
        for claim in product(
            sentence["datasets"], sentence["better"], sentence["worse"], sentence["metrics"]
        )
        if claim[0] == dataset
    )


def _read(name: str) -> dict[str, Any]:
    """Read a TOML file of this package."""
    return tomllib.loads(
        resources.files("evenclip.reproduction")
        .joinpath("published", f"{name}.toml")
        .read_text("utf-8")
    )


def _known(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the name; raise with the message `otherwise` if it is not known."""
    if name not in known:
        raise ValueError(f"{otherwise} {name!r}; choose among {', '.join(known)}.")
    return name
