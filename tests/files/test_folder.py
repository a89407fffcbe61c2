"""A folder is replaced without a moment in which there is none, and vouches for its files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import pytest

from evenclip import files
from evenclip.files import folder as folders
from evenclip.files import kinds

OLD = {"a.bin": b"old a", "b.bin": b"old b"}
NEW = {"a.bin": b"new a", "b.bin": b"new b"}


def test_contents_come_back_with_their_manifest(tmp_path):
    place = files.write_folder(tmp_path / "run", OLD, kinds.RUN, replace=False, run="abc")
    assert files.read_folder(place, kinds.RUN, run="abc") == OLD
    assert files.read_folder(place, kinds.RUN, ["b.bin"]) == {"b.bin": b"old b"}


def test_an_existing_folder_stays_unless_it_is_to_be_replaced(tmp_path):
    place = files.write_folder(tmp_path / "run", OLD, kinds.RUN, replace=False)
    files.write_folder(place, NEW, kinds.RUN, replace=False)
    assert files.read_folder(place, kinds.RUN) == OLD
    files.write_folder(place, NEW, kinds.RUN, replace=True)
    assert files.read_folder(place, kinds.RUN) == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_works_with_and_without_an_exchange(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    place = files.write_folder(tmp_path / "model", OLD, kinds.MODEL, replace=False)
    files.write_folder(place, NEW, kinds.MODEL, replace=True)
    assert files.read_folder(place, kinds.MODEL) == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_there_is_a_whole_folder_after_every_operation(tmp_path, monkeypatch):
    place = files.write_folder(tmp_path / "model", OLD, kinds.MODEL, replace=False)
    moments, replace, rmtree = [], os.replace, shutil.rmtree

    def watched(operation):
        def run(*given, **options):
            operation(*given, **options)
            moments.append(files.read_folder(place, kinds.MODEL))

        return run

    monkeypatch.setattr(os, "replace", watched(replace))
    monkeypatch.setattr(shutil, "rmtree", watched(rmtree))
    files.write_folder(place, NEW, kinds.MODEL, replace=True)
    assert moments
    assert all(moment in (OLD, NEW) for moment in moments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: (place / "a.bin").write_bytes(b"bad a"), "a.bin is damaged, or of another"),
        (lambda place: (place / "a.bin").write_bytes(b"old a and more"), "a.bin is damaged"),
        (lambda place: (place / "a.bin").unlink(), "a.bin is missing; the same command trains"),
        (lambda place: (place / files.MANIFEST).write_bytes(b""), "is damaged .no JSON"),
        (lambda place: (place / files.MANIFEST).write_bytes(b"[" * 10**5), "nested too deep"),
        (
            lambda place: (place / files.MANIFEST).write_bytes(
                (place / files.MANIFEST).read_bytes().replace(b'"bytes": 5', b'"bytes": 6', 1)
            ),
            "its checksum does not match its content",
        ),
    ],
)
def test_damage_is_named_with_a_remedy(tmp_path, change, message):
    place = files.write_folder(tmp_path / "run", OLD, kinds.RUN, replace=False)
    change(place)
    with pytest.raises(files.DamagedError, match=message):
        files.read_folder(place, kinds.RUN)


def test_a_folder_of_something_else_is_refused(tmp_path):
    place = files.write_folder(tmp_path / "run", OLD, kinds.RUN, replace=False, run="abc")
    with pytest.raises(
        files.DamagedError, match=r"holds another run \(run is 'abc', and not 'abd'\)"
    ):
        files.read_folder(place, kinds.RUN, run="abd")
    with pytest.raises(files.DamagedError, match=r"holds another model \(kind is 'run'"):
        files.read_folder(place, kinds.MODEL)


def test_private_rows_are_removed_when_their_process_is_killed(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from evenclip import files\n"
        "with files.private_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'rows.csv').write_text('private')\n"
        "    print(oct(folder.stat().st_mode), flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline().strip().endswith(b"0o40700")
    assert list(tmp_path.glob("*/rows.csv"))
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(200):
        if not list(tmp_path.iterdir()):
            break
        threading.Event().wait(0.05)
    assert not list(tmp_path.iterdir())
