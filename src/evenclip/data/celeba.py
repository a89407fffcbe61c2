"""CelebA: is this celebrity labelled male, with and without eyeglasses?

| | |
|---|---|
| samples | 202,599 images; 162,770 for training, 19,867 for validation, 19,962 for testing, as published |
| features | images [3, 64, 64] (RGB), kept as bytes, taken as floats in [0, 1] |
| classes | 2: not Male (0), Male (1; 84,434 images) |
| groups | 2: no eyeglasses (0), eyeglasses (1; 10,478 Male, 2,715 not) |
| source | Liu, Z., Luo, P., Wang, X. and Tang, X. (2015). Deep Learning Face Attributes in the Wild. ICCV |
| licence | non-commercial research only, no redistribution |

**Caveat.** "Male" is what annotators saw in a photograph. ε is for one image, and a celebrity has
many: a person is protected less than an image.

The aligned images (178×218) are decoded once and kept in the cache directory (EVENCLIP_CACHE, or
else ~/.cache/evenclip). Each is resized as a whole to 64×64 by Pillow's bilinear filter, which
averages over the source pixels (antialiased); nothing is cropped. The paper says 64×64 and no more;
whether it crops is not known.

A copy with fewer images is refused unless it is allowed, and is then split 80/10/10 by identity, so
that nobody is in two parts: the official split needs all images.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip import check
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.disk import File, cache_directory
from evenclip.data.sample import stream

__all__ = ["celeba", "images_missing"]

IMAGES = 202_599
ORIGIN = (
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html or "
    "https://www.kaggle.com/datasets/jessicali9530/celeba-dataset"
)
PICTURES = File("celeba/img_align_celeba.zip", also=("celeba/img_align_celeba",))
ATTRIBUTES = File("celeba/list_attr_celeba.csv", also=("celeba/list_attr_celeba.txt",))
PARTITION = File("celeba/list_eval_partition.csv", also=("celeba/list_eval_partition.txt",))
IDENTITIES = File("celeba/identity_CelebA.txt")

BLOCK = 1024  # images that are decoded before they are written
STALE = 3600.0  # seconds after which a half-written file that does not grow has no writer any more


def celeba(
    seed: int = 0,
    *,
    directory: str | Path | None = None,
    allow_partial: bool = False,
    side: int = 64,
) -> Splits:
    """Training, test and validation images.

    The first call decodes all images, which takes minutes and side²·3 bytes of the cache directory
    for each (2.5 GB); later calls map that file into memory.

    Args:
        seed: decides how a partial copy is split; the official split is fixed.
        directory: the data directory, with these in celeba/: img_align_celeba.zip, or the folder
            img_align_celeba; list_attr_celeba and list_eval_partition, .csv as on Kaggle or .txt as
            published; for a partial copy identity_CelebA.txt. By default that of EVENCLIP_DATA.
        allow_partial: whether fewer than 202,599 images will do.
        side: height and width of the images in pixels.

    Raises:
        FileNotFoundError: a file or an image is not there.
        ValueError: a value out of range, or a file that cannot be read.
        ImportError: Pillow is not installed.
    """
    numbers = stream(seed, "celeba")
    check.natural(side=side)
    pictures = PICTURES.require(directory, ORIGIN)
    names, male, eyeglasses = _labels(ATTRIBUTES.require(directory, ORIGIN))
    there = _listing(pictures)
    present = np.array([name in there for name in names])  # [image]
    if present.all():
        parts = _official(names, directory)
    elif allow_partial:
        names, male, eyeglasses = (
            [name for name in names if name in there],
            male[present],
            eyeglasses[present],
        )
        parts = _by_identity(names, directory, numbers)
    else:
        raise FileNotFoundError(
            f"{pictures} lacks {np.count_nonzero(~present):,} of CelebA's {IMAGES:,} images; get "
            f"them from {ORIGIN}, "
            "or allow a partial copy (allow_partial), which is split by identity and not as "
            "published."
        )
    x = _images(pictures, {name: there[name] for name in names}, side)
    train, validation, test = (_dataset(x, male, eyeglasses, rows) for rows in parts)
    return Splits(train, test, validation)


def images_missing(directory: str | Path | None = None) -> int:
    """How many of CelebA's images a copy lacks.

    Raises:
        FileNotFoundError: there is no copy at all.
        ValueError: an archive that cannot be read.
    """
    return IMAGES - len(_listing(PICTURES.require(directory, ORIGIN)))


def _dataset(
    x: NDArray[np.uint8],
    male: NDArray[np.int64],
    eyeglasses: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> Dataset:
    """These rows as tensors; a look into x where they follow each other, as the official parts do."""
    first, last = int(rows[0]), int(rows[-1])
    images = (
        x[first : last + 1] if last - first + 1 == len(rows) else x[rows]
    )  # [row, 3, side, side]
    return Dataset(
        torch.from_numpy(images),
        torch.from_numpy(male[rows]),
        torch.from_numpy(eyeglasses[rows]),
        group_names=("no eyeglasses", "eyeglasses"),
        class_names=("not Male", "Male"),
        name="celeba",
    )


# --- labels and parts ---


def _labels(path: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Names of all images, and for each whether it is labelled Male and Eyeglasses."""
    rows = _rows(path)
    header = next((row for row in rows if {"Male", "Eyeglasses"} <= set(row)), None)
    if header is None:
        raise ValueError(f"{path} has no columns Male and Eyeglasses; get it again from {ORIGIN}.")
    first = (
        0 if path.suffix == ".csv" else 1
    )  # the published file does not name the column of names
    places = 0, first + header.index("Male"), first + header.index("Eyeglasses")
    try:
        table = [[row[place] for place in places] for row in rows]
        values = np.array([[int(row[1]), int(row[2])] for row in table]) > 0  # [image, 2]
    except (ValueError, IndexError):
        raise ValueError(
            f"{path} has rows that are not a name and 40 numbers; get it again from {ORIGIN}."
        ) from None
    if len(table) != IMAGES:
        raise ValueError(
            f"{path} has {len(table):,} images and CelebA has {IMAGES:,}; get it again from "
            f"{ORIGIN}."
        )
    return [row[0] for row in table], values[:, 0].astype(np.int64), values[:, 1].astype(np.int64)


