"""Digits: which digit does a small image show, where the training set has few eights?

| | |
|---|---|
| samples | 1,797; each for training with probability 0.8, an eight with probability 0.072 |
| features | images [1, 8, 8] with values 0 to 16, scaled to [0, 1] |
| classes | 10, the digits |
| groups | 10, the digits again; 2 and 8 are compared |
| source | Alpaydin, E. and Kaynak, C. (1998), https://archive.ics.uci.edu/dataset/80, test part |
| licence | see that page; scikit-learn redistributes the data |

**Caveat.** There are about 13 training and 35 test eights: use the data for trying things out, not
for conclusions. The dataset is not in the paper. It applies MNIST's protocol (each 8 of the
training set is kept with probability 0.09) to data that scikit-learn includes, so that nothing has
to be downloaded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.arguments import check_kinds
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.sample import Coins, Rows, coins
from evenclip.data.source import Source

__all__ = ["SOURCE", "digits"]

DIGITS = tuple("0123456789")
RARE, KEPT = 8, 0.09  # as in MNIST
TRAINING = 0.8  # probability that an image is for training
RECORDS = 1311  # public: 0.8 of the 1,623 images of other digits, and 0.072 of the 174 eights


def digits(seed: int = 0) -> Splits:
    """Load training and test images, about 80/20, with few eights in the training set.

    The split and the choice of eights are made image by image, see `evenclip.data.sample`.

    Args:
        seed: determines the training images and which eights are kept among them.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: the seed is negative.

    >>> train, test, _ = digits()
    >>> list(train.x.shape[1:]), 280 < len(test) < 440, int((train.y == 8).sum()) < 30
    ([1, 8, 8], True, True)
    """
    check_kinds(digits, locals())
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError(
            "The digits come with scikit-learn, which is not installed; run `pip install "
            "'scikit-learn>=1.4'`."
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)  # [sample, 1, 8, 8]
    y = labels.astype(np.int64)  # [sample]
    drawn = coins(seed, pixels, labels)
    train, test = drawn.parts(TRAINING)
    kept = train[drawn.kept(np.where(y == RARE, KEPT, 1.0))[train]]
    return Splits(_dataset(x, y, drawn, kept, RECORDS), _dataset(x, y, drawn, test, None))


def _dataset(
    x: NDArray[np.float32], y: NDArray[np.int64], drawn: Coins, rows: Rows, records: int | None
) -> Dataset:
    """Return some images as a `Dataset` whose groups are the classes."""
    classes = torch.from_numpy(y[rows])
    return Dataset(
        torch.from_numpy(x[rows]),
        classes,
        classes,
        group_names=DIGITS,
        class_names=DIGITS,
        name="digits",
        records=records,
        marks=torch.from_numpy(drawn.marks[rows]),
    )


def _load(seed: int = 0, directory: str | Path | None = None) -> Splits:
    """Load the digits; scikit-learn holds them, so the directory is ignored."""
    del directory
    return digits(seed)


SOURCE = Source(
    name="digits",
    load=_load,
    title="Digits: small handwritten digits, with few eights",
    rows=1_797,
    groups=DIGITS,
    licence="see origin; comes with scikit-learn",
    origin="https://archive.ics.uci.edu/dataset/80 (UCI), through scikit-learn",
    pair=("2", "8"),
    model="cnn",
)
