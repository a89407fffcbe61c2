"""The catalogue of datasets: description, origin, required files and loader of each, by name.

SOURCES["adult"].load(seed=0)                  training and test data
SOURCES["mnist"].missing(data_directory())     files that the data directory lacks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenclip.data.adult import GROUPS, ORIGINALS, adult
from evenclip.data.adult import ORIGIN as ADULT
from evenclip.data.celeba import ATTRIBUTES, IMAGES, PARTITION, PICTURES, celeba, images_missing
from evenclip.data.celeba import ORIGIN as CELEBA
from evenclip.data.dataset import Splits
from evenclip.data.digits import DIGITS, digits
from evenclip.data.disk import File, data_directory
from evenclip.data.dutch import FILE as DUTCH_FILE
from evenclip.data.dutch import ORIGIN as DUTCH
from evenclip.data.dutch import dutch
from evenclip.data.mnist import FILES as MNIST_FILES
from evenclip.data.mnist import ORIGIN as MNIST
from evenclip.data.mnist import mnist
from evenclip.data.toy import toy

__all__ = ["SOURCES", "File", "Source", "data_directory"]

NUMBER = (
    "The number n of training records, from which q = B/n and the number of steps follow, is "
    "read off the data."
)


@dataclass(frozen=True)
class Source:
    """A dataset of the catalogue.

    Attributes:
        name: key in the catalogue.
        title: short description.
        rows: number of records before any sampling.
        groups: names of the groups.
        licence: licence of the data.
        origin: where to get the data.
        files: files that the data directory must hold; empty if none are needed.
        load: load(seed, directory=None, **options) -> Splits; the options are those of the
            dataset's function.
        pair: the two groups whose gap is reported; None: the pair with the largest gap.
        uncovered: each access to the data that ε does not cover, as a sentence.
        incomplete: function of the data directory that returns what the existing files lack, as
            half a sentence, or None if they are complete.
        fixed_test: whether the test records are the same for every seed.
        attributes: the protected attributes that `group` chooses among; empty: the groups are
            fixed.
        options: names of further options of `load` that a comparison accepts.
        model: description of the default model, see `evenclip.sweep.describe`; None: the default
            model of tables.
    """

    name: str
    title: str
    rows: int
    groups: tuple[str, ...]
    licence: str
    origin: str
    files: tuple[File, ...]
    load: Callable[..., Splits]
    pair: tuple[str, str] | None
    uncovered: tuple[str, ...]
    incomplete: Callable[[Path], str | None] | None = None
    fixed_test: bool = False
    attributes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    model: Mapping[str, Any] | None = None

    def missing(self, directory: Path | None) -> tuple[File, ...]:
        """Return the files that the data directory lacks."""
        return tuple(file for file in self.files if file.find(directory) is None)

    def lacks(self, directory: Path | None) -> str | None:
        """Return why the dataset cannot be loaded, as half a sentence; None if it can."""
        absent = self.missing(directory)
        if absent:
            paths = ", ".join(file.path for file in absent)
            return f"{paths} {'is' if len(absent) == 1 else 'are'} missing"
        return None if self.incomplete is None or directory is None else self.incomplete(directory)

    def here(self, directory: Path | None) -> bool:
        """Return whether the dataset can be loaded."""
        return self.lacks(directory) is None


def _load_adult(seed: int = 0, directory: str | Path | None = None, **options: Any) -> Splits:
    """Load Adult from UCI's files if the directory has them, else from the packaged copy.

    Both hold the same data.
    """
    place = data_directory(directory)
    originals = all(file.find(place) for file in ORIGINALS)
    return adult(seed, directory=place if originals else None, **options)


def _load_dutch(seed: int = 0, directory: str | Path | None = None) -> Splits:
    return dutch(seed, directory=directory)


def _load_mnist(seed: int = 0, directory: str | Path | None = None) -> Splits:
    return mnist(seed, directory=directory)


def _load_celeba(seed: int = 0, directory: str | Path | None = None, **options: Any) -> Splits:
    return celeba(seed, directory=directory, **options)


def _load_digits(seed: int = 0, directory: str | Path | None = None) -> Splits:
    """Load the digits; scikit-learn holds them, so the directory is ignored."""
    return digits(seed)


def _load_toy(seed: int = 0, directory: str | Path | None = None, **options: Any) -> Splits:
    """Generate the toy data; the directory is ignored."""
    return toy(seed, **options)


def _celeba_lacks(directory: Path) -> str | None:
    """Return how many images a copy of CelebA lacks, as half a sentence; None if none."""
    absent = images_missing(directory)
    return f"{absent:,} of {IMAGES:,} images are missing" if absent > 0 else None


_LISTED = (
    Source(
        name="adult",
        title="Adult: income above 50,000 dollars, US census 1994",
        rows=45_222,
        groups=GROUPS["sex"],
        licence="CC BY 4.0",
        origin=ADULT,
        files=(),
        load=_load_adult,
        pair=None,
        uncovered=(
            "The mean and the standard deviation that five features are scaled by are those of "
            "the training records.",
            "The probability of keeping a record, which balances the groups, is computed from "
            "the sizes of the groups.",
            NUMBER,
        ),
        attributes=tuple(GROUPS),
    ),
    Source(
        name="dutch",
        title="Dutch: high-level occupation, census of the Netherlands 2001",
        rows=60_420,
        groups=("Male", "Female"),
        licence="none stated (Statistics Netherlands, IPUMS)",
        origin=DUTCH,
        files=(DUTCH_FILE,),
        load=_load_dutch,
        pair=None,
        uncovered=(
            "The values of each category are those that the file has, training and test records "
            "together.",
            NUMBER,
        ),
    ),
    Source(
        name="mnist",
        title="MNIST: handwritten digits, with few eights",
        rows=70_000,
        groups=DIGITS,
        licence="none stated",
        origin=MNIST,
        files=tuple(MNIST_FILES.values()),
        load=_load_mnist,
        pair=("2", "8"),
        uncovered=(NUMBER,),
        fixed_test=True,
    ),
    Source(
        name="celeba",
        title="CelebA: faces labelled male, with and without eyeglasses",
        rows=IMAGES,
        groups=("no eyeglasses", "eyeglasses"),
        licence="non-commercial research, no redistribution",
        origin=CELEBA,
        files=(PICTURES, ATTRIBUTES, PARTITION),
        load=_load_celeba,
        pair=None,
        uncovered=(NUMBER,),
        incomplete=_celeba_lacks,
        options=("allow_partial", "side"),
    ),
    Source(
        name="digits",
        title="Digits: small handwritten digits, with few eights",
        rows=1_797,
        groups=DIGITS,
        licence="see origin; comes with scikit-learn",
        origin="https://archive.ics.uci.edu/dataset/80 (UCI), through scikit-learn",
        files=(),
        load=_load_digits,
        pair=("2", "8"),
        uncovered=(NUMBER,),
        model={"name": "cnn", "options": {}},
    ),
    Source(
        name="toy",
        title="Toy: synthetic, with a best accuracy that is known exactly",
        rows=2_000,
        groups=("majority", "minority"),
        licence="none needed",
        origin="generated from the seed",
        files=(),
        load=_load_toy,
        pair=None,
        uncovered=(),
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _LISTED}
"""Every dataset by its name."""
