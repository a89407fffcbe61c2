"""CelebA: is this celebrity labelled male, with and without eyeglasses?

| | |
|---|---|
| samples | 202,599 images; 162,770 training, 19,867 validation, 19,962 test images, as published |
| features | images [3, 64, 64] (RGB), stored as bytes, returned as floats in [0, 1] |
| classes | 2: not Male (0), Male (1; 84,434 images) |
| groups | 2: no eyeglasses (0), eyeglasses (1; 10,478 Male, 2,715 not) |
| source | Liu, Luo, Wang and Tang (2015). Deep Learning Face Attributes in the Wild. ICCV |
| licence | non-commercial research only, no redistribution |

**Caveat.** "Male" is what annotators saw in a photograph. ε protects one image, and a celebrity has
many images: a person is protected less than an image.

The aligned images (178×218) are decoded once and stored in the cache directory (EVENCLIP_CACHE, or
else ~/.cache/evenclip). Pillow's bilinear filter, which averages over the source pixels
(antialiased), resizes each whole image to 64×64; nothing is cropped. The paper states 64×64 only;
whether it crops is unknown.

A copy with fewer images is refused unless `allow_partial` is set. It is then split by identity,
about 80/10/10, so that no person is in two parts: the official split needs all images. The part of
a person is a function of the person's number alone.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip import check, files
from evenclip.arguments import check_kinds
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.disk import File, cache_directory
from evenclip.data.sample import coins
from evenclip.data.source import NUMBER, Source
from evenclip.files import kinds

__all__ = ["SOURCE", "celeba", "images_missing"]

IMAGES = 202_599
ORIGIN = (
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html or "
    "https://www.kaggle.com/datasets/jessicali9530/celeba-dataset"
)
PICTURES = File("celeba/img_align_celeba.zip", also=("celeba/img_align_celeba",))
ATTRIBUTES = File("celeba/list_attr_celeba.csv", also=("celeba/list_attr_celeba.txt",))
PARTITION = File("celeba/list_eval_partition.csv", also=("celeba/list_eval_partition.txt",))
IDENTITIES = File("celeba/identity_CelebA.txt")

_LARGEST = 1024  # pixels; the images have 178 × 218
BLOCK = 1024  # images decoded before they are written
HEADER = 2**12  # bytes before the numbers in that file, at most
DIGEST = 32  # bytes of the SHA-256 at the end of a file of decoded images


def celeba(
    seed: int = 0,
    *,
    directory: str | Path | None = None,
    allow_partial: bool = False,
    side: int = 64,
) -> Splits:
    """Load the training, test and validation images.

    The first call decodes all images. It takes minutes and 3·side² bytes of the cache directory per
    image (2.5 GB); later calls map that file into memory.

    Args:
        seed: determines how a partial copy is split; the official split is fixed.
        directory: the data directory. Its folder celeba/ holds img_align_celeba.zip, or the folder
            img_align_celeba; list_attr_celeba and list_eval_partition, .csv as on Kaggle or .txt as
            published; and for a partial copy identity_CelebA.txt. By default EVENCLIP_DATA.
        allow_partial: whether to accept fewer than 202,599 images.
        side: height and width of the images in pixels.

    Raises:
        FileNotFoundError: a file or an image is missing.
        ValueError: a value is out of range, or a file cannot be read.
        ImportError: Pillow is not installed.
    """
    check_kinds(celeba, locals())
    check.at_most(_LARGEST, side=side)
    check.whole(seed=seed)
    pictures = PICTURES.require(directory, ORIGIN)
    names, male, eyeglasses = _labels(ATTRIBUTES.require(directory, ORIGIN))
    listing = _listing(pictures)
    present = np.array([name in listing for name in names])  # [image]
    if present.all():
        splits = _official(names, directory)
    elif allow_partial:
        names = [name for name in names if name in listing]
        male, eyeglasses = male[present], eyeglasses[present]
        splits = _by_identity(names, directory, seed)
    else:
        raise FileNotFoundError(
            f"{pictures} lacks {np.count_nonzero(~present):,} of CelebA's {IMAGES:,} images; get "
            f"them from {ORIGIN}, or allow a partial copy (allow_partial), which is split by "
            "identity and not as published."
        )
    x = _images(pictures, {name: listing[name] for name in names}, side)
    marks = coins(seed, np.array(names)).marks  # an image has its own name
    train, validation, test = (_dataset(x, male, eyeglasses, rows, marks) for rows in splits)
    return Splits(train, test, validation)


def images_missing(directory: str | Path | None = None) -> int:
    """Return how many of CelebA's images a copy lacks.

    Raises:
        FileNotFoundError: there is no copy.
        ValueError: the archive cannot be read.
    """
    return IMAGES - len(_listing(PICTURES.require(directory, ORIGIN)))


def _dataset(
    x: NDArray[np.uint8],
    male: NDArray[np.int64],
    eyeglasses: NDArray[np.int64],
    rows: NDArray[np.int64],
    marks: NDArray[np.int64],
) -> Dataset:
    """Return some rows as a `Dataset`; contiguous rows, as in the official split, are a view."""
    first, last = int(rows[0]), int(rows[-1])
    contiguous = last - first + 1 == len(rows)
    images = x[first : last + 1] if contiguous else x[rows]  # [row, 3, side, side]
    return Dataset(
        torch.from_numpy(images),
        torch.from_numpy(male[rows]),
        torch.from_numpy(eyeglasses[rows]),
        group_names=("no eyeglasses", "eyeglasses"),
        class_names=("not Male", "Male"),
        name="celeba",
        marks=torch.from_numpy(marks[rows]),
    )


# --- labels and splits ---


def _labels(path: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Return the names of all images and their labels Male and Eyeglasses."""
    rows = _rows(path)
    header = next((row for row in rows if {"Male", "Eyeglasses"} <= set(row)), None)
    if header is None:
        raise ValueError(f"{path} has no columns Male and Eyeglasses; get it again from {ORIGIN}.")
    first = 0 if path.suffix == ".csv" else 1  # the published header omits the column of names
    fields = 0, first + header.index("Male"), first + header.index("Eyeglasses")
    try:
        table = [[row[field] for field in fields] for row in rows]
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
    """Return the rows of the published training, validation and test sets."""
    part = _codes(PARTITION.require(directory, ORIGIN), names)
    return [np.flatnonzero(part == code) for code in (0, 1, 2)]


