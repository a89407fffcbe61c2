"""Start and end processes that see neither the current folder nor the user's script.

A new process imports from Python's own folders, from installed packages and from the folders of
PYTHONPATH. The current folder and that of the script are not among them: a file `json.py` there
would be executed in place of Python's module. An empty entry of PYTHONPATH, which stands for the
current folder, is left out.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evenclip.sweep.describe.files import check_not_loading

__all__ = [
    "as_environment",
    "check_handles",
    "close",
    "cores",
    "death",
    "end",
    "environment",
    "python",
    "start",
]

# The package is found last, so that nothing beside it takes the place of another module.
_BODY = "import sys; sys.path.append(sys.argv[1]); from {} import main; main()"
_PER_PROCESS = 8  # handles of its pipes, and of starting it
_SPARE = 32  # handles for reading data and writing results


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, str]:
    """Return the environment for a new process, without the current folder in PYTHONPATH."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return kept | path | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def as_environment(given: Mapping[str, str]) -> Iterator[None]:
    """Make this the environment of the process, for libraries that start processes themselves."""
    before = dict(os.environ)
    try:
        _set_environment(given)
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def python() -> list[str]:
    """Return the command that starts Python without the current folder, with our own flags."""
    flags = ["-I"] if sys.flags.isolated else ["-P"]
    flags += ["-E"] if sys.flags.ignore_environment else []
    flags += ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, *flags]


def start(module: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a process that calls the `main` of a module of this package.

    Args:
        module: name of the module.
        **options: further options of `subprocess.Popen`. Input and output are pipes.

    Raises:
        ValueError: the file of a rule, model or dataset is being loaded.
    """
    check_not_loading()
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [*python(), "-c", _BODY.format(module), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=environment(),
        **options,
    )


def check_handles(processes: int) -> None:
    """Raise the limit on open files for this many processes, as far as the system allows.

    Raises:
        OSError: the limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open_handles() + processes * _PER_PROCESS + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        plural = "es need" if processes > 1 else " needs"
        raise OSError(
            f"This process may open {hard} files at a time, and {processes} worker process{plural} "
            f"{needed}; raise the limit (ulimit -n {max(256, needed)}), or use fewer workers."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open_handles() -> int:
    """Return the number of open handles; a usual number where the system does not list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return len(os.listdir(folder))
    return 16


def end(process: subprocess.Popen[Any], *, at_once: bool) -> None:
    """End a process after its current task, or at once. Its output can still be read."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    if at_once:
        process.kill()
    process.wait()
    with suppress(ProcessLookupError, PermissionError):  # its children hold our pipes open
        os.killpg(process.pid, signal.SIGKILL)


def close(process: subprocess.Popen[Any]) -> None:
    """Close the streams of a process that has ended."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def death(code: int) -> str:
    """Say how a process ended, given its return code."""
    if code >= 0:
        return f"its process ended with status {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"its process was ended by {signal.Signals(-code).name}{hint}"
