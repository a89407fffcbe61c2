"""Adult: does a person in the 1994 US census earn more than 50,000 dollars a year?

| | |
|---|---|
| samples | 48,842; 45,222 without missing values; about 29,390 after balancing, 80 % of them for training |
| features | 98: 5 standardised numbers, 2 binary values, 91 indicators of 6 categories |
| classes | 2: at most 50K (0), more than 50K (1) |
| groups | 2, sex: female (0), male (1); 14,695 and 30,527 before balancing |
| source | Becker, B. and Kohavi, R. (1996). Adult. UCI Machine Learning Repository. doi:10.24432/C5XW20 |
| licence | CC BY 4.0; the copy in this package has its two files joined and compressed, values unchanged |

**Caveat.** An extract of a 1994 survey, with sex and race as its form had them and a threshold on income that
is arbitrary and old: good for comparing methods, wrong for conclusions about people (Ding, Hardt, Miller and
Schmidt 2021, "Retiring Adult"). The features contain the group.

Prepared as in the paper (App. B, "Dataset preprocessing"). Differs from the paper's code: there, scaling and
categories are found on training and test rows together; here the categories are fixed public lists and the
scaling is fitted on the training rows. Neither the scaling nor the balancing probability is covered by ε.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.data.dataset import Dataset, Splits

__all__ = ["FEATURES", "adult"]

COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
    "income",
)  # fmt: skip

NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")

RACES = ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White")
SEXES = ("Female", "Male")
INCOMES = ("<=50K", ">50K")

# Public lists, so that the number of features does not depend on the rows: Holand-Netherlands has only one.
# Never-worked is not among them, since all its rows miss the occupation.
CATEGORIES = {
    "workclass": (
        "Federal-gov", "Local-gov", "Private", "Self-emp-inc", "Self-emp-not-inc", "State-gov", "Without-pay",
    ),
    "education": (
        "10th", "11th", "12th", "1st-4th", "5th-6th", "7th-8th", "9th", "Assoc-acdm", "Assoc-voc",
        "Bachelors", "Doctorate", "HS-grad", "Masters", "Preschool", "Prof-school", "Some-college",
    ),
    "marital-status": (
        "Divorced", "Married-AF-spouse", "Married-civ-spouse", "Married-spouse-absent", "Never-married",
        "Separated", "Widowed",
    ),
    "occupation": (
        "Adm-clerical", "Armed-Forces", "Craft-repair", "Exec-managerial", "Farming-fishing",
        "Handlers-cleaners", "Machine-op-inspct", "Other-service", "Priv-house-serv", "Prof-specialty",
        "Protective-serv", "Sales", "Tech-support", "Transport-moving",
    ),
    "relationship": (
        "Husband", "Not-in-family", "Other-relative", "Own-child", "Unmarried", "Wife",
    ),
    "native-country": (
        "Cambodia", "Canada", "China", "Columbia", "Cuba", "Dominican-Republic", "Ecuador", "El-Salvador",
        "England", "France", "Germany", "Greece", "Guatemala", "Haiti", "Holand-Netherlands", "Honduras",
        "Hong", "Hungary", "India", "Iran", "Ireland", "Italy", "Jamaica", "Japan", "Laos", "Mexico",
        "Nicaragua", "Outlying-US(Guam-USVI-etc)", "Peru", "Philippines", "Poland", "Portugal", "Puerto-Rico",
        "Scotland", "South", "Taiwan", "Thailand", "Trinadad&Tobago", "United-States", "Vietnam",
        "Yugoslavia",
    ),
}  # fmt: skip

FEATURES = (
    *NUMBERS,
    "race=White",
    "sex=Male",
    *(f"{column}={value}" for column, values in CATEGORIES.items() for value in values),
)
"""The 98 features in the order of x."""

STREAM = int.from_bytes(b"adult", "big")  # so that no other user of the same seed draws the same numbers


class Table(NamedTuple):
    """The rows without missing values, before balancing, splitting and scaling."""

    numbers: NDArray[np.float64]  # [row, 5], as recorded
    indicators: NDArray[np.float32]  # [row, 93], the other features, final
    income: NDArray[np.int64]  # [row]
    sex: NDArray[np.int64]  # [row]


def adult(seed: int = 0, *, directory: str | Path | None = None) -> Splits:
    """Training and test rows of Adult, balanced between the sexes and split 80/20.

    Each male is kept with probability (females ÷ males) before the split; every female is kept. The numbers
    are standardised by mean and standard deviation of the training rows.

    Args:
        seed: decides which males are kept and which rows are trained on.
        directory: a folder with UCI's own adult/adult.data and adult/adult.test. By default the copy in this
            package, which gives the same data.

    Raises:
        FileNotFoundError: the directory lacks one of the two files.
        ValueError: a negative seed, or a file with values that Adult does not have.

    >>> train, test = adult()
    >>> list(train.x.shape[1:]), train.group_names, 0.49 < train.group.double().mean() < 0.51
    ([98], ('female', 'male'), tensor(True))
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0.")
    table = _embedded() if directory is None else _table(_original(Path(directory)))
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, STREAM])))
    rows = stream.permutation(_balanced(table.sex, stream))
    train, test = np.split(rows, [round(0.8 * len(rows))])
    mean, std = table.numbers[train].mean(0), table.numbers[train].std(0)  # [5]
    scaled = table._replace(numbers=(table.numbers - mean) / std)
    return Splits(_dataset(scaled, train), _dataset(scaled, test))


