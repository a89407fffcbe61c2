"""Tests of the store: writing a result is atomic."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from evenclip.sweep import Store
from evenclip.sweep import store as module

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


@pytest.mark.parametrize("fails_at", ["spec.json", "model.safetensors", "result.json"])
def test_a_full_disk_leaves_nothing_half(store, spec, monkeypatch, fails_at):
    write = module._write

    def full(path, content):
        if path.name == fails_at:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(OSError, match="No space left on device"):
        store.write(spec(), {"accuracy": 1.5}, WEIGHTS)
    assert not store.has(spec())
    assert list(store.root.iterdir()) == []
    monkeypatch.undo()
    store.write(spec(), {"accuracy": 1.5}, WEIGHTS)
    assert store.has(spec())


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
    with pytest.raises(
        OSError, match=r"cannot be created \(Not a directory\); choose another folder for results\."
    ):
        Store(tmp_path / "file" / "runs")
