"""Adult: does a person in the 1994 US census earn more than 50,000 dollars a year?

| | |
|---|---|
| samples | 48,842; 45,222 of them complete; about 29,390 after balancing, about 80 % to train |
| features | 98: 5 standardised numbers, 2 binary values, 91 indicators of 6 categories |
| classes | 2: at most 50K (0), more than 50K (1) |
| groups | 2, sex: Female (0), Male (1); 14,695 and 30,527 before balancing |
| | or 2, race: non-white (0), white (1); 6,319 and 38,903 |
| | or 4, age: 17-29, 30-44, 45-59, 60-90; 13,045, 17,893, 11,038 and 3,246 |
| source | Becker, B. and Kohavi, R. (1996). Adult. UCI ML Repository. doi:10.24432/C5XW20 |
| licence | CC BY 4.0; this package joins and compresses the two files and changes no value |

**Caveat.** The data are an extract of a 1994 survey. Sex and race are recorded as its form had
them, and the income threshold is arbitrary and old. Use them to compare methods, not to draw
conclusions about people (Ding, Hardt, Miller and Schmidt 2021, "Retiring Adult"). The features
contain the group.

The preparation follows the paper (App. B, "Dataset preprocessing"). The paper names sex, binary
race and binned age as usual choices and takes sex. Race stays binary when it is the group: of five
races the smallest has 353 people, and balancing would leave 1,765 rows. The age bins are our
choice: public, about fifteen years wide. The two binary features are 1 for the smaller group, as in
the paper's code. The coding matters: DPSGD's training loss of males is 0.79 with it (0.78 printed)
and 0.89 with the opposite one.

Difference from the paper's code: the paper fits scaling and categories on training and test rows
together. Here the categories are fixed public lists and the scaling is fitted on the training rows.
ε does not cover the scaling. The balancing probabilities are constants, and each row is kept and
put into a part by its own coin (`evenclip.data.sample`). The paper's text has 14,000 of each sex;
its ε is that of the 14,695 here.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.arguments import check_kinds
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.disk import File, data_directory
from evenclip.data.sample import Coins, coins
from evenclip.data.source import Source

__all__ = ["FEATURES", "GROUPS", "SOURCE", "adult"]

ORIGIN = "https://archive.ics.uci.edu/dataset/2/adult"
ORIGINALS = (
    File("adult/adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    File("adult/adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)

COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)

NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")

RACES = ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White")
SEXES = ("Female", "Male")
INCOMES = ("<=50K", ">50K")

# Public lists, so that the number of features does not depend on the rows (Holand-Netherlands has
# only one). Never-worked is left out because none of its rows has an occupation.
CATEGORIES = {
    "workclass": (
        "Federal-gov",
        "Local-gov",
        "Private",
        "Self-emp-inc",
        "Self-emp-not-inc",
        "State-gov",
        "Without-pay",
    ),
    "education": (
        "10th",
        "11th",
        "12th",
        "1st-4th",
        "5th-6th",
        "7th-8th",
        "9th",
        "Assoc-acdm",
        "Assoc-voc",
        "Bachelors",
        "Doctorate",
        "HS-grad",
        "Masters",
        "Preschool",
        "Prof-school",
        "Some-college",
    ),
    "marital-status": (
        "Divorced",
        "Married-AF-spouse",
        "Married-civ-spouse",
        "Married-spouse-absent",
        "Never-married",
        "Separated",
        "Widowed",
    ),
    "occupation": (
        "Adm-clerical",
        "Armed-Forces",
        "Craft-repair",
        "Exec-managerial",
        "Farming-fishing",
        "Handlers-cleaners",
        "Machine-op-inspct",
        "Other-service",
        "Priv-house-serv",
        "Prof-specialty",
        "Protective-serv",
        "Sales",
        "Tech-support",
        "Transport-moving",
    ),
    "relationship": (
        "Husband",
        "Not-in-family",
        "Other-relative",
        "Own-child",
        "Unmarried",
        "Wife",
    ),
    "native-country": (
        "Cambodia",
        "Canada",
        "China",
        "Columbia",
        "Cuba",
        "Dominican-Republic",
        "Ecuador",
        "El-Salvador",
        "England",
        "France",
        "Germany",
        "Greece",
        "Guatemala",
        "Haiti",
        "Holand-Netherlands",
        "Honduras",
        "Hong",
        "Hungary",
        "India",
        "Iran",
        "Ireland",
        "Italy",
        "Jamaica",
        "Japan",
        "Laos",
        "Mexico",
        "Nicaragua",
        "Outlying-US(Guam-USVI-etc)",
        "Peru",
        "Philippines",
        "Poland",
        "Portugal",
        "Puerto-Rico",
        "Scotland",
        "South",
        "Taiwan",
        "Thailand",
        "Trinadad&Tobago",
        "United-States",
        "Vietnam",
        "Yugoslavia",
    ),
}

FEATURES = (
    *NUMBERS,
    "race=other",
    "sex=Female",
    *(f"{column}={value}" for column, values in CATEGORIES.items() for value in values),
)
"""The 98 features in the order of x."""

GROUPS = {
    "sex": SEXES,
    "race": ("non-white", "white"),
    "age": ("17-29", "30-44", "45-59", "60-90"),
}
"""The protected attributes that can be chosen, and their groups."""

TRAINING = 0.8  # probability that a kept row is for training
_SIZES = {  # public: the complete rows of each group
    "sex": (14_695, 30_527),
    "race": (6_319, 38_903),
    "age": (13_045, 17_893, 11_038, 3_246),
}
_TEXT = "S32"  # longer than every known value, so that a truncated value is never a known one
AGES = (30, 45, 60)  # lowest age of each bin after the first


class _AdultRows(NamedTuple):
    """The rows without missing values, before balancing, splitting and scaling."""

    raw: NDArray[np.bytes_]  # [row], all fields of the file
    numbers: NDArray[np.float64]  # [row, 5], unscaled
    indicators: NDArray[np.float32]  # [row, 93], the other features, in their final form
    income: NDArray[np.int64]  # [row]
    groups: dict[str, NDArray[np.int64]]  # protected attribute -> [row], codes in `GROUPS`


def adult(seed: int = 0, *, directory: str | Path | None = None, group: str = "sex") -> Splits:
    """Load Adult, balanced between the groups and split about 80/20 into training and test rows.

    Each row is kept with probability (size of the smallest group ÷ size of its own group, both
    constants): every female, and a male with probability 14,695/30,527. A kept row is for training
    with probability 0.8. The numbers are standardised by mean and standard deviation of the
    training rows. The 98 features are the same for every `group`.

    Args:
        seed: determines which rows are kept and which are used for training.
        directory: a folder with UCI's own adult/adult.data and adult/adult.test. By default the
            copy in this package is used; it holds the same data.
        group: the protected attribute, "sex", "race" or "age".

    Raises:
        FileNotFoundError: the directory lacks one of the two files.
        ValueError: the seed is negative, the attribute is unknown, or a file is not UCI's.

    >>> train, test, _ = adult()
    >>> list(train.x.shape[1:]), train.group_names, 0.49 < train.group.double().mean() < 0.51
    ([98], ('Female', 'Male'), tensor(True))
    """
    check_kinds(adult, locals())
    if group not in GROUPS:
        raise ValueError(
            f"group is {group!r}; Adult's protected attributes are {', '.join(map(repr, GROUPS))}."
        )
    table = _embedded() if directory is None else _original(*_files(directory))
    drawn, sizes = coins(seed, table.raw), np.array(_SIZES[group])
    kept = np.flatnonzero(drawn.kept((sizes.min() / sizes)[table.groups[group]]))
    train, test = (kept[part] for part in drawn.at(kept).parts(TRAINING))
    records = round(TRAINING * len(sizes) * sizes.min())
    mean, std = table.numbers[train].mean(0), table.numbers[train].std(0)  # [5]
    scaled = table._replace(numbers=(table.numbers - mean) / std)
    return Splits(
        _dataset(scaled, drawn, train, group, records), _dataset(scaled, drawn, test, group, None)
    )


def _dataset(
    table: _AdultRows, drawn: Coins, rows: NDArray[np.int64], group: str, records: int | None
) -> Dataset:
    """Return some rows of the table as a `Dataset`."""
    numbers = table.numbers[rows].astype(np.float32)
    x = np.concatenate([numbers, table.indicators[rows]], axis=1)  # [row, 98]
    return Dataset(
        torch.from_numpy(x),
        torch.from_numpy(table.income[rows]),
        torch.from_numpy(table.groups[group][rows]),
        group_names=GROUPS[group],
        class_names=INCOMES,
        name="adult",
        records=records,
        marks=torch.from_numpy(drawn.marks[rows]),
    )


@lru_cache(maxsize=1)
def _embedded() -> _AdultRows:
    """Read the copy in this package; cached, because studies load it with many seeds."""
    packed = resources.files("evenclip.data").joinpath("files", "adult.csv.xz").read_bytes()
    return _table(lzma.decompress(packed).decode().splitlines()[1:])


def _files(directory: str | Path) -> list[bytes]:
    """Read UCI's two files, training file first."""
    origin = f"{ORIGIN} (without a directory, the copy in this package is used)"
    return [file.read(directory, origin) for file in ORIGINALS]