def _official(names: Sequence[str], directory: str | Path | None) -> list[NDArray[np.int64]]:
    """The rows of the three parts as published: training, validation, test."""
    part = _codes(PARTITION.require(directory, ORIGIN), names)
    return [np.flatnonzero(part == code) for code in (0, 1, 2)]


def _by_identity(
    names: Sequence[str], directory: str | Path | None, numbers: np.random.Generator
) -> list[NDArray[np.int64]]:
    """The rows of 80, 10 and 10 % of the people, drawn at random."""
    identity = _codes(IDENTITIES.require(directory, ORIGIN), names)
    people = numbers.permutation(np.unique(identity))
    if len(people) < 10:
        raise ValueError(
            f"The partial copy of CelebA has images of {len(people)} people; a split needs at "
            "least 10."
        )
    shares = np.split(people, [round(0.8 * len(people)), round(0.9 * len(people))])
    return [np.flatnonzero(np.isin(identity, share)) for share in shares]


def _codes(path: Path, names: Sequence[str]) -> NDArray[np.int64]:
    """The number that a list of (name, number) has for each of these names."""
    known = {row[0]: row[1] for row in _rows(path) if len(row) == 2}
    try:
        return np.array([int(known[name]) for name in names])
    except (KeyError, ValueError):
        raise ValueError(
            f"{path} does not have a number for each image; get it again from {ORIGIN}."
        ) from None


def _rows(path: Path) -> Iterator[list[str]]:
    """The rows of a list, separated by commas or by spaces."""
    separator = "," if path.suffix == ".csv" else None
    return (line.split(separator) for line in path.read_text().splitlines() if line.strip())


# --- images ---


