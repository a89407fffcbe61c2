"""Count the modules that one `evenclip compare` passes, from the command line to the page.

    python benchmarks/hops.py [--source DIR ...] [--keep FILE] [--list]

Runs `evenclip compare toy --seeds 1 --epochs 1 --rules dpsgd --out TEMPORARY` in a fresh process
under `sys.setprofile`, with an empty cache. It prints, for each source tree:

    modules   modules of the package in which code ran
    hops      pairs of modules of which the first called the second
    rooms     pairs of rooms of which the first called the second; a room is a folder of the
              package, or a module that lies at its top
    longest   most modules on one call stack, where one module calling itself counts once

The caller is the nearest frame of the package, so code of other packages in between does not count.
Code that runs while a module is imported does not count. Worker processes are not measured.
`--source` names a folder that contains `evenclip`, by default that of this checkout; repeat it to
compare trees. `--keep` writes the numbers and all pairs to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

COMMAND = ["compare", "toy", "--seeds", "1", "--epochs", "1", "--rules", "dpsgd"]
SOURCE = Path(__file__).parent.parent / "src"


class Recorder:
    """A profile function that records which modules below a folder call each other.

    Attributes:
        modules: paths relative to the folder.
        hops: pairs (calling module, called module).
        longest: the longest chain of modules on one call stack, from the outside in.
    """

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}{os.sep}"
        self.modules: set[str] = set()
        self.hops: set[tuple[str, str]] = set()
        self.longest: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call of a function of the package."""
        if event != "call" or not frame.f_code.co_filename.startswith(self._prefix):
            return
        chain = self._chain(frame)
        if chain:
            self.modules.add(chain[-1])
            self.hops.update([(chain[-2], chain[-1])] if len(chain) > 1 else [])
            self.longest = max(self.longest, chain, key=len)

    def _chain(self, frame: FrameType | None) -> list[str]:
        """Return the modules on the stack, from the outside in; none during an import."""
        chain: list[str] = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._prefix):
                if frame.f_code.co_name == "<module>":
                    return []
                module = frame.f_code.co_filename.removeprefix(self._prefix)
                if not chain or chain[-1] != module:
                    chain.append(module)
            frame = frame.f_back
        return chain[::-1]


def record(out: str) -> dict[str, Any]:
    """Run the command in this process; return what was recorded, as plain values."""
    import evenclip
    from evenclip.cli import main

    recorder = Recorder(Path(evenclip.__file__).parent)
    sys.argv = ["evenclip", *COMMAND, "--out", out]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    return {
        "modules": sorted(recorder.modules),
        "hops": sorted(recorder.hops),
        "rooms": sorted({(room(a), room(b)) for a, b in recorder.hops if room(a) != room(b)}),
        "longest": recorder.longest,
    }


def room(module: str) -> str:
    """Return the room of a module: its folder, or the module itself at the top.

    >>> room("report/charts.py"), room("check.py")
    ('report', 'check')
    """
    return Path(module).parts[0].removesuffix(".py")


def measure(source: Path) -> dict[str, Any]:
    """Record the command of a source tree in a fresh process.

    Raises:
        RuntimeError: the command failed; the message is its last output.
    """
    with tempfile.TemporaryDirectory(prefix="hops-") as folder:
        kept = Path(folder) / "hops.json"
        done = subprocess.run(
            [sys.executable, str(Path(__file__).absolute()), "--record", str(kept)],
            env={
                **os.environ,
                "PYTHONPATH": str(source.absolute()),
                "EVENCLIP_CACHE": f"{folder}/cache",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{source}: {done.stderr.strip()[-500:]}")
        return {"commit": commit(source), **json.loads(kept.read_text())}


def commit(source: Path) -> str:
    """Return the commit of a source tree, with "+" if files of the package were changed."""
    git = ["git", "-C", str(source)]
    run = {"capture_output": True, "text": True, "check": True}
    hashed = subprocess.run([*git, "rev-parse", "--short", "HEAD"], **run).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "evenclip"], **run).stdout.strip()
    return hashed + ("+" if changed else "")


def main() -> None:
    """Measure the trees, print a table, and write a file."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--source", type=Path, action="append", help="folder with evenclip in it")
    parser.add_argument("--keep", type=Path, help="JSON file to write")
    parser.add_argument("--list", action="store_true", help="also print the hops")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record is not None:
        with tempfile.TemporaryDirectory(prefix="hops-out-") as out:
            given.record.write_text(json.dumps(record(out)))
        return
    trees = [measure(source) for source in given.source or [SOURCE]]
    print(f"{'commit':<12}{'modules':>9}{'hops':>9}{'rooms':>9}{'longest':>9}")
    for tree in trees:
        counts = (len(tree[name]) for name in ("modules", "hops", "rooms", "longest"))
        print(f"{tree['commit']:<12}" + "".join(f"{count:>9}" for count in counts))
        if given.list:
            print("\n".join(f"  {a} -> {b}" for a, b in tree["hops"]))
            print("  longest: " + " -> ".join(tree["longest"]))
    if given.keep is not None:
        contents = {"command": ["evenclip", *COMMAND], "trees": trees}
        given.keep.write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main()