def _by_identity(
    names: Sequence[str], directory: str | Path | None, seed: int
) -> list[NDArray[np.int64]]:
    """Return the rows of about 80, 10 and 10 % of the people, each drawn by itself."""
    identity = _codes(IDENTITIES.require(directory, ORIGIN), names)
    parts = coins(seed, identity, copies=False).parts(0.8, 0.1)
    if not all(map(len, parts)):
        raise ValueError(
            f"The partial copy of CelebA has images of {len(np.unique(identity))} people, and "
            "their split by themselves leaves a part without images; add images of more people, "
            "or take another seed."
        )
    return parts


def _codes(path: Path, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each name, from a file of (name, number) pairs."""
    known = {row[0]: row[1] for row in _rows(path) if len(row) == 2}
    try:
        return np.array([int(known[name]) for name in names])
    except (KeyError, ValueError):
        raise ValueError(
            f"{path} does not have a number for each image; get it again from {ORIGIN}."
        ) from None


def _rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a file, split at commas or at spaces."""
    separator = "," if path.suffix == ".csv" else None
    return (line.split(separator) for line in path.read_text().splitlines() if line.strip())


# --- images ---


def _listing(path: Path) -> dict[str, str]:
    """Return the available images by name, each with its size or CRC, to detect changes."""
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
    """Return whether a file is an image, and not a system file (._000001.jpg, .DS_Store)."""
    return name.endswith(".jpg") and Path(name).stem.isdigit()


def _inner(folder: Path) -> Path:
    """Return the folder of the images; Kaggle nests it in a folder of the same name."""
    return folder / folder.name if (folder / folder.name).is_dir() else folder


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} cannot be unpacked ({error}): it is damaged; get it again from {ORIGIN}."
        ) from None