def _listing(path: Path) -> dict[str, str]:
    """The images there are, by name, each with a mark that changes when it does."""
    if path.is_dir():
        return {
            entry.name: str(entry.stat().st_size)
            for entry in os.scandir(_inner(path))
            if _is_image(entry.name)
        }
    with _archive(path) as archive:
        return {
            Path(name).name: str(archive.getinfo(name).CRC)
            for name in archive.namelist()
            if _is_image(name)
        }


def _is_image(name: str) -> bool:
    """Whether this is one of the images, and not what systems leave beside them (._000001.jpg,
    .DS_Store).
    """
    return name.endswith(".jpg") and Path(name).stem.isdigit()


def _inner(folder: Path) -> Path:
    """The folder with the images; Kaggle's archive has it inside another one of the same name."""
    return folder / folder.name if (folder / folder.name).is_dir() else folder


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """An archive, opened."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} cannot be unpacked ({error}): it is damaged; get it again from {ORIGIN}."
        ) from None


def _contents(path: Path, names: Sequence[str]) -> Iterator[bytes]:
    """The contents of these image files, one after the other."""
    if path.is_dir():
        yield from ((_inner(path) / name).read_bytes() for name in names)
        return
    with _archive(path) as archive:
        members = {Path(member).name: member for member in archive.namelist() if _is_image(member)}
        yield from (archive.read(members[name]) for name in names)


def _images(path: Path, marks: dict[str, str], side: int) -> NDArray[np.uint8]:
    """The images [image, 3, side, side], from the cache, where they are put first if need be.

    The array is mapped into memory: writing to it would change the copy of this process only.
    """
    listed = "".join(f"{name} {mark}\n" for name, mark in marks.items())
    key = hashlib.sha256(listed.encode()).hexdigest()[:16]
    kept = cache_directory() / f"celeba-{side}-{key}.npy"
    found = _mapped(kept, (len(marks), 3, side, side))
    if found is None:
        _decode(path, list(marks), side, kept)
        found = _mapped(kept, (len(marks), 3, side, side))
    if found is None:
        raise OSError(
            f"{kept} was written and cannot be read back; is there space left in its folder?"
        )
    return found


def _mapped(kept: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """The array in this file; None if there is no such file, or another array in it."""
    try:
        found = np.load(kept, mmap_mode="c")
    except (OSError, ValueError, EOFError):
        return None
    return (
        found
        if isinstance(found, np.ndarray) and found.shape == shape and found.dtype == np.uint8
        else None
    )


def _decode(path: Path, names: list[str], side: int, kept: Path) -> None:
    """Decode all images into this file, which is there only when it is whole."""
    for left in kept.parent.glob(f"{kept.stem}-*.partial"):
        if time.time() - left.stat().st_mtime > STALE:
            left.unlink(missing_ok=True)
    with NamedTemporaryFile(
        dir=kept.parent, prefix=f"{kept.stem}-", suffix=".partial", delete=False
    ) as out:
        try:
            _write(out, path, names, side)
        except BaseException:
            Path(out.name).unlink()
            raise
    os.replace(out.name, kept)


def _write(out: IO[bytes], path: Path, names: list[str], side: int) -> None:
    """All images as an array in numpy's format."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(names), 3, side, side)}
    np.lib.format.write_array_header_1_0(out, header)
    decoded, contents = partial(_decoded, path, side), _contents(path, names)
    # Threads: Pillow decodes and resizes without holding the lock of the interpreter.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(names), BLOCK):
            block = names[start : start + BLOCK]
            for image in pool.map(decoded, block, list(islice(contents, len(block)))):
                out.write(image.tobytes())
    out.flush()
    os.fsync(out.fileno())


def _decoded(path: Path, side: int, name: str, content: bytes) -> NDArray[np.uint8]:
    """An image [3, side, side] from the content of its file; path and name are for the message."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            "CelebA's images are decoded by Pillow, which is not installed; run `pip install "
            "'evenclip[images]'`."
        ) from None
    try:
        image = Image.open(io.BytesIO(content)).convert("RGB")
    except OSError as error:
        raise ValueError(
            f"{name} in {path} cannot be decoded ({error}); get it again from {ORIGIN}."
        ) from None
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