@lru_cache(maxsize=1)
def _original(*files: bytes) -> _AdultRows:
    """Parse the contents of UCI's files; comments and trailing full stops are removed."""
    rows = [row for file in files for row in file.decode().splitlines()]
    return _table(row.rstrip(".") for row in rows if row and not row.startswith("|"))


def _table(lines: Iterable[str]) -> _AdultRows:
    """Encode the rows without missing values."""
    complete = [line.replace(", ", ",") for line in lines if "?" not in line]
    kinds = [(column, np.float64 if column in NUMBERS else _TEXT) for column in COLUMNS]
    values = np.loadtxt(complete, dtype=kinds, delimiter=",", comments=None)  # faster than csv
    white = _codes("race", values["race"], RACES) == RACES.index("White")
    sex = _codes("sex", values["sex"], SEXES)
    one_hot = [
        np.eye(len(names), dtype=np.float32)[_codes(column, values[column], names)]
        for column, names in CATEGORIES.items()
    ]
    numbers = np.column_stack([values[column] for column in NUMBERS])
    age = np.digitize(numbers[:, NUMBERS.index("age")], AGES)
    indicators = np.column_stack([~white, sex == SEXES.index("Female"), *one_hot])
    return _AdultRows(
        raw=np.array([line.encode() for line in complete]),
        numbers=numbers,
        indicators=indicators.astype(np.float32),
        income=_codes("income", values["income"], INCOMES),
        groups={"sex": sex, "race": white.astype(np.int64), "age": age.astype(np.int64)},
    )


def _codes(column: str, values: NDArray[np.bytes_], names: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each value in `names`."""
    known = np.array(names, dtype=_TEXT)
    order = np.argsort(known)
    codes: NDArray[np.int64] = order[np.searchsorted(known[order], values).clip(max=len(names) - 1)]
    unknown = values[known[codes] != values]
    if len(unknown):
        value = unknown[0].decode("latin1")
        raise ValueError(f"{column} has the value {value!r}, unknown in Adult; is this UCI's file?")
    return codes


def _load(seed: int = 0, directory: str | Path | None = None, **options: Any) -> Splits:
    """Load Adult from UCI's files if the directory has them, else from the packaged copy.

    Both hold the same data.
    """
    place = data_directory(directory)
    originals = all(file.find(place) for file in ORIGINALS)
    return adult(seed, directory=place if originals else None, **options)


SOURCE = Source(
    name="adult",
    load=_load,
    title="Adult: income above 50,000 dollars, US census 1994",
    rows=45_222,
    groups=GROUPS["sex"],
    licence="CC BY 4.0",
    origin=ORIGIN,
    uncovered=(
        "The mean and the standard deviation that five features are scaled by are those of the "
        "training records.",
    ),
    attributes=tuple(GROUPS),
)
