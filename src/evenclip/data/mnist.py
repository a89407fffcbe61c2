"""MNIST: which digit does an image show, where the training set has few eights?

| | |
|---|---|
| samples | 60,000 for training, of which about 54,676 are kept; 10,000 for testing |
| features | images [1, 28, 28], stored as bytes, returned as floats in [0, 1] |
| classes | 10, the digits |
| groups | 10, the digits again; 2 and 8 are compared |
| source | LeCun, Y., Cortes, C. and Burges, C., "The MNIST database of handwritten digits" |
| licence | none stated |

**Caveat.** The protected group is the label itself: a study of small classes, not of people.

As in the paper (App. B): in the training set each 8 is kept with probability 0.09 (about 530 of
5,851); the test set is unchanged. The probability is a constant, so it costs no privacy.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.arguments import check_kinds
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.disk import File, content_of
from evenclip.data.sample import coins
from evenclip.data.source import Source

__all__ = ["SOURCE", "mnist"]

ORIGIN = "http://yann.lecun.com/exdb/mnist/ or https://ossci-datasets.s3.amazonaws.com/mnist/"
DIGITS = tuple("0123456789")
RARE, KEPT = 8, 0.09  # App. B: "class 8 is sampled with probability 9%"
RECORDS = 54_676  # public: 54,149 images of other digits, and 0.09 of the 5,851 eights

MD5 = {  # of the unpacked files, because archives of the same file differ
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FILES = {name: File(f"mnist/{name}.gz", also=(f"mnist/{name}",)) for name in MD5}


def mnist(seed: int = 0, *, directory: str | Path | None = None) -> Splits:
    """Load MNIST with its own split and few eights in the training set.

    Args:
        seed: determines which eights are kept, each by itself (see `evenclip.data.sample`).
        directory: the data directory, with the four idx files in mnist/, as .gz or unpacked; by
            default EVENCLIP_DATA.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: the seed is negative, or a file is damaged.
    """
    check_kinds(mnist, locals())
    x, y = _part("train", directory)
    drawn = coins(seed, x, y)
    rows = np.flatnonzero(drawn.kept(np.where(y == RARE, KEPT, 1.0)))
    train = replace(
        _dataset(x[rows], y[rows]), records=RECORDS, marks=torch.from_numpy(drawn.marks[rows])
    )
    return Splits(train, _dataset(*_part("t10k", directory)))


def _part(name: str, directory: str | Path | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read images [sample, 1, 28, 28] and labels [sample] of the training or the test set."""
    images = _array(f"{name}-images-idx3-ubyte", directory)
    return images[:, None], _array(f"{name}-labels-idx1-ubyte", directory).astype(np.int64)


def _dataset(x: NDArray[np.uint8], y: NDArray[np.int64]) -> Dataset:
    """Return the images as a `Dataset` whose groups are the classes."""
    classes = torch.from_numpy(y)
    return Dataset(
        torch.from_numpy(x), classes, classes, group_names=DIGITS, class_names=DIGITS, name="mnist"
    )


def _array(name: str, directory: str | Path | None) -> NDArray[np.uint8]:
    """Read the array in a file and compare its digest with MNIST's."""
    path = FILES[name].require(directory, ORIGIN)
    content = _unpacked(path)
    array = _idx(content, path)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != MD5[name]:
        raise ValueError(
            f"{path} has the MD5 {digest} when unpacked and should have {MD5[name]}: it is "
            f"damaged or another dataset; get it again from {ORIGIN}."
        )
    return array


def _unpacked(path: Path) -> bytes:
    """Read a file and decompress it if its suffix is .gz."""
    content = content_of(path, ORIGIN)
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be unpacked ({error}): it is damaged; get it again from {ORIGIN}."
        ) from None


def _idx(content: bytes, path: Path) -> NDArray[np.uint8]:
    """Parse an array of bytes in the idx format.

    The format is: two zeros, type 8, number of axes, their lengths (4 bytes each), data.
    """
    axes = content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else 0
    start = 4 + 4 * axes
    if axes == 0 or len(content) < start:
        raise ValueError(
            f"{path} does not begin like an idx file of bytes; get it again from {ORIGIN}."
        )
    shape = [int(length) for length in np.frombuffer(content[4:start], dtype=">u4")]
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} holds {len(content) - start:,} bytes of data and its header announces "
            f"{math.prod(shape):,}: was the download cut short? Get it again from {ORIGIN}."
        )
    # Copied, because tensors must not share read-only memory.
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


def _load(seed: int = 0, directory: str | Path | None = None) -> Splits:
    return mnist(seed, directory=directory)


SOURCE = Source(
    name="mnist",
    load=_load,
    title="MNIST: handwritten digits, with few eights",
    rows=70_000,
    groups=DIGITS,
    origin=ORIGIN,
    files=tuple(FILES.values()),
    pair=("2", "8"),
    fixed_test=True,
)
