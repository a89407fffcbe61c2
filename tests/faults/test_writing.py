"""Writing that is cut off: killed before every single operation, and on a full disk.

What was there before must be there afterwards, or what was to be written, as a whole. The next
command removes what the killed one left. `cases(long)` yields (id, callable); a callable raises
AssertionError with the class of the outcome: LOST (neither the old nor the new), LEFT (a leftover
stays) or TRACEBACK (another error than a sentence).
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from evenclip import files
from evenclip.files import kinds
from evenclip.files.write import _cleared
from evenclip.sweep import Spec, Store
from evenclip.training import checkpoint
from evenclip.training.checkpoint import Checkpoint

OLD, NEW = {"a.bin": b"old a", "b.bin": b"old b"}, {"a.bin": b"new a", "b.bin": b"new b" * 5000}
SPEC = Spec({"name": "toy"}, {"name": "mlp"}, {"name": "dpsgd"}, 0.1, 1, 32, None, None, seed=0)
WATCHED = (
    "open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "link", "close",
)  # fmt: skip


# --- what is written: (prepare, write, read) ------------------------------------------------------


def _file(folder: Path, content: str) -> None:
    files.write(folder / "report.html", content, kinds.REPORT)


def _folder(folder: Path, contents: dict[str, bytes]) -> None:
    files.write_folder(folder / "model", contents, kinds.MODEL, replace=True)


def _checkpoint(folder: Path, step: int) -> None:
    published = {"place": ["run", step], "ledger": [], "durable": True}
    checkpoint.save(folder, step, Checkpoint({"w": torch.ones(2)}, published, {"key": "k"}))


def _result(folder: Path, accuracy: float) -> None:
    Store(folder / "runs").write(SPEC, {"accuracy": accuracy}, {"w": torch.ones(2)})


def _read_file(folder: Path) -> Any:
    return (folder / "report.html").read_text()


def _read_folder(folder: Path) -> Any:
    return files.read_folder(folder / "model", kinds.MODEL)


def _read_checkpoint(folder: Path) -> Any:
    latest = checkpoint.latest(folder)
    assert latest is not None
    return checkpoint.load(latest).published["place"]


def _read_result(folder: Path) -> Any:
    store = Store(folder / "runs")
    return store.read(SPEC) if store.has(SPEC) else None


WRITERS: dict[str, tuple[Callable[..., None], Any, Any, Callable[[Path], Any]]] = {
    "file": (_file, "old", "new" * 5000, _read_file),
    "folder": (_folder, OLD, NEW, _read_folder),
    "checkpoint": (_checkpoint, 5, 7, _read_checkpoint),
    "run": (_result, None, 81.5, _read_result),
}


# --- crashes --------------------------------------------------------------------------------------


def _forked(work: Callable[[], None]) -> int:
    """Run in a forked process; return its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _killed_at(number: int, work: Callable[[], None]) -> None:
    """Kill this process before the operation of this number."""
    count = [0]
    kill = os.kill

    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            if count[0] == number:
                kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return operation(*given, **options)

        return run

    for name in WATCHED:
        setattr(os, name, watched(getattr(os, name)))
    work()


def _crash(name: str, number: int) -> bool:
    """Kill a writer before an operation, and look; return whether there was such an operation."""
    write, old, new, read = WRITERS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if old is not None:
            write(folder, old)
        before = read(folder)
        status = _forked(lambda: _killed_at(number, lambda: write(folder, new)))
        assert status in (0, -signal.SIGKILL), f"TRACEBACK status {status}"
        after = read(folder)
        if after != before:
            assert status == 0 or after == _expected(name), f"LOST {after!r}"[:200]
        _next_command(write, folder, new)
        assert read(folder) == _expected(name), "LOST by the next command"
        left = [str(path) for path in folder.rglob(".evenclip-*")]
        assert not left, f"LEFT {left}"
        return status != 0


def _next_command(write: Callable[..., None], folder: Path, new: Any) -> None:
    """Write again, as another process does."""
    _cleared.clear()
    write(folder, new)


@functools.cache
def _expected(name: str) -> Any:
    write, _, new, read = WRITERS[name]
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), new)
        return read(Path(place))


def _crash_everywhere(name: str, every: int) -> int:
    """Kill a writer before each operation, and return how many there were."""
    number = 0
    while _crash(name, number):
        number += every
    return number


# --- a full disk ----------------------------------------------------------------------------------


def _limited(name: str, size: int) -> None:
    """Write with a limit on the size of files."""
    write, old, new, read = WRITERS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if old is not None:
            write(folder, old)
        before = read(folder)

        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            try:
                write(folder, new)
            except OSError as error:
                os._exit(0 if str(error).endswith(".") and "File too large" in str(error) else 4)
            os._exit(5)

        status = _forked(work)
        if status == 5:  # it fitted
            return
        assert status == 0, f"TRACEBACK status {status}"
        assert read(folder) == before, "LOST"
        left = [str(path) for path in folder.rglob(".evenclip-*")]
        assert not left, f"LEFT {left}"


def cases(long: bool = False) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every writer, killed and on a full disk."""
    for name in WRITERS:
        for number in range(0, 60, 1 if long else 3):
            yield f"killed/{name}/{number}", functools.partial(_only, name, number)
        for size in (0, 1, 64, 400, 1000, 3000) if long else (0, 400):
            yield f"full/{name}/{size}", functools.partial(_limited, name, size)


def _only(name: str, number: int) -> None:
    _crash(name, number)


# --- tests ----------------------------------------------------------------------------------------


def test_a_writer_that_is_killed_loses_nothing():
    assert {name: _crash_everywhere(name, 2) > 4 for name in WRITERS} == dict.fromkeys(
        WRITERS, True
    )


def test_a_full_disk_costs_nothing_and_is_said():
    for name in WRITERS:
        for size in (0, 400):
            _limited(name, size)
