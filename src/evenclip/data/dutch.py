"""Dutch: does a person in the 2001 census of the Netherlands have a high-level occupation?

| | |
|---|---|
| samples | 60,420, each for training with probability 0.8 |
| features | 59: sex, previous residence, 57 indicators of 9 categories; nothing is scaled |
| classes | 2, occupation: low-level (0; 5_4_9 in the file), high-level (1; 2_1) |
| groups | 2, sex: Male (0; code 1 in the file, 30,147), Female (1; code 2, 30,273) |
| source | Van der Laan (2000); file of Le Quy et al., github.com/tailequy/fairness_dataset |
| licence | none stated; the data are from Statistics Netherlands through IPUMS |

**Caveat.** The data hold working people aged 15 and over, without the middle-level occupations
(codes 3, 6, 7, 8), as in App. B of the paper. The two classes are therefore further apart than
occupations are. The features contain the group.

The preparation follows the paper (App. B, "Dataset preprocessing"). Difference from the paper's
code: the paper finds the categories on training and test rows together. Here they are a fixed list
of the values in this file; 12 values that its header declares do not occur. The sexes are balanced
in the original data.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.arguments import check_kinds
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.disk import File
from evenclip.data.sample import Coins, coins
from evenclip.data.source import Source

__all__ = ["FEATURES", "SOURCE", "dutch"]

ORIGIN = "https://github.com/tailequy/fairness_dataset, folder Dutch_census"
FILE = File(
    "dutch/dutch_census_2001.arff",
    "0e7e3f32668919c239db820f625815e1ea834c71402cdea595e03ef08c8616ef",
)
TRAINING = 0.8  # probability that a row is for training
RECORDS = 48_336  # public: 0.8 of the 60,420 rows

CATEGORIES = {
    "age": ("4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"),
    "household_position": ("1110", "1121", "1122", "1131", "1132", "1140", "1210", "1220"),
    "household_size": ("111", "112", "113", "114", "125", "126"),
    "citizenship": ("1", "2", "3"),
    "country_birth": ("1", "2", "3"),
    "edu_level": ("0", "1", "2", "3", "4", "5"),
    "economic_status": ("111", "112", "120"),
    "cur_eco_activity": (
        "111",
        "122",
        "124",
        "131",
        "132",
        "133",
        "134",
        "135",
        "136",
        "137",
        "138",
        "139",
    ),
    "Marital_status": ("1", "2", "3", "4"),
}

FEATURES = (
    "sex=2",
    "prev_residence_place=2",
    *(f"{column}={value}" for column, values in CATEGORIES.items() for value in values),
)
"""The 59 features in the order of x."""


def dutch(seed: int = 0, *, directory: str | Path | None = None) -> Splits:
    """Load Dutch, split about 80/20 into training and test rows.

    Args:
        seed: determines the training rows, each by itself (see `evenclip.data.sample`).
        directory: the data directory, with dutch/dutch_census_2001.arff; by default EVENCLIP_DATA.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the seed is negative, or the file is another one.
    """
    check_kinds(dutch, locals())
    columns = _columns(FILE.read(directory, ORIGIN).decode())
    drawn = coins(seed, *columns.values())
    train, test = drawn.parts(TRAINING)
    return Splits(_dataset(columns, drawn, train, RECORDS), _dataset(columns, drawn, test, None))


def _dataset(
    columns: dict[str, NDArray[np.str_]],
    drawn: Coins,
    rows: NDArray[np.int64],
    records: int | None,
) -> Dataset:
    """Return some rows as a `Dataset`."""
    features = [
        columns[name][rows] == value for name, value in (feature.split("=") for feature in FEATURES)
    ]
    return Dataset(
        torch.from_numpy(np.column_stack(features).astype(np.float32)),  # [row, 59]
        torch.from_numpy((columns["occupation"][rows] == "2_1").astype(np.int64)),
        torch.from_numpy((columns["sex"][rows] == "2").astype(np.int64)),
        group_names=("Male", "Female"),
        class_names=("low-level", "high-level"),
        name="dutch",
        records=records,
        marks=torch.from_numpy(drawn.marks[rows]),
    )


def _columns(text: str) -> dict[str, NDArray[np.str_]]:
    """Parse the columns [row] of an ARFF file, by name."""
    head, _, body = text.partition("@data")
    names = [line.split()[1] for line in head.splitlines() if line.startswith("@attribute")]
    rows = [row for row in csv.reader(body.splitlines()) if row]
    return {
        name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }


def _load(seed: int = 0, directory: str | Path | None = None) -> Splits:
    return dutch(seed, directory=directory)


SOURCE = Source(
    name="dutch",
    load=_load,
    title="Dutch: high-level occupation, census of the Netherlands 2001",
    rows=60_420,
    groups=("Male", "Female"),
    licence="none stated (Statistics Netherlands, IPUMS)",
    origin=ORIGIN,
    files=(FILE,),
    uncovered=(
        "The values of each category are those that the file has, training and test records "
        "together.",
    ),
)
