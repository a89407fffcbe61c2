"""The catalogue: every dataset loads by name, lists missing files and describes itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

import evenclip.data
from evenclip.data import SOURCES, data_directory
from evenclip.data.source import NUMBER, check_splits
from fresh import fresh

FREE = [name for name, source in SOURCES.items() if not source.files]
BUILT_IN = ["adult", "dutch", "mnist", "celeba", "digits", "toy"]


def test_the_names():
    assert list(SOURCES)[:4] == BUILT_IN[:4]
    assert list(SOURCES)[4:] == sorted(list(SOURCES)[4:])
    assert set(SOURCES) >= set(BUILT_IN)
    assert {"adult", "digits", "toy"} <= set(FREE)
    assert all(source.name == name for name, source in SOURCES.items())


def test_every_module_with_a_source_is_in_the_catalogue():
    """An import of each module, as an independent way to find the constants."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(evenclip.data.__path__, "evenclip.data.")
    ]
    defined = {id(module.SOURCE) for module in modules if hasattr(module, "SOURCE")}
    assert defined == {id(source) for source in SOURCES.values()}


@pytest.mark.parametrize("name", SOURCES)
def test_every_dataset_describes_itself(name):
    source = SOURCES[name]
    assert all((source.title, source.rows, source.licence, source.origin))
    assert len(set(source.groups)) == len(source.groups) >= 2
    assert source.pair is None or set(source.pair) < set(source.groups)
    module = inspect.getmodule(source.load)
    facts = [line.split("|")[1].strip() for line in module.__doc__.splitlines() if "|" in line]
    assert {"samples", "features", "classes", "groups", "source", "licence"} <= set(facts)


@pytest.mark.parametrize("name", SOURCES)
def test_every_dataset_is_loaded_the_same_way(name, tmp_path, monkeypatch):
    """Loaders take a seed and a directory, and name missing files."""
    monkeypatch.delenv("EVENCLIP_DATA", raising=False)
    source = SOURCES[name]
    assert {"seed", "directory"} <= set(inspect.signature(source.load).parameters)
    if name not in FREE:
        for directory in (None, tmp_path):
            with pytest.raises(FileNotFoundError, match=f"^{source.files[0].path}") as caught:
                source.load(0, directory)
            assert source.origin in str(caught.value)
            assert "--data-dir or the environment variable EVENCLIP_DATA" in str(caught.value)
            assert not source.here(directory)
            assert source.missing(directory) == source.files
        return
    splits = source.load(1, tmp_path)
    check_splits(splits, source, name)
    assert splits.train.name == name
    assert splits.train.group_names == source.groups
    assert source.here(None)
    again = source.load(seed=1, directory=None)
    assert torch.equal(splits.train.x, again.train.x)
    assert not torch.equal(splits.train.x, source.load(2).train.x)


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_here_is_as_described(name):
    source = SOURCES[name]
    if not source.here(data_directory()):
        pytest.skip(f"{source.lacks(data_directory())}; see `evenclip data`")
    train, test, validation = source.load(0)
    assert train.group_names == test.group_names == source.groups
    assert len(train) + len(test) + (0 if validation is None else len(validation)) <= source.rows


def test_the_digits_have_the_pair_of_the_paper():
    pairs = {name: SOURCES[name].pair for name in BUILT_IN if SOURCES[name].pair is not None}
    assert pairs == {"mnist": ("2", "8"), "digits": ("2", "8")}


def test_what_is_not_covered_is_said_in_sentences():
    for source in SOURCES.values():
        assert all(
            sentence[0].isupper() and sentence.endswith(".") for sentence in source.uncovered
        )
    adult = " ".join(SOURCES["adult"].uncovered)
    for access in ("mean and the standard deviation",):
        assert access in adult
    assert NUMBER not in SOURCES["adult"].uncovered  # a constant of the package
    assert NUMBER in SOURCES["celeba"].uncovered
    assert SOURCES["toy"].uncovered == ()


def test_options_reach_the_dataset():
    assert SOURCES["adult"].load(0, group="race").train.group_names == ("non-white", "white")
    toy = SOURCES["toy"].load(0, n=100)
    assert (len(toy.train) + len(toy.test), toy.train.records) == (100, 80)
    with pytest.raises(TypeError, match="unexpected keyword argument 'group'"):
        SOURCES["digits"].load(0, group="sex")


def test_adult_does_not_need_the_directory_that_others_do(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENCLIP_DATA", str(tmp_path))
    assert SOURCES["adult"].here(tmp_path)
    assert len(SOURCES["adult"].load(0).train) == 23_498


def test_missing_files_are_listed(tmp_path):
    (tmp_path / "mnist").mkdir()
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"):
        (tmp_path / "mnist" / name).write_bytes(b"")
    source = SOURCES["mnist"]
    assert [file.path for file in source.missing(tmp_path)] == [
        "mnist/t10k-images-idx3-ubyte.gz",
        "mnist/t10k-labels-idx1-ubyte.gz",
    ]
    assert (
        source.lacks(tmp_path)
        == "mnist/t10k-images-idx3-ubyte.gz, mnist/t10k-labels-idx1-ubyte.gz are missing"
    )
    assert SOURCES["dutch"].lacks(tmp_path) == "dutch/dutch_census_2001.arff is missing"


def test_the_catalogue_brings_nothing_heavy():
    heavy = ["pandas", "scipy", "sklearn", "pyarrow", "PIL", "rich", "typer"]
    code = (
        f"import sys, evenclip.data.catalogue; print([name for name in {heavy} if name in "
        "sys.modules])"
    )
    assert fresh(code) == "[]\n"