def _contents(path: Path, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the contents of the image files, in the order of `names`."""
    if path.is_dir():
        yield from ((_inner(path) / name).read_bytes() for name in names)
        return
    with _archive(path) as archive:
        members = {Path(member).name: member for member in archive.namelist() if _is_image(member)}
        yield from (archive.read(members[name]) for name in names)


def _images(path: Path, marks: dict[str, str], side: int) -> NDArray[np.uint8]:
    """Return the images [image, 3, side, side] from the cache, which is filled if necessary.

    The array is mapped into memory copy-on-write: writing to it does not change the file.
    """
    listed = "".join(f"{name} {mark}\n" for name, mark in marks.items())
    key = hashlib.sha256(listed.encode()).hexdigest()[:16]
    kept = cache_directory() / f"celeba-{side}-{key}.npy"
    images = _mapped(kept, (len(marks), 3, side, side))
    if images is None:
        _decode(path, list(marks), side, kept)
        images = _mapped(kept, (len(marks), 3, side, side))
    if images is None:
        raise OSError(
            f"{kept} was written and cannot be read back; is there space left in its folder?"
        )
    return images


def _mapped(kept: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """Map an array file into memory; None if it is missing, damaged, or holds another array."""
    numbers = math.prod(shape)
    try:
        if not kept.is_file():  # a pipe would be waited for
            return None
        with kept.open("rb") as file:
            size = os.fstat(file.fileno()).st_size - DIGEST
            if not numbers <= size <= numbers + HEADER:
                return None
            file.seek(size)
            digest = file.read()
            file.seek(0)
            if _digest(file, size) != digest:
                return None
        array = np.load(kept, mmap_mode="c")
    except (OSError, ValueError, EOFError):
        return None
    valid = isinstance(array, np.ndarray) and array.shape == shape and array.dtype == np.uint8
    return array if valid else None


def _digest(file: IO[bytes], size: int) -> bytes:
    """Return the SHA-256 of the next `size` bytes of a file."""
    digest = hashlib.sha256()
    while size > 0 and (part := file.read(min(size, 2**20))):
        digest.update(part)
        size -= len(part)
    return digest.digest()


def _decode(path: Path, names: list[str], side: int, kept: Path) -> None:
    """Decode all images into a file that appears only when it is complete."""
    files.check_name(kept)
    files.clear_leftovers(kept.parent)
    with (
        files.scratch_file(kept.parent, kinds.IMAGES.file_mode) as (scratch, handle),
        open(handle, "r+b", closefd=False) as out,
    ):
        _write(out, path, names, side)
        os.replace(scratch, kept)


def _write(out: IO[bytes], path: Path, names: list[str], side: int) -> None:
    """Write all images as one array in numpy's format, and the SHA-256 of that."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(names), 3, side, side)}
    np.lib.format.write_array_header_1_0(out, header)
    decoded, contents = partial(_decoded, path, side), _contents(path, names)
    # Threads suffice: Pillow releases the GIL while it decodes and resizes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(names), BLOCK):
            block = names[start : start + BLOCK]
            for image in pool.map(decoded, block, list(islice(contents, len(block)))):
                out.write(image.tobytes())
    size = out.tell()
    out.seek(0)
    digest = _digest(out, size)
    out.seek(size)
    out.write(digest)
    out.flush()
    os.fsync(out.fileno())


def _decoded(path: Path, side: int, name: str, content: bytes) -> NDArray[np.uint8]:
    """Decode an image file to [3, side, side]; path and name are for the error message."""
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


# --- catalogue ---


def _load(seed: int = 0, directory: str | Path | None = None, **options: Any) -> Splits:
    return celeba(seed, directory=directory, **options)


def _incomplete(directory: Path) -> str | None:
    """Return how many images a copy of CelebA lacks, as half a sentence; None if none."""
    absent = images_missing(directory)
    return f"{absent:,} of {IMAGES:,} images are missing" if absent > 0 else None


SOURCE = Source(
    name="celeba",
    load=_load,
    title="CelebA: faces labelled male, with and without eyeglasses",
    rows=IMAGES,
    groups=("no eyeglasses", "eyeglasses"),
    licence="non-commercial research, no redistribution",
    origin=ORIGIN,
    files=(PICTURES, ATTRIBUTES, PARTITION),
    uncovered=(NUMBER,),
    incomplete=_incomplete,
    options=("allow_partial", "side"),
)
