"""CelebA: small generated copies in the official layout, and the counts of the real lists."""

from __future__ import annotations

import csv
import importlib
import io
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from evenclip.data import SOURCES, celeba

REAL = os.environ.get("EVENCLIP_DATA")
CELEBA = importlib.import_module("evenclip.data.celeba")
N = 60
NAMES = [f"{i + 1:06d}.jpg" for i in range(N)]
MALE = [i % 2 for i in range(N)]
EYEGLASSES = [int(i % 5 == 0) for i in range(N)]
PARTITION = [0 if i < 40 else 1 if i < 50 else 2 for i in range(N)]
IDENTITY = [i // 3 + 100 for i in range(N)]  # 20 people with 3 images each
SEED, OTHER = 2, 4  # with which no part of a partial copy is empty


def colour(i):
    """Return the uniform colour of image i."""
    return (4 * i, 255 - 4 * i, 20)


def jpeg(i, size=(178, 218)):
    out = io.BytesIO()
    Image.new("RGB", size, colour(i)).save(out, "JPEG", quality=95)
    return out.getvalue()


def write(directory, *, form="zip", lists="csv", images=range(N)):
    """Write a copy in the official layout."""
    folder = directory / "celeba"
    folder.mkdir(exist_ok=True)
    write_lists(folder, lists)
    if form == "zip":
        with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as archive:
            archive.writestr("img_align_celeba/", "")
            for i in images:
                archive.writestr(f"img_align_celeba/{NAMES[i]}", jpeg(i))
        return
    inner = folder / "img_align_celeba" / ("img_align_celeba" if form == "nested" else "")
    inner.mkdir(parents=True)
    (inner / "._000001.jpg").write_bytes(b"of a Macintosh")
    for i in images:
        (inner / NAMES[i]).write_bytes(jpeg(i))


def write_lists(folder, form):
    """Write the lists in Kaggle's form (csv) or as published (txt)."""
    columns = ["Bald", "Eyeglasses", "Male", "Young"]
    rows = [[-1, 2 * EYEGLASSES[i] - 1, 2 * MALE[i] - 1, 1] for i in range(N)]
    if form == "csv":
        table = [
            ["image_id", *columns],
            *([name, *row] for name, row in zip(NAMES, rows, strict=True)),
        ]
        parts = [["image_id", "partition"], *zip(NAMES, PARTITION, strict=True)]
        for name, content in (("list_attr_celeba.csv", table), ("list_eval_partition.csv", parts)):
            with (folder / name).open("w", newline="") as out:
                csv.writer(out).writerows(content)
    else:
        table = [
            f"{name} " + " ".join(f"{v:2d}" for v in row)
            for name, row in zip(NAMES, rows, strict=True)
        ]
        (folder / "list_attr_celeba.txt").write_text(
            f"{N}\n{' '.join(columns)} \n" + "\n".join(table) + "\n"
        )
        parts = "".join(f"{name} {part}\n" for name, part in zip(NAMES, PARTITION, strict=True))
        (folder / "list_eval_partition.txt").write_text(parts)
    people = "".join(f"{name} {person}\n" for name, person in zip(NAMES, IDENTITY, strict=True))
    (folder / "identity_CelebA.txt").write_text(people)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Reduce CelebA to 60 images and use a temporary cache."""
    monkeypatch.setattr(CELEBA, "IMAGES", N)
    monkeypatch.setattr(CELEBA, "BLOCK", 16)
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVENCLIP_DATA", raising=False)


def which(data):
    """Return the numbers of the images in a dataset, recognised by their colour."""
    return [round(float(image[0].double().mean()) / 4) for image in data.x]


@pytest.mark.parametrize("lists", ["csv", "txt"])
@pytest.mark.parametrize("form", ["zip", "folder", "nested"])
def test_a_full_copy_is_split_as_published(tmp_path, form, lists):
    write(tmp_path, form=form, lists=lists)
    train, test, validation = celeba(directory=tmp_path)
    assert which(train) == list(range(40))
    assert which(validation) == list(range(40, 50))
    assert which(test) == list(range(50, 60))
    for data in (train, test, validation):
        assert data.x.shape[1:] == (3, 64, 64)
        assert data.x.dtype is torch.uint8
        assert data.y.tolist() == [MALE[i] for i in which(data)]
        assert data.group.tolist() == [EYEGLASSES[i] for i in which(data)]
        assert data.group_names == ("no eyeglasses", "eyeglasses")
        assert data.class_names == ("not Male", "Male")
    # Colours in the order red, green, blue; JPEG is off by a little.
    np.testing.assert_allclose(train.x[7].double().mean((1, 2)), colour(7), atol=2)


def test_the_official_split_does_not_depend_on_the_seed(tmp_path):
    write(tmp_path)
    assert which(celeba(0, directory=tmp_path).test) == which(celeba(9, directory=tmp_path).test)
    with pytest.raises(ValueError, match=r"^seed is -1; it must be"):
        celeba(-1, directory=tmp_path)


def test_parts_that_do_not_follow_each_other(tmp_path):
    write(tmp_path)
    mixed = "".join(f"{name},{i % 3}\n" for i, name in enumerate(NAMES))
    (tmp_path / "celeba" / "list_eval_partition.csv").write_text("image_id,partition\n" + mixed)
    train, test, validation = celeba(directory=tmp_path)
    assert which(train) == list(range(0, 60, 3))
    assert which(validation) == list(range(1, 60, 3))
    assert which(test) == list(range(2, 60, 3))


def test_images_are_shrunk_as_a_whole_and_averaged(tmp_path):
    """Stripes of one pixel become grey; left stays left, and the top edge is not cropped."""
    write(tmp_path)
    picture = np.zeros((218, 178, 3), np.uint8)
    picture[:, ::2] = 200  # stripes of one pixel
    picture[:, 89:] = 250
    picture[:7] = 120  # the two upper rows of 64
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")  # a jpeg would blur the stripes itself
    with zipfile.ZipFile(tmp_path / "celeba" / "img_align_celeba.zip") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents["img_align_celeba/000001.jpg"] = out.getvalue()
    with zipfile.ZipFile(tmp_path / "celeba" / "img_align_celeba.zip", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    image = celeba(directory=tmp_path).train.x[0].double()  # [3, 64, 64]
    assert float(abs(image[:, 8:, 2:28] - 100).max()) < 25
    assert float(abs(image[:, 8:, 36:] - 250).max()) < 1
    assert float(abs(image[:, 0] - 120).max()) < 1


def test_another_side(tmp_path):
    write(tmp_path)
    assert celeba(directory=tmp_path, side=16).train.x.shape == (40, 3, 16, 16)
    assert celeba(directory=tmp_path, side=8).train.x.shape == (40, 3, 8, 8)
    with pytest.raises(ValueError, match=r"^side is 0; it must be a whole number of at least 1\.$"):
        celeba(directory=tmp_path, side=0)


# --- partial copies ---


def test_a_partial_copy_is_refused_with_the_number_that_is_missing(tmp_path):
    write(tmp_path, images=range(45))
    with pytest.raises(FileNotFoundError) as caught:
        celeba(directory=tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'celeba' / 'img_align_celeba.zip'} lacks 15 of CelebA's 60 images; get them "
        "from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html or "
        "https://www.kaggle.com/datasets/jessicali9530/celeba-dataset, or allow a partial copy "
        "(allow_partial), which is split by identity and not as published."
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("form", ["zip", "folder"])
def test_a_partial_copy_is_split_by_identity(tmp_path, form):
    present = [i for i in range(N) if i % 7]  # 51 images of all 20 people
    write(tmp_path, form=form, images=present)
    splits = celeba(SEED, directory=tmp_path, allow_partial=True)
    train, test, validation = (which(data) for data in splits)
    assert sorted(train + test + validation) == present
    people = [{IDENTITY[i] for i in part} for part in (train, validation, test)]
    assert all(people)
    assert sum(len(part) for part in people) == len(set.union(*people)) == 20
    for data in splits:
        assert data.y.tolist() == [MALE[i] for i in which(data)]
        assert data.group.tolist() == [EYEGLASSES[i] for i in which(data)]
    again, other = (celeba(seed, directory=tmp_path, allow_partial=True) for seed in (SEED, OTHER))
    assert which(again.test) == test
    assert which(other.test) != test


def test_a_full_copy_is_split_as_published_even_if_partial_copies_are_allowed(tmp_path):
    write(tmp_path)
    assert which(celeba(directory=tmp_path, allow_partial=True).test) == list(range(50, 60))


def test_too_few_people_cannot_be_split(tmp_path):
    write(tmp_path, images=range(3))
    with pytest.raises(
        ValueError,
        match=r"^The partial copy of CelebA has images of 1 people, and their split by themselves "
        r"leaves a part without images; add images of more people, or take another seed\.$",
    ):
        celeba(directory=tmp_path, allow_partial=True)


# --- the cache ---


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_images_are_decoded_once(tmp_path, monkeypatch):
    write(tmp_path)
    first = celeba(directory=tmp_path).train.x.clone()
    files = cached(tmp_path)
    assert len(files) == 1
    assert files[0].startswith("celeba-64-")
    monkeypatch.setattr(CELEBA, "_decode", lambda *_: pytest.fail("decoded again"))
    again = celeba(directory=tmp_path).train
    assert torch.equal(again.x, first)
    again.x[0] = 0  # changes this process's copy, not the file
    assert torch.equal(celeba(directory=tmp_path).train.x, first)


def test_other_images_are_decoded_anew(tmp_path):
    write(tmp_path, images=range(45))
    celeba(SEED, directory=tmp_path, allow_partial=True)
    write(tmp_path)
    assert which(celeba(directory=tmp_path).train) == list(range(40))
    assert len(cached(tmp_path)) == 2


def test_an_interrupted_decoding_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path)
    decode, seen = CELEBA._decoded, []

    def interrupted(path, side, name, content):
        seen.append(name)
        if len(seen) > 30:
            raise KeyboardInterrupt
        return decode(path, side, name, content)

    monkeypatch.setattr(CELEBA, "_decoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        celeba(directory=tmp_path)
    assert cached(tmp_path) == []
    monkeypatch.setattr(CELEBA, "_decoded", decode)
    assert which(celeba(directory=tmp_path).train) == list(range(40))


def test_a_damaged_cache_is_decoded_again(tmp_path):
    write(tmp_path)
    before = celeba(directory=tmp_path).train.x.clone()
    kept = tmp_path / "cache" / cached(tmp_path)[0]
    content = kept.read_bytes()
    middle = len(content) // 2
    for damage in (content[:5000], content[:middle] + b"!" + content[middle + 1 :], b""):
        kept.write_bytes(damage)
        assert torch.equal(celeba(directory=tmp_path).train.x, before)
        assert kept.read_bytes() == content


@pytest.mark.parametrize("damage", ["cut", "empty", "another array", "no array"])
def test_a_damaged_cache_is_made_anew(tmp_path, damage):
    write(tmp_path)
    celeba(directory=tmp_path)
    kept = tmp_path / "cache" / cached(tmp_path)[0]
    content = kept.read_bytes()
    if damage == "another array":
        np.save(kept, np.zeros((60, 3, 64, 32), np.uint8))
    else:
        kept.write_bytes({"cut": content[:-1], "empty": b"", "no array": b"x" * 1000}[damage])
    assert which(celeba(directory=tmp_path).train) == list(range(40))
    assert kept.read_bytes() == content


# --- what is refused ---


def test_missing_files_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"^celeba/img_align_celeba\.zip \(or celeba/img_align_celeba\) is not",
    ):
        celeba(directory=tmp_path)
    with pytest.raises(
        FileNotFoundError,
        match=r"^celeba/img_align_celeba\.zip .* is needed and there is no data dire",
    ):
        celeba()
    write(tmp_path, images=range(45))
    (tmp_path / "celeba" / "identity_CelebA.txt").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"^celeba/identity_CelebA\.txt is not in the data directory"
    ):
        celeba(directory=tmp_path, allow_partial=True)
    write(tmp_path)
    (tmp_path / "celeba" / "list_eval_partition.csv").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"^celeba/list_eval_partition\.csv \(or celeba/list_eval_partition\.t",
    ):
        celeba(directory=tmp_path)


BROKEN = {  # file -> what is in it -> the sentence
    "list_attr_celeba.csv": [
        ("image_id,Bald\n000001.jpg,1\n", "has no columns Male and Eyeglasses; get it again from"),
        (
            "image_id,Male,Eyeglasses\n000001.jpg,1\n",
            "has rows that are not a name and 40 numbers; get it again",
        ),
        (
            "image_id,Male,Eyeglasses\n000001.jpg,1,yes\n",
            "has rows that are not a name and 40 numbers; get it again",
        ),
        (
            "image_id,Male,Eyeglasses\n000001.jpg,1,1\n",
            "has 1 images and CelebA has 60; get it again from",
        ),
    ],
    "list_eval_partition.csv": [
        (
            "image_id,partition\n000001.jpg,0\n",
            "does not have a number for each image; get it again from",
        ),
        (
            "".join(f"{name},train\n" for name in NAMES),
            "does not have a number for each image; get it again from",
        ),
    ],
    "img_align_celeba.zip": [
        (
            "not an archive",
            "cannot be unpacked (File is not a zip file): it is damaged; get it again from",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "sentence"), [(n, *case) for n, cases in BROKEN.items() for case in cases]
)
def test_broken_files_are_refused(tmp_path, name, content, sentence):
    write(tmp_path)
    path = tmp_path / "celeba" / name
    path.write_text(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        celeba(directory=tmp_path)
    assert str(caught.value).startswith(f"{path} {sentence}")


def test_an_image_that_is_none_is_named(tmp_path):
    write(tmp_path, form="folder")
    folder = tmp_path / "celeba" / "img_align_celeba"
    (folder / NAMES[20]).write_bytes(jpeg(20)[:100])
    with pytest.raises(
        ValueError,
        match=r"^000021\.jpg in .*img_align_celeba cannot be decoded \(.*\); get it again",
    ):
        celeba(directory=tmp_path)
    assert cached(tmp_path) == []


def test_a_damaged_member_of_the_archive_is_refused(tmp_path):
    write(tmp_path)
    path = tmp_path / "celeba" / "img_align_celeba.zip"
    content = bytearray(path.read_bytes())
    content[content.index(b"000030.jpg") + 200] ^= 255
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"img_align_celeba\.zip cannot be unpacked \(Bad CRC-32 for file .*000030"
    ):
        celeba(directory=tmp_path)


def test_without_pillow_it_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ImportError,
        match=r"decoded by Pillow, which is not installed; run `pip install 'evenclip\[im",
    ):
        celeba(directory=tmp_path)


# --- the real lists ---


@pytest.fixture
def real(monkeypatch):
    """Return the data directory with CelebA's real lists and all or some of its images."""
    lists = [
        Path(REAL or ".") / "celeba" / name
        for name in ("list_attr_celeba.csv", "list_eval_partition.csv")
    ]
    if REAL is None or not all(path.exists() for path in lists):
        pytest.skip(
            "needs celeba/list_attr_celeba.csv and celeba/list_eval_partition.csv in the folder "
            "EVENCLIP_DATA"
        )
    monkeypatch.setattr(CELEBA, "IMAGES", 202_599)
    return Path(REAL)


def test_celeba_has_the_known_counts(real):
    names, male, eyeglasses = CELEBA._labels(real / "celeba" / "list_attr_celeba.csv")
    assert (len(names), int(male.sum())) == (202_599, 84_434)
    assert (int(eyeglasses[male == 1].sum()), int(eyeglasses[male == 0].sum())) == (10_478, 2_715)
    parts = CELEBA._official(names, real)
    assert [len(part) for part in parts] == [162_770, 19_867, 19_962]
    # Contiguous, so that the datasets are views and not copies.
    assert all(part[-1] - part[0] + 1 == len(part) for part in parts)


def test_celeba_of_the_data_directory(real):
    if not (real / "celeba" / "img_align_celeba.zip").exists():
        pytest.skip("needs celeba/img_align_celeba.zip in the folder EVENCLIP_DATA")
    absent = CELEBA.images_missing(real)
    assert SOURCES["celeba"].lacks(real) == (
        f"{absent:,} of 202,599 images are missing" if absent else None
    )
    train, test, validation = celeba(directory=real, allow_partial=True)
    assert len(train) + len(test) + len(validation) == 202_599 - absent
    pixels = train.take(torch.arange(200)).x
    assert 0.2 < float(pixels.mean()) < 0.7
    assert float(pixels.std()) > 0.1
