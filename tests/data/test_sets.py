"""Dutch, MNIST, digits and toy: known counts, an independent reader, sampling, and errors."""

from __future__ import annotations

import gzip
import importlib
import os
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn

import evenclip
from evenclip.data import SOURCES, digits, dutch, mnist, toy
from evenclip.data.dutch import FEATURES
from evenclip.data.toy import optimum

MNIST = importlib.import_module("evenclip.data.mnist")


def needs(*paths):
    """Return the data directory if it has these files; skip the test otherwise."""
    directory = os.environ.get("EVENCLIP_DATA")
    if directory is None or not all((Path(directory) / path).exists() for path in paths):
        pytest.skip(f"needs {', '.join(paths)} in the folder EVENCLIP_DATA")
    return Path(directory)


def assert_same(left, right):
    for name in ("x", "y", "group"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=0, atol=0)


# --- Dutch ---


@pytest.fixture(scope="module")
def census():
    """Read the rows of the file with pandas."""
    path = needs("dutch/dutch_census_2001.arff") / "dutch" / "dutch_census_2001.arff"
    lines = path.read_text().splitlines()
    names = [line.split(" ")[1] for line in lines if line.startswith("@attribute")]
    return pd.read_csv(path, skiprows=lines.index("@data") + 1, names=names, dtype=str)


def test_dutch_has_the_known_counts(census):
    splits = dutch()
    assert len(census) == 60_420
    assert (len(splits.train) + len(splits.test), splits.validation) == (60_420, None)
    assert splits.train.records == 48_336
    assert abs(len(splits.train) - 48_336) < 5 * (60_420 * 0.16) ** 0.5
    sexes = sum(torch.bincount(data.group, minlength=2) for data in splits[:2])
    assert dict(zip(splits.train.group_names, sexes.tolist(), strict=True)) == {
        "Male": 30_147,
        "Female": 30_273,
    }
    y = torch.cat([data.y for data in splits[:2]])
    assert splits.train.class_names == ("low-level", "high-level")
    assert int(y.sum()) == (census["occupation"] == "2_1").sum()
    assert splits.train.x.shape[1] == len(FEATURES) == 59


def test_dutch_rows_are_those_of_the_file(census):
    """All 60,420 rows with class and group equal those one-hot encoded by pandas, as multisets."""
    splits = dutch(4)
    binary = {"sex", "prev_residence_place"}
    encoded = pd.get_dummies(census.drop(columns="occupation"), prefix_sep="=")
    encoded = encoded.drop(columns=[f"{column}=1" for column in binary])
    assert set(encoded.columns) == set(FEATURES)
    y, female = census["occupation"] == "2_1", census["sex"] == "2"
    expected = np.column_stack([encoded[list(FEATURES)], y, female]).astype(np.uint8)
    rows = np.concatenate([np.column_stack([d.x, d.y, d.group]) for d in splits[:2]])
    assert sorted(map(bytes, rows.astype(np.uint8))) == sorted(map(bytes, expected))


def test_dutch_is_decided_by_its_seed(census):
    one, again, other = (dutch(seed).train for seed in (1, 1, 2))
    assert_same(one, again)
    assert not torch.equal(one.x, other.x)


def test_another_dutch_file_is_refused(tmp_path):
    (tmp_path / "dutch").mkdir()
    (tmp_path / "dutch" / "dutch_census_2001.arff").write_text("@relation other\n")
    with pytest.raises(
        ValueError, match=r"dutch_census_2001\.arff has the SHA-256 .* and should have 0e7e3f326689"
    ):
        dutch(directory=tmp_path)


def test_missing_dutch_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        dutch(directory=tmp_path)
    assert str(caught.value) == (
        f"dutch/dutch_census_2001.arff is not in the data directory {tmp_path}; get it from "
        "https://github.com/tailequy/fairness_dataset, folder Dutch_census, or name another "
        "directory with --data-dir or the environment variable EVENCLIP_DATA."
    )


# --- MNIST ---


@pytest.fixture(scope="module")
def archive():
    return needs(*(f"mnist/{name}.gz" for name in MNIST.MD5))


def test_mnist_has_the_known_counts(archive):
    train, test, validation = mnist(0)
    assert validation is None
    assert (train.x.shape[1:], train.x.dtype) == ((1, 28, 28), torch.uint8)
    assert len(test) == 10_000
    counts = torch.bincount(train.y).tolist()
    whole = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # of the 60,000
    assert counts[:8] + counts[9:] == whole[:8] + whole[9:]
    assert abs(counts[8] - 0.09 * 5851) < 5 * (5851 * 0.09 * 0.91) ** 0.5
    assert torch.equal(train.y, train.group)
    assert train.group_names == test.group_names == tuple("0123456789")
    few = train.take(torch.arange(100)).x
    assert (few.dtype, float(few.min()), float(few.max())) == (torch.float32, 0.0, 1.0)


