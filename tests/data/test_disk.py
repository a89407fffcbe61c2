"""Files that users provide (found, missing, wrong), and the random numbers of generated data."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from evenclip.data import File, data_directory
from evenclip.data.disk import cache_directory
from evenclip.data.sample import stream

ORIGIN = "https://example.org/a.bin"


def test_the_data_directory_is_the_one_given_then_that_of_the_environment(tmp_path, monkeypatch):
    (tmp_path / "named").mkdir()
    monkeypatch.delenv("EVENCLIP_DATA", raising=False)
    assert data_directory() is None
    monkeypatch.setenv("EVENCLIP_DATA", "")
    assert data_directory() is None
    monkeypatch.setenv("EVENCLIP_DATA", str(tmp_path / "named"))
    assert data_directory() == tmp_path / "named"
    assert data_directory(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_directory("~/named") == tmp_path / "named"


@pytest.mark.parametrize("given", [True, False])
def test_a_data_directory_that_is_none_is_named(tmp_path, monkeypatch, given):
    monkeypatch.setenv("EVENCLIP_DATA", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError) as caught:
        data_directory(tmp_path / "absent" if given else None)
    assert str(caught.value) == (
        f"The data directory {tmp_path / 'absent'} ({'as given' if given else 'EVENCLIP_DATA'}) "
        "is not a folder; name one with --data-dir or the environment variable EVENCLIP_DATA."
    )


def test_a_missing_file_is_named_with_its_folder_and_its_source(tmp_path, monkeypatch):
    monkeypatch.delenv("EVENCLIP_DATA", raising=False)
    file = File("a/a.gz", also=("a/a.bin",))
    with pytest.raises(FileNotFoundError) as caught:
        file.require(tmp_path, ORIGIN)
    assert str(caught.value) == (
        f"a/a.gz (or a/a.bin) is not in the data directory {tmp_path}; get it from {ORIGIN}, or "
        "name another directory with --data-dir or the environment variable EVENCLIP_DATA."
    )
    with pytest.raises(FileNotFoundError) as caught:
        File("a/a.gz").read(None, ORIGIN)
    assert str(caught.value) == (
        f"a/a.gz is needed and there is no data directory; get it from {ORIGIN}, put it into a "
        "folder and name that folder with --data-dir or the environment variable EVENCLIP_DATA."
    )


def test_a_file_is_found_under_its_other_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.bin").write_bytes(b"x")
    file = File("a/a.gz", also=("a/a.bin",))
    assert file.find(tmp_path) == file.require(tmp_path, ORIGIN) == tmp_path / "a" / "a.bin"
    assert file.find(None) is None


def test_a_checksum_that_differs_is_a_sentence(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"right")
    right, wrong = (hashlib.sha256(content).hexdigest() for content in (b"right", b"wrong"))
    assert File("a.bin", right).read(tmp_path, ORIGIN) == b"right"
    assert File("a.bin").read(tmp_path, ORIGIN) == b"right"
    (tmp_path / "a.bin").write_bytes(b"wrong")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        File("a.bin", right).read(tmp_path, ORIGIN)
    assert str(caught.value) == (
        f"{tmp_path / 'a.bin'} has the SHA-256 {wrong[:12]}... and should have {right[:12]}...: "
        f"it is damaged or another version; get it again from {ORIGIN}."
    )


def test_the_cache_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "a" / "b"))
    assert cache_directory() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.delenv("EVENCLIP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "evenclip"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(
        OSError,
        match=r"^The cache directory .*below cannot be created \(Not a directory\); name another",
    ):
        cache_directory()


# --- random numbers ---


def test_streams_differ_between_seeds_and_datasets():
    draws = {
        tuple(stream(seed, name).integers(2**60, size=2))
        for seed in range(3)
        for name in ("mnist", "dutch")
    }
    assert len(draws) == 6
    assert stream(1, "mnist").random() == stream(1, "mnist").random()
    with pytest.raises(
        ValueError, match=r"^seed is -1; it must be a whole number of at least 0\.$"
    ):
        stream(-1, "mnist")


def test_paths_are_given_with_a_folder():
    """Every dataset has its own folder."""
    from evenclip.data import SOURCES

    for source in SOURCES.values():
        assert {Path(file.path).parts[0] for file in source.files} <= {source.name}
