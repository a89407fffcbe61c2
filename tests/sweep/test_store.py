"""Tests of the store: writing a result is atomic."""

from __future__ import annotations

import errno
import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file

from evenclip import files
from evenclip.files import folder
from evenclip.sweep import Store

WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3).T}  # not contiguous


def test_what_is_written_is_read(store, spec):
    given = spec()
    assert not store.has(given)
    store.write(given, {"accuracy": 1.5}, WEIGHTS)
    assert store.has(given)
    assert store.read(given) == {"accuracy": 1.5}
    assert torch.equal(load_file(store.folder(given) / "model.safetensors")["w"], WEIGHTS["w"])
    assert (
        type(given).from_json(json.loads((store.folder(given) / "spec.json").read_text())) == given
    )
    assert not store.has(spec(seed=1))


def test_the_first_result_stays(store, spec):
    store.write(spec(), {"by": "first"}, WEIGHTS)
    store.write(spec(), {"by": "second"}, WEIGHTS)
    assert store.read(spec()) == {"by": "first"}
    assert [p.name for p in store.root.iterdir()] == [spec().hash]  # no scratch files remain


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_full_disk_leaves_nothing_half(store, spec, monkeypatch, fails_at):
    write, written = folder.write_all, []

    def full(handle, content):
        written.append(len(content))
        if len(written) > fails_at:
            write(handle, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(handle, content)

    monkeypatch.setattr(folder, "write_all", full)
    with pytest.raises(OSError, match=r"No space left on device\); make room, or choose another"):
        store.write(spec(), {"accuracy": 1.5}, WEIGHTS)
    assert not store.has(spec())
    assert list(store.root.iterdir()) == []
    monkeypatch.undo()
    store.write(spec(), {"accuracy": 1.5}, WEIGHTS)
    assert store.has(spec())


@pytest.mark.parametrize("name", ["spec.json", "result.json", "model.safetensors", "manifest.json"])
def test_a_damaged_result_is_set_aside_and_said(store, spec, name):
    store.write(spec(), {"accuracy": 81.5}, WEIGHTS)
    path = store.folder(spec()) / name
    content = path.read_bytes()
    path.write_bytes(content[:20] + bytes([content[20] ^ 4]) + content[21:])
    assert not store.has(spec())
    with pytest.raises(files.DamagedError, match="the same command trains it again"):
        store.read(spec())
    sentence = store.set_aside(spec())
    assert sentence.startswith(f"{path} is damaged")
    assert "the same command trains it again. What was there is in " in sentence
    assert len(list((store.root / "damaged").iterdir())) == 1
    store.write(spec(), {"accuracy": 81.5}, WEIGHTS)
    assert store.read(spec()) == {"accuracy": 81.5}
    assert store.set_aside(spec()) is None


def test_the_result_of_another_run_is_not_believed(store, spec):
    store.write(spec(seed=1), {"accuracy": 99.0}, WEIGHTS)
    store.folder(spec(seed=1)).rename(store.folder(spec()))
    assert not store.has(spec())
    with pytest.raises(files.DamagedError, match="holds another run"):
        store.read(spec())


def test_results_are_for_their_owner_alone(store, spec):
    store.write(spec(), {"accuracy": 1.5}, WEIGHTS)
    place = store.folder(spec())
    assert [stat.S_IMODE(path.stat().st_mode) for path in (store.root, place)] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}


def test_a_folder_of_which_a_part_was_deleted_is_computed_again(store, spec):
    store.write(spec(), {"by": "first"}, WEIGHTS)
    (store.folder(spec()) / "result.json").unlink()
    assert not store.has(spec())
    store.write(spec(), {"by": "second"}, WEIGHTS)
    assert store.read(spec()) == {"by": "second"}


def test_a_run_is_claimed_by_one_at_a_time(store, spec):
    with store.claim(spec()) as mine:
        assert mine
        with Store(store.root).claim(spec()) as yours:
            assert not yours
        with store.claim(spec(seed=1)) as another:
            assert another
    with store.claim(spec()) as again:
        assert again


def test_where_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file is not a folder; choose another place\.$"):
        Store(tmp_path / "file" / "runs")