def _balanced(sex: NDArray[np.int64], stream: np.random.Generator) -> NDArray[np.int64]:
    """The rows of all females and of about as many males."""
    male = sex == SEXES.index("Male")
    probability = np.count_nonzero(~male) / np.count_nonzero(male)  # 14,695 / 30,527
    return np.flatnonzero(~male | (stream.random(len(sex)) < probability))


def _dataset(table: Table, rows: NDArray[np.int64]) -> Dataset:
    """These rows as tensors."""
    x = np.concatenate([table.numbers[rows].astype(np.float32), table.indicators[rows]], axis=1)  # [row, 98]
    return Dataset(
        torch.from_numpy(x),
        torch.from_numpy(table.income[rows]),
        torch.from_numpy(table.sex[rows]),
        group_names=("female", "male"),
        class_names=INCOMES,
        name="adult",
    )


@lru_cache(maxsize=1)
def _embedded() -> Table:
    """The copy in this package; read once, because studies ask for many seeds."""
    packed = resources.files("evenclip.data").joinpath("files", "adult.csv.xz").read_bytes()
    return _table(lzma.decompress(packed).decode().splitlines()[1:])


def _original(directory: Path) -> list[str]:
    """The lines of UCI's two files, training file first, without comments and full stops."""
    lines: list[str] = []
    for path in (directory / "adult" / "adult.data", directory / "adult" / "adult.test"):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is not there; get it from https://archive.ics.uci.edu/dataset/2/adult, or leave out "
                "the directory to use the copy in this package."
            )
        rows = path.read_text().splitlines()
        lines += [row.rstrip(".") for row in rows if row and not row.startswith("|")]
    return lines


def _table(lines: Iterable[str]) -> Table:
    """The complete rows, with every category encoded."""
    rows = [row for row in csv.reader(lines, skipinitialspace=True) if "?" not in row]
    values = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    white = _codes("race", values["race"], RACES) == RACES.index("White")
    sex = _codes("sex", values["sex"], SEXES)
    one_hot = [
        np.eye(len(names), dtype=np.float32)[_codes(column, values[column], names)]
        for column, names in CATEGORIES.items()
    ]
    return Table(
        numbers=np.array([values[column] for column in NUMBERS], dtype=np.float64).T,
        indicators=np.column_stack([white, sex, *one_hot]).astype(np.float32),
        income=_codes("income", values["income"], INCOMES),
        sex=sex,
    )


def _codes(column: str, values: Sequence[str], names: Sequence[str]) -> NDArray[np.int64]:
    """The position of each value in `names`."""
    position = {name: code for code, name in enumerate(names)}
    try:
        return np.array([position[value] for value in values], dtype=np.int64)
    except KeyError as unknown:
        raise ValueError(f"{column} has the value {unknown}, unknown in Adult; is this UCI's file?") from None
