"""Processes: what is executed beside a table, edited while a comparison runs, or left behind.

`cases(long)` yields (id, callable); a callable raises AssertionError with the class of the outcome:
EXECUTED (a planted file ran), STALE (results of other code under a hash), LEFT (private rows stay),
OPEN (others can read rows), WRONG (another result), TRACEBACK.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import evenclip

ROOT = Path(evenclip.__file__).parents[1]
MODULES = (
    "json", "queue", "torch", "numpy", "sitecustomize", "usercustomize", "pickle", "threading",
    "typing", "pandas", "numexpr",
)  # fmt: skip
MORE_MODULES = (
    "re", "runpy", "socket", "subprocess", "signal", "struct", "tempfile", "hashlib", "random",
    "inspect", "dataclasses", "multiprocessing", "concurrent", "logging", "warnings", "scipy",
    "sklearn", "pyarrow", "rich", "typer", "click", "safetensors", "cryptography", "numba",
    "bottleneck", "dp_accounting", "shutil", "platform", "ctypes", "_json", "encodings", "site",
)  # fmt: skip


def table(folder: Path, rows: int = 500) -> Path:
    """Write a small table."""
    lines = [
        f"{18 + i * 7 % 50},{1000 + i * 37 % 900},{'fm'[i % 2]},{['no', 'yes'][i * 7 % 50 > 25]}"
        for i in range(rows)
    ]
    path = folder / "people.csv"
    path.write_text("\n".join(["age,income,sex,hired", *lines]) + "\n")
    return path


def run(command: list[str], folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with this package and a cache of its own."""
    home = {"EVENCLIP_CACHE": str(folder / ".cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    kept = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=kept | home | changes, capture_output=True,
        text=True, check=False, timeout=300, encoding="utf-8", errors="replace",
    )  # fmt: skip


SCRIPT = "from evenclip.__main__ import main; main()"  # with -P, as the script `evenclip`
COMPARE = (
    "compare people.csv --target hired --group sex --seeds 1 --epochs 1 --lr 0.1 --rules dpsgd"
)
LIMITS = {  # failures, and the sentence of docs/reliability.md that states them
    r"planted: \w+, (module|-m): EXECUTED \['warnings'\]": "A file `warnings.py` in the current "
    "folder is executed by `python -m evenclip`",
}
COMMANDS = {
    "compare": f"{COMPARE} --workers 2 --risk --out out",
    "train": "train people.csv --target hired --group sex --epochs 1 --epsilon 8",
    "epsilon": "epsilon --sigma 1.0 --rate 0.01 --steps 100 --delta 1e-5",
    "paper": "paper list",
    "data": "data schema people.csv",
}


def planted(command: str, start: str, names: tuple[str, ...], pythonpath: str | None) -> None:
    """Run a command in a folder with planted modules."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table(folder)
        for module in names:
            hit = f"open({str(folder / 'HIT')!r}, 'a').write({module + chr(10)!r})"
            (folder / f"{module}.py").write_text(f"{hit}\nraise SystemExit('planted')\n")
        begin = ["-m", "evenclip"] if start == "module" else ["-P", "-c", SCRIPT]
        changes = {} if pythonpath is None else {"PYTHONPATH": pythonpath}
        done = run([*begin, *COMMANDS[command].split()], folder, **changes)
        hits = folder / "HIT"
        assert not hits.exists(), f"EXECUTED {hits.read_text().split()}"
        assert done.returncode == 0, f"TRACEBACK {done.stderr[-600:]}"


# --- code that is edited, and code beside the file ---

RULE = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from evenclip.rules import Rule
FACTOR = 1.0
@dataclass(frozen=True)
class Mine(Rule):
    name: ClassVar[str] = "mine"
    C: float = 1.0
    sigma: float = 1.0
    def sensitivity(self, now): return self.C * FACTOR
    def weight(self, norm, group, now): return (self.C / norm).clamp(max=1.0)
"""
IMPORTED = """
import pathlib, sys
import mine
from evenclip.sweep.describe import describe_rule
rule = mine.Mine()
describe_rule(rule)
{change}
try:
    described = describe_rule(rule)
except ValueError as error:
    print("refused", error)
else:
    print("accepted", described["sha256"])
"""
EDIT = "pathlib.Path('mine.py').write_text(pathlib.Path('mine.py').read_text().replace({!r}, {!r}))"
CHANGES = {
    "a constant": (EDIT.format("FACTOR = 1.0", "FACTOR = 0.5"), "refused"),
    "a method": (EDIT.format("max=1.0", "max=2.0"), "refused"),
    "the noise": (EDIT.format("return self.C * FACTOR", "return 0.1"), "refused"),
    "a class in memory": ("mine.Mine.sensitivity = lambda self, now: 0.5", "refused"),
    "a constant in memory": ("mine.FACTOR = 0.5", "refused"),
    "a comment": (EDIT.format("FACTOR = 1.0", "FACTOR = 1.0  # as before"), "accepted"),
    "nothing": ("", "accepted"),
    "the same size and time": (
        "import os; s = os.stat('mine.py'); "
        + EDIT.format("FACTOR = 1.0", "FACTOR = 3.0")
        + "; os.utime('mine.py', ns=(s.st_atime_ns, s.st_mtime_ns))",
        "refused",
    ),
}


def edited_after_import(change: str, outcome: str) -> None:
    """A rule of an imported module is refused if its file defines another one."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "mine.py").write_text(RULE)
        (Path(name) / "main.py").write_text(IMPORTED.format(change=change))
        done = run(["main.py"], Path(name))
        assert done.returncode == 0, f"TRACEBACK {done.stderr[-600:]}"
        assert done.stdout.startswith(outcome), f"STALE {done.stdout}"


def edited_before_a_worker(kind: str) -> None:
    """A file that was edited after it was described is not executed."""
    from evenclip.sweep.describe import describe_file
    from evenclip.sweep.describe.files import load_module

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"{kind}.py"
        path.write_text("VALUE = 1\n")
        described = describe_file(path)
        path.write_text("VALUE = 2\n")
        try:
            module = load_module(described)
        except ValueError as error:
            assert "has changed since the comparison began" in str(error), f"STALE {error}"
        else:
            raise AssertionError(f"STALE {module.VALUE}")


NEIGHBOURS = {
    "by the folder in the path": "import sys, os; sys.path.insert(0, os.path.dirname(__file__))\n"
    "import helper\n",
    "by its path": "import importlib.util as u, os, sys\n"
    "place = os.path.join(os.path.dirname(__file__), 'helper.py')\n"
    "s = u.spec_from_file_location('helper', place)\n"
    "m = u.module_from_spec(s); sys.modules['helper'] = m; s.loader.exec_module(m)\n",
    "plainly": "import helper\n",
}


def neighbour(how: str) -> None:
    """A file that imports one beside it, which no hash covers, is refused."""
    from evenclip.sweep.describe import describe_file
    from evenclip.sweep.describe.files import load_module

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "helper.py").write_text("VALUE = 1\n")
        path = Path(name) / "given.py"
        path.write_text(NEIGHBOURS[how])
        before = list(sys.path)
        try:
            load_module(describe_file(path))
        except ValueError as error:
            assert "Runs are named by the content of this one file" in str(error), f"STALE {error}"
        else:
            raise AssertionError("STALE helper.py is in no hash")
        finally:
            sys.path[:] = before
            sys.modules.pop("helper", None)


def comparison_in_a_rule_file() -> None:
    """A file that starts a comparison when it is loaded starts no processes without end."""
    with tempfile.TemporaryDirectory() as name:
        table(Path(name))
        call = (
            'evenclip.compare("people.csv", [Mine()], 1, target="hired", group="sex", epochs=1)\n'
        )
        (Path(name) / "main.py").write_text(f"import evenclip\n{RULE}\n{call}")
        done = run(["main.py"], Path(name))
        assert "starts a comparison when it is loaded" in done.stderr, f"WRONG {done.stderr[-600:]}"


# --- private rows ---

FRAME = """
import os, pathlib, signal, sys, threading
import pandas as pd, torch
import evenclip
from evenclip.data import Dataset, Splits
from evenclip.sweep import Local

def listing():
    found = []
    for path in pathlib.Path("store").rglob("*"):
        if path.suffix in (".parquet", ".pt"):
            modes = [oct(p.stat().st_mode & 0o777) for p in (path, path.parent)]
            found.append([str(path), *modes])
    return found

class Watched(Local):
    def carry_out(self, specs, store, show):
        print(listing(), flush=True)
        {ending}
        return super().carry_out(specs, store, show)

frame = pd.read_csv("people.csv")
x = torch.tensor(frame[["age", "income"]].to_numpy(), dtype=torch.float32)
y = torch.tensor((frame.hired == "yes").to_numpy()).long()
g = torch.tensor((frame.sex == "f").to_numpy()).long()
half, other = (Dataset(x[part], y[part], g[part], ("a", "b"), ("n", "y"), "d")
               for part in (slice(400), slice(400, None)))
given = {data}
columns = dict(target="hired", group={group!r}) if given is frame else {{}}
evenclip.compare(given, ["dpsgd"], 1, **columns, epochs=1, lr=0.1, store="store", on=Watched(1))
"""
ENDINGS = {
    "done": "pass",
    "an error": "raise ValueError('stop')",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "the group of processes": "os.setpgid(0, 0); os.killpg(0, signal.SIGKILL)",
    "exit": "os._exit(3)",
    "abort": "os.abort()",
}


def rows_in_memory(data: str, ending: str, group: str = "sex") -> None:
    """Rows are in a folder of ours alone, and nowhere after the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table(folder)
        script = FRAME.format(ending=ENDINGS[ending], data=data, group=group)
        (folder / "main.py").write_text(script)
        done = run(["main.py"], folder)
        if group == "sex":
            seen = ast.literal_eval(done.stdout.splitlines()[0])
            assert [modes for _, *modes in seen] == [["0o600", "0o700"]], f"OPEN {seen}"
        assert "only you can read it" in done.stderr, f"WRONG {done.stderr[-600:]}"
        for _ in range(50):  # a process of its own removes them after a kill
            left = [p for p in (folder / "store").rglob("*") if p.suffix in (".parquet", ".pt")]
            if not left:
                break
            time.sleep(0.1)
        assert not left, f"LEFT {left}"


def damaged_rows(place: float, what: str) -> None:
    """Rows that changed on their way to a worker are refused."""
    import torch

    from evenclip.data import Dataset, Splits
    from evenclip.sweep.describe import load_data, save_splits

    x, y = torch.randn(20, 3), torch.arange(20) % 2
    half = Dataset(x, y, y, ("a", "b"), ("n", "y"), "rows")
    with tempfile.TemporaryDirectory() as name:
        described = save_splits(Splits(half, half), Path(name) / "rows")
        path = Path(described["path"])
        content = bytearray(path.read_bytes())
        at = int(place * (len(content) - 1))
        content[at] ^= 1
        path.write_bytes(content if what == "bit" else content[:at])
        try:
            load_data(described, 0)
        except ValueError as error:
            assert "has changed since the comparison began" in str(error), f"TRACEBACK {error}"
        else:
            raise AssertionError("WRONG damaged rows are believed")


def rows_of_earlier_versions() -> None:
    """What an earlier version left is removed, and nothing else."""
    from evenclip.comparison.source import readable
    from evenclip.sweep import Store

    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        data.mkdir()
        old = [f"{'ab' * 12}.pt", f"{'0' * 24}.parquet", f".writing-{'f' * 32}"]
        for path in (*old, "mine.parquet", "notes.pt"):
            (data / path).write_text("rows")
        with readable("people.csv", Store(name)):
            left = sorted(path.name for path in data.iterdir())
        assert left == ["mine.parquet", "notes.pt"], f"LEFT {left}"


# --- locks ---

MANY = """
import resource, sys
import torch
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
from pathlib import Path
from evenclip.sweep import Store, bundle
from evenclip.sweep.spec import Spec
store = Store("store")
model, data = {{"name": "mlp"}}, {{"name": "toy"}}
rule = {{"name": "dpsgd"}}
specs = [Spec(data, model, rule, 0.1, 1, 32, None, None, seed=s) for s in range({runs})]
bundle._compute_one = lambda i, spec, keep, say: say(event="done", i=i)
events = []
bundle.compute_into(store, dict(enumerate(specs)), lambda **event: events.append(event))
print(sum(event["event"] == "done" for event in events), oct((Path("store/locks") / specs[0].hash)
      .stat().st_mode & 0o777), {{event.get("why") for event in events}})
"""


def many_runs(runs: int, limit: int) -> None:
    """Runs of one bundle need no more open files than one run."""
    with tempfile.TemporaryDirectory() as name:
        done = run(["-c", MANY.format(runs=runs, limit=limit)], Path(name))
        assert done.stdout == f"{runs} 0o600 {{None}}\n", (
            f"WRONG {done.stdout[:300]} {done.stderr[-300:]}"
        )


def linked_lock(kind: str) -> None:
    """What is in the place of a lock file is not followed and not emptied."""
    from evenclip.sweep import Store
    from evenclip.sweep.spec import Spec

    spec = Spec({"name": "toy"}, {"name": "mlp"}, {"name": "dpsgd"}, 0.1, 1, 32, None, None, seed=0)
    with tempfile.TemporaryDirectory() as name:
        store, victim = Store(Path(name) / "store"), Path(name) / "victim"
        locks = store.root / "locks"
        if kind == "folder":
            victim.mkdir()
            locks.symlink_to(victim)
        else:
            victim.write_text("precious")
            locks.mkdir()
            (locks / spec.hash).symlink_to(victim)
        try:
            with store.claim(spec):
                pass
        except OSError as error:
            assert "cannot be locked" in str(error), f"TRACEBACK {error}"
        else:
            raise AssertionError("WRONG a link was followed")
        assert kind == "folder" or victim.read_text() == "precious", "WRONG the file was emptied"
        assert kind == "file" or not list(victim.iterdir()), "WRONG a file was made there"


def few_open_files(limit: int) -> None:
    """A limit that is too low is a sentence; one that suffices is no problem."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table(folder)
        code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}));"
        done = run(["-P", "-c", f"{code} {SCRIPT}",
                    *COMPARE.split(), "--workers", "4"], folder)  # fmt: skip
        assert "Traceback" not in done.stderr, f"TRACEBACK {done.stderr[-600:]}"
        said = done.returncode == 0 or "ulimit -n" in done.stderr
        assert said, f"WRONG {done.returncode} {done.stderr[-600:]}"


def cases(long: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases: some in seconds, or all."""
    names = MODULES + (MORE_MODULES if long else ())
    yield "planted: compare", functools.partial(planted, "compare", "script", names, None)
    yield "planted: epsilon, -m", functools.partial(planted, "epsilon", "module", names, None)
    for change, (code, outcome) in CHANGES.items():
        if long or change in ("a constant", "a class in memory", "a comment"):
            yield f"edited: {change}", functools.partial(edited_after_import, code, outcome)
    for kind in ("rule", "model", "dataset"):
        yield f"edited before a worker: {kind}", functools.partial(edited_before_a_worker, kind)
    for how in NEIGHBOURS:
        yield f"imports its neighbour {how}", functools.partial(neighbour, how)
    yield "a comparison in a rule file", comparison_in_a_rule_file
    yield "rows: frame, SIGKILL", functools.partial(rows_in_memory, "frame", "SIGKILL")
    yield (
        "rows: splits, an error",
        functools.partial(rows_in_memory, "Splits(half, other)", "an error"),
    )
    yield "rows: refused", functools.partial(rows_in_memory, "frame", "done", "nothing")
    yield "rows of earlier versions", rows_of_earlier_versions
    for place in [i / 40 for i in range(41)] if long else (0.0, 0.5, 1.0):
        for what in ("bit", "cut"):
            yield f"rows: {what} at {place}", functools.partial(damaged_rows, place, what)
    yield "many runs", functools.partial(many_runs, 300, 64)
    for kind in ("file", "folder"):
        yield f"a link as lock: {kind}", functools.partial(linked_lock, kind)
    if not long:
        return
    yield "many runs, 1024", functools.partial(many_runs, 2200, 1024)
    for command in COMMANDS:
        for start in ("script", "module"):
            yield (
                f"planted: {command}, {start}",
                functools.partial(planted, command, start, names, None),
            )
        yield f"planted: {command}, empty entry", functools.partial(
            planted, command, "script",
            tuple(n for n in names if n not in ("sitecustomize", "usercustomize", "site",
                                                "encodings")),
            f":{ROOT}",
        )  # fmt: skip
    for data in ("frame", "Splits(half, other)"):
        for ending in ENDINGS:
            yield f"rows: {data}, {ending}", functools.partial(rows_in_memory, data, ending)
    for limit in (1024, 256, 128, 96, 64, 48, 32):
        yield f"{limit} open files", functools.partial(few_open_files, limit)


SHORT = dict(cases(long=False))


@pytest.mark.parametrize("name", SHORT)
def test_a_fault_of_processes(name):
    SHORT[name]()


def test_processes_are_started_in_known_places_only():
    """A new place must start Python without the current folder, as `sweep.process` does."""
    starts = {"subprocess", "multiprocessing", "ProcessPoolExecutor"}
    known = {
        "sweep/process.py", "sweep/local.py", "sweep/pool.py", "sweep/slurm.py", "files/private.py",
        "data/readers.py",
    }  # fmt: skip
    found = set()
    for path in (ROOT / "evenclip").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names += [node.module or "", *(alias.name for alias in node.names)]
            if starts & {name.partition(".")[0] for name in names}:
                found.add(path.relative_to(ROOT / "evenclip").as_posix())
    assert found <= known
