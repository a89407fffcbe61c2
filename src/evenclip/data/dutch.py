"""Dutch: does a person in the 2001 census of the Netherlands have a high-level occupation?

| | |
|---|---|
| samples | 60,420, 80 % of them for training |
| features | 59: sex, previous residence, 57 indicators of 9 categories; nothing is scaled |
| classes | 2, occupation: low-level (0; 5_4_9 in the file), high-level (1; 2_1) |
| groups | 2, sex: Male (0; code 1 in the file, 30,147), Female (1; code 2, 30,273) |
| source | Van der Laan (2000); the file of Le Quy et al., github.com/tailequy/fairness_dataset, Dutch_census |
| licence | none stated; the data are from Statistics Netherlands through IPUMS |

**Caveat.** People of 15 and more, with work, and without the middle-level occupations (codes 3, 6,
7, 8), as App. B of the paper has it: the two classes are further apart than occupations are. The
features contain the group.

Prepared as in the paper (App. B, "Dataset preprocessing"). Differs from the paper's code: there the
categories are found on training and test rows together; here they are a fixed list, of the values
that this one file has, which leaves out 12 that its header announces. The sexes are balanced as
they come.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.data.dataset import Dataset, Splits
from evenclip.data.disk import File
from evenclip.data.sample import cut, stream

__all__ = ["FEATURES", "dutch"]

ORIGIN = "https://github.com/tailequy/fairness_dataset, folder Dutch_census"
FILE = File(
    "dutch/dutch_census_2001.arff",
    "0e7e3f32668919c239db820f625815e1ea834c71402cdea595e03ef08c8616ef",
)

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
    """Training and test rows of Dutch, split 80/20.

    Args:
        seed: decides which rows are trained on.
        directory: the data directory, with dutch/dutch_census_2001.arff; by default that of
            EVENCLIP_DATA.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: a negative seed, or another file.
    """
    numbers = stream(seed, "dutch")
    columns = _columns(FILE.read(directory, ORIGIN).decode())
    train, test = cut(np.arange(len(columns["sex"])), numbers)
    return Splits(_dataset(columns, train), _dataset(columns, test))


def _dataset(columns: dict[str, NDArray[np.str_]], rows: NDArray[np.int64]) -> Dataset:
    """These rows as tensors."""
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
    )


def _columns(text: str) -> dict[str, NDArray[np.str_]]:
    """The columns of an ARFF file by name, [row] each."""
    head, _, body = text.partition("@data")
    names = [line.split()[1] for line in head.splitlines() if line.startswith("@attribute")]
    rows = [row for row in csv.reader(body.splitlines()) if row]
    return {
        name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
