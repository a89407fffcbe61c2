"""A file is there as a whole or not at all; scratch files are nobody's target."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from evenclip import files
from evenclip.files import kinds
from evenclip.files.write import scratch_file


def test_private_files_are_for_their_owner_and_public_ones_for_all(tmp_path):
    old = os.umask(0o022)
    try:
        private = files.write(tmp_path / "results.json", "{}", kinds.RESULTS)
        public = files.write(tmp_path / "privacy.json", "{}", kinds.STATEMENT)
    finally:
        os.umask(old)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, public)] == [0o600, 0o644]


def test_a_link_is_neither_followed_nor_replaced(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out").symlink_to(victim)
    with pytest.raises(OSError, match=r"out is a link; name the file that it points to"):
        files.write(tmp_path / "out", "theirs", kinds.REPORT)
    assert victim.read_text() == "mine"
    assert (tmp_path / "out").is_symlink()


def test_a_folder_and_a_device_are_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder; name a file\.$"):
        files.write(tmp_path, "x", kinds.REPORT)
    with pytest.raises(OSError, match=r"/dev/null is not an ordinary file"):
        files.write("/dev/null", "x", kinds.REPORT)


def test_a_name_that_is_too_long_is_a_sentence(tmp_path):
    with pytest.raises(OSError, match=r"cannot be written \(File name too long\); choose a short"):
        files.write(tmp_path / ("x" * 300), "x", kinds.REPORT)


def test_scratch_names_cannot_be_predicted(tmp_path):
    names = set()
    for _ in range(20):
        with scratch_file(tmp_path, 0o600) as (path, _handle):
            names.add(path.name)
    assert len(names) == 20
    assert not list(tmp_path.iterdir())


def test_leftovers_of_dead_processes_are_removed_and_those_of_live_ones_kept(tmp_path):
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from evenclip.files.write import scratch_file, scratch_folder\n"
        "with scratch_file(Path(sys.argv[1]), 0o600), scratch_folder(Path(sys.argv[1]), 0o700):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    living, dying = (
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    )
    try:
        for process in (living, dying):
            assert process.stdout.readline() == b"ready\n"
        assert len(list(tmp_path.iterdir())) == 4
        dying.kill()
        dying.wait()
        files.clear_leftovers(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        for process in (living, dying):
            process.kill()
            process.wait()
            process.stdout.close()


def test_what_is_planted_under_a_scratch_name_is_left_alone(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "rows.csv").write_text("1")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".evenclip-0123456789abcdef").symlink_to(victim)
    files.clear_leftovers(folder)
    assert (victim / "rows.csv").is_file()


@pytest.mark.parametrize("limit", [0, 100])
def test_a_failed_write_leaves_the_old_file(tmp_path, limit):
    path = files.write(tmp_path / "report.html", "old", kinds.REPORT)
    code = (
        "import resource, sys\n"
        "from evenclip import files\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "try:\n"
        "    files.write(sys.argv[1], 'new' * 100, files.kinds.REPORT)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert "cannot be written (File too large); raise the limit on the size" in done.stdout
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