def test_mnist_images_are_those_of_the_file(archive):
    """Compare a test image by its offset, and the training images in order without some eights."""
    train, test, _ = mnist(0)
    content = gzip.decompress((archive / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert bytes(test.x[3].flatten().tolist()) == content[16 + 3 * 784 : 16 + 4 * 784]
    labels = gzip.decompress((archive / "mnist" / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    assert bytes(train.y[train.y != 8].tolist()) == labels.replace(b"\x08", b"")
    images = gzip.decompress((archive / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())
    eights = {images[16 + 784 * i : 800 + 784 * i] for i, label in enumerate(labels) if label == 8}
    assert all(bytes(image.flatten().tolist()) in eights for image in train.x[train.y == 8][:50])


def test_mnist_is_decided_by_its_seed(archive):
    one, again, other = mnist(3), mnist(3), mnist(4)
    assert_same(one.train, again.train)
    assert len(one.train) != len(other.train)
    assert SOURCES["mnist"].fixed_test
    assert_same(one.test, other.test)


def test_mnist_unpacked_is_the_same(archive, tmp_path):
    (tmp_path / "mnist").mkdir()
    for name in MNIST.MD5:
        packed = (archive / "mnist" / f"{name}.gz").read_bytes()
        (tmp_path / "mnist" / name).write_bytes(gzip.decompress(packed))
    assert_same(mnist(1, directory=tmp_path).train, mnist(1, directory=archive).train)


def test_missing_mnist_names_both_forms(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        mnist(directory=tmp_path)
    assert str(caught.value) == (
        "mnist/train-images-idx3-ubyte.gz (or mnist/train-images-idx3-ubyte) is not in the data "
        f"directory {tmp_path}; get it from http://yann.lecun.com/exdb/mnist/ or "
        "https://ossci-datasets.s3.amazonaws.com/mnist/, or name another directory with "
        "--data-dir or the environment variable EVENCLIP_DATA."
    )


HEAD = b"\x00\x00\x08\x03" + struct.pack(">III", 2, 3, 4)
DAMAGED = {
    "empty": (b"", "does not begin like an idx file of bytes"),
    "a page of the server": (
        b"<!DOCTYPE html><html>Access denied</html>",
        "does not begin like an idx file of bytes",
    ),
    "another type": (b"\x00\x00\x0d\x01" + bytes(8), "does not begin like an idx file of bytes"),
    "half a header": (HEAD[:10], "does not begin like an idx file of bytes"),
    "no axes": (b"\x00\x00\x08\x00" + bytes(8), "does not begin like an idx file of bytes"),
    "cut short": (
        HEAD + bytes(23),
        "holds 23 bytes of data and its header announces 24: was the download cut short?",
    ),
    "too long": (
        HEAD + bytes(25),
        "holds 25 bytes of data and its header announces 24: was the download cut short?",
    ),
    "other images": (HEAD + bytes(24), "has the MD5 "),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("packed", [True, False])
def test_damaged_idx_files_are_refused(tmp_path, case, packed):
    content, sentence = DAMAGED[case]
    path = tmp_path / "mnist" / f"train-images-idx3-ubyte{'.gz' if packed else ''}"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        mnist(directory=tmp_path)
    assert str(caught.value).startswith(f"{path} {sentence}")
    assert "et it again from http://yann.lecun.com/exdb/mnist/ or https" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_damaged_archives_are_refused(tmp_path, damage):
    packed = gzip.compress(HEAD + bytes(range(24)))
    flipped = packed[:20] + bytes([packed[20] ^ 255]) + packed[21:]
    content = {"cut": packed[:-9], "flipped": flipped, "plain": HEAD + bytes(24)}[damage]
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"train-images-idx3-ubyte\.gz cannot be unpacked \(.*\): it is damaged; get",
    ):
        mnist(directory=tmp_path)


def test_idx_files_are_read_as_they_are_written(tmp_path):
    array = MNIST._idx(HEAD + bytes(range(24)), tmp_path)
    np.testing.assert_array_equal(array, np.arange(24).reshape(2, 3, 4))
    array[0] = 0  # the array owns its memory and can be written


# --- digits ---


def test_digits_are_those_of_scikit_learn():
    pixels, labels = load_digits(return_X_y=True)
    train, test, validation = digits(2)
    assert validation is None
    assert len(pixels) == 1797
    assert abs(len(test) - 0.2 * 1797) < 5 * (1797 * 0.16) ** 0.5
    known = {
        bytes(image.astype(np.uint8)): label for image, label in zip(pixels, labels, strict=True)
    }
    assert len(known) == 1797  # no image occurs twice, so rows are distinct
    contents = [
        [bytes((16 * image).round().to(torch.uint8).flatten().tolist()) for image in d.x]
        for d in (train, test)
    ]
    assert not set(contents[0]) & set(contents[1])
    for data, images in zip((train, test), contents, strict=True):
        assert [known[image] for image in images] == data.y.tolist() == data.group.tolist()
        assert float(data.x.max()) == 1.0
    kept, tested = torch.bincount(train.y), torch.bincount(test.y)
    whole = torch.from_numpy(np.bincount(labels))
    others = torch.arange(10) != 8
    assert torch.equal((kept + tested)[others], whole[others])
    assert 0 < int(kept[8]) < 35 < 100 < int(whole[8] - tested[8])
    assert train.records == round(0.8 * int(whole[others].sum()) + 0.072 * int(whole[8])) == 1311


def test_digits_are_decided_by_their_seed_and_thinned_at_the_rate():
    assert_same(digits(1).train, digits(1).train)
    kept = []
    for seed in range(20):
        train, test, _ = digits(seed)
        kept.append((int((train.y == 8).sum()), 174 - int((test.y == 8).sum())))
    few, all_of_them = np.array(kept).sum(0)
    assert few / all_of_them == pytest.approx(0.09, abs=5 * (0.09 * 0.91 / all_of_them) ** 0.5)


# --- toy ---


def test_the_best_accuracy_is_that_of_the_best_classifier():
    """Compare with the rule u·x > 0 on many samples, and with discriminant analysis without u."""
    separation = (2.0, 0.5)
    train, test, _ = toy(0, n=50_000, features=4, separation=separation)
    best = optimum(separation)
    assert best == pytest.approx(norm.cdf(separation), abs=1e-12)
    for k in range(2):
        mine = test.group == k
        error = 5 * (best[k] * (1 - best[k]) / int(mine.sum())) ** 0.5
        right = (test.x.sum(1) > 0).long() == test.y
        assert float(right[mine].double().mean()) == pytest.approx(best[k], abs=error)
        rows = train.group == k
        lda = LinearDiscriminantAnalysis().fit(train.x[rows].numpy(), train.y[rows].numpy())
        assert lda.score(test.x[mine].numpy(), test.y[mine].numpy()) == pytest.approx(
            best[k], abs=error
        )


def test_training_approaches_the_optimum():
    train, test, _ = toy(0, n=20_000)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(10, 2)
    accuracy = []
    for rule in (evenclip.NonPrivate(), evenclip.DPSGD(C0=1.0, sigma=1.0)):
        result = evenclip.fit(model, train, rule=rule, lr=0.5, epochs=2, batch_size=250, seed=0)
        right = result.model(test.x).argmax(1) == test.y
        accuracy.append([float(right[test.group == k].double().mean()) for k in range(2)])
    for reached in accuracy:
        for k, best in enumerate(optimum()):
            error = (best * (1 - best) / int((test.group == k).sum())) ** 0.5
            assert best - 4 * error - 0.01 < reached[k] < best + 4 * error


def test_toy_follows_its_arguments():
    train, test, validation = toy(5, n=10_000, features=3, minority=0.3)
    assert (validation, train.x.shape[1:], len(train) + len(test)) == (None, (3,), 10_000)
    assert train.records == 8000
    assert abs(len(train) - 8000) < 5 * (10_000 * 0.16) ** 0.5
    group = torch.cat([train.group, test.group]).double()
    assert float(group.mean()) == pytest.approx(0.3, abs=5 * (0.21 / 10_000) ** 0.5)
    y = torch.cat([train.y, test.y]).double()
    assert float(y.mean()) == pytest.approx(0.5, abs=5 * (0.25 / 10_000) ** 0.5)
    assert_same(toy(5).test, toy(5).test)
    assert not torch.equal(toy(5).test.x, toy(6).test.x)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"n": 9}, "n is 9; it must be at least 10, for there to be a test set."),
        ({"n": 0}, "n is 0; it must be a whole number of at least 1."),
        ({"features": 0}, "features is 0; it must be a whole number of at least 1."),
        ({"minority": 1.5}, "minority is 1.5; it must lie above 0 and at most at 1."),
        ({"separation": (1.0, -1.0)}, "separation is -1.0; it must be a finite number above 0."),
    ],
)
def test_toy_refuses_values_out_of_range(wrong, sentence):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        toy(**wrong)
    assert str(caught.value) == sentence
