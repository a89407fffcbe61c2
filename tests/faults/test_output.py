r"""Output: terminals without ε, names that control the terminal, and streams that are closed.

`cases(long)` yields (id, callable); a callable raises AssertionError with the class of the outcome:
CONTROL (a character of the data controls the terminal), STATUS (the command fails because of its
output), TRACEBACK, WRONG (data are not what they were).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenclip import terminal

NAMES = {
    "ANSI": "a\x1b[2Jb",
    "title": "a\x1b]0;owned\x07b",
    "C1": "a\x9b31mb",
    "carriage return": "ε 0.1\rb",
    "new line": "a\nε 0.01 by PLD",
    "backspace": "abc\b\b\bx",
    "reversed": "a\u202eb",
    "isolate": "a\u2066b\u2069",
    "line separator": "a\u2028b",
    "markup": "[red]a[/red]",
    "closing markup": "a[/nothing]",
    "link": "[link=http://x.example]a[/link]",
    "Greek": "γυναίκα",
    "Persian": "می‌خواهم",
    "emoji": "👩🏽‍🔬",
    "delete": "a\x7fb",
    "null": "a\x00b",
    "tag": "a\U000e0041b",
}
ENCODINGS = ("ascii", "latin-1", "utf-8", "cp437", "utf-16")
FINE = {"\u200c", "\u200d", "\ufeff"}  # joiners; the mark that UTF-16 starts with


def controls(text: str) -> set[str]:
    """Return what controls a terminal, but the ends of lines and tabs."""
    hidden = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return hidden - {"\n", "\t"} - FINE


class Terminal(io.TextIOWrapper):
    """A stream of some encoding that says whether it is a terminal."""

    def __init__(self, encoding: str, *, tty: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    @property
    def raw_bytes(self) -> bytes:
        self.flush()
        return self.buffer.getvalue()

    @property
    def text(self) -> str:
        return self.raw_bytes.decode(self.encoding)


def run(arguments: list[str], encoding: str = "utf-8", *, tty: bool = False):
    """Run a command in this process; return (status, stdout, stderr)."""
    from evenclip.cli import main

    out, err = Terminal(encoding, tty=tty), Terminal(encoding, tty=False)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
            status = 0
        except SystemExit as end:
            status = end.code or 0
    return status, out, err


def people(folder: Path, name: str, rows: int = 500) -> Path:
    """Write a table whose column, groups and classes have a hostile name."""
    path = folder / "people.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["age", f"group {name}", f"target {name}", "same"])
        for i in range(rows):
            age = 18 + i * 7 % 50
            cells = [f"{name} {'fm'[i % 2]}", f"{name} {['no', 'yes'][age > 43]}", name]
            writer.writerow([age, *cells])
    return path


def trained(name: str, encoding: str, *, predict: bool) -> None:
    """`train` and `predict` with a hostile name print no control, and end well."""
    with tempfile.TemporaryDirectory() as folder:
        table = people(Path(folder), name)
        model = f"{folder}/model"
        options = ["--target", f"target {name}", "--group", f"group {name}", "--out", model]
        status, out, err = run(
            ["train", str(table), *options, "--epochs", "1", "--epsilon", "9", "--model", "linear"],
            encoding,
        )
        refused = status == 2 and "\x00" in name  # not in a table
        assert status == 0 or refused, f"STATUS {status} {err.text[-400:]}"
        for stream in (out, err):
            assert not controls(stream.text), f"CONTROL {controls(stream.text)}"
        assert "\n\u03b5 0.01" not in out.text, "CONTROL a line of the data's own"
        if predict and not refused:
            predicted(table, model, name, encoding)


def predicted(table: Path, model: str, name: str, encoding: str) -> None:
    """Predictions in a pipe are the data in UTF-8; on a terminal they control nothing."""
    status, out, err = run(["predict", model, str(table)], encoding)
    assert status == 0, f"STATUS {status} {err.text[-400:]}"
    rows = list(csv.reader(io.StringIO(out.raw_bytes.decode("utf-8"), newline="")))
    classes = {row[1] for row in rows[1:]}
    assert classes <= {f"{name} no", f"{name} yes"}, f"WRONG {classes}"
    _, shown, _ = run(["predict", model, str(table)], encoding, tty=True)
    assert not controls(shown.text), f"CONTROL {controls(shown.text)}"


def as_json(name: str, encoding: str) -> None:
    """JSON on any stream is JSON of the same values, and controls nothing."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* rows have a quoted text of several lines")
        table = people(Path(folder), name, 40)
        _, plain, _ = run(["data", "schema", str(table)])
        status, out, err = run(["data", "schema", str(table)], encoding)
        if status == 2:
            assert not controls(err.text), f"CONTROL {controls(err.text)}"
            return
        assert not controls(out.text), f"CONTROL {controls(out.text)}"
        value = json.loads(out.text)
        assert value == json.loads(plain.text), "WRONG"
        assert f"group {name}" in value["columns"], f"WRONG {list(value['columns'])}"


def refused(name: str, encoding: str) -> None:
    """A message that names a file or a value controls nothing."""
    if "\x00" in name:
        return
    for arguments in (
        ["train", name, "--target", name, "--group", name], ["compare", name],
        ["compare", "toy", "--rules", name], ["report", name], ["predict", name, name],
        ["epsilon", name], ["paper", "table", name], ["data", "schema", name + ".csv"],
    ):  # fmt: skip
        status, out, err = run(arguments, encoding)
        assert status == 2, f"STATUS {status}"
        text = out.text + err.text
        assert "Traceback" not in text, f"TRACEBACK {text[-400:]}"
        assert not controls(text), f"CONTROL {controls(text)} {arguments}"


def shown(name: str, encoding: str, *, tty: bool) -> None:
    """The progress of runs with a hostile name neither fails nor controls the terminal."""
    from rich.console import Console

    from evenclip.report.live import Lines, Live

    stream = Terminal(encoding, tty=tty)
    spec = SimpleNamespace(rule={"name": name}, seed=0, lr=0.1, hash="x")
    with contextlib.redirect_stderr(stream):
        terminal.prepare()
        console = Console(file=stream, force_terminal=True, width=200) if tty else None
        with Live(console) if tty else Lines() as show:
            show.planned(2)
            show.started(spec)
            show.step(spec, 3)
            show.ended(spec, SimpleNamespace(why=f"it failed: {name}"))
            show.started(spec)
    text = stream.text
    if tty:
        for word in ("\x1b[2J", "\x1b]0;", "\x9b", "\x07", "\b", "\u202e", "\x7f", "\u2028"):
            assert word not in text, f"CONTROL {word!r}"
    else:
        assert not controls(text), f"CONTROL {controls(text)}"
    if "[" in name and "\x1b" not in name:
        assert name in text, f"WRONG {text!r}"  # markup is text


def compared(name: str) -> None:
    """The table of a comparison controls nothing, whatever the groups are called."""
    from evenclip.report.terminal import table

    cell = {"mean": 1.0, "se": 0.1}
    row = {
        "accuracy": {name: cell, "b": cell}, "loss": {name: cell, "b": cell},
        "privacy_cost": {name: cell, "b": cell},
    }  # fmt: skip
    private = {"epsilon_pld": 1.0, "epsilon_rdp": 1.2, "delta": 1e-5, "soundness": "sound"}
    results = {
        "dataset": name, "seeds": [0], "n_train": [10], "model": name, "groups": [name, "b"],
        "protocol_in_words": name, "table": {"non-private": row, name: row}, "verdict": {},
        "privacy": {name: private}, "settings": {name: {"lr": [0.1]}}, "pair": None,
        "small_groups": [name], "notes": [f"A note on {name}."], "not_covered_by_epsilon": [name],
    }  # fmt: skip
    text = table(results)
    assert not controls(text), f"CONTROL {controls(text)}"
    assert "\n\u03b5 0.01" not in text, "CONTROL a line of the data's own"


def streams(shell: str, status: int, words: str | None) -> None:
    """A command whose streams are closed, full or not read ends quietly, or with a sentence."""
    code = "from evenclip.__main__ import main; main()"
    command = f"'{sys.executable}' -P -c '{code}'"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "-c", shell.replace("EVENCLIP", command)], cwd=folder, capture_output=True,
            text=True, check=False, env=os.environ | {"EVENCLIP_CACHE": folder}, timeout=300,
        )  # fmt: skip
    text = done.stdout + done.stderr
    assert "Traceback" not in text, f"TRACEBACK {text[-500:]}"
    assert "Exception ignored" not in text, f"TRACEBACK {text[-500:]}"
    assert done.returncode == status, f"STATUS {done.returncode} {text[-500:]}"
    assert (done.stderr == "") if words is None else (words in done.stderr), f"WRONG {done.stderr}"


LEGACY = "PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C"
STREAMS: dict[str, tuple[str, int, str | None]] = {
    "head": ("(EVENCLIP data --json; echo $? >&2) | true", 0, "1"),
    "full": ("EVENCLIP data > /dev/full", 2, "The output cannot be written (No space left on"),
    "no stdout": ("EVENCLIP data >&-", 0, None),
    "deleted folder": ("mkdir x; cd x; rmdir ../x; EVENCLIP data", 2, "folder was deleted; change"),
    "no stderr": ("EVENCLIP train nothing.csv --target a --group b 2>&-", 2, None),
    "no stream": (
        "EVENCLIP epsilon --sigma 1 --rate 0.1 --steps 10 --delta 1e-5 <&- >&- 2>&-",
        0,
        None,
    ),
    "C": (f"{LEGACY} EVENCLIP epsilon --sigma 1 --rate 0.1 --steps 10 --delta 1e-5", 0, None),
    "ASCII": (
        "PYTHONIOENCODING=ascii EVENCLIP epsilon --sigma 1 --rate 0.1 --steps 10 --delta 1e-5",
        0,
        None,
    ),
}


def spelled() -> None:
    """Without ε, the numbers still have names."""
    arguments = ["epsilon", "--sigma", "1", "--rate", "0.1", "--steps", "10", "--delta", "1e-5"]
    status, out, _ = run(arguments, "ascii")
    assert status == 0, f"STATUS {status}"
    assert "epsilon" in out.text, f"WRONG {out.text}"
    assert "\\u" not in out.text, f"WRONG {out.text}"


def cases(long: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases: some in seconds, or all."""
    yield "spelled", spelled
    for name, text in NAMES.items():
        yield f"compared: {name}", functools.partial(compared, text)
        for encoding in ENCODINGS if long else ("ascii", "utf-8"):
            yield f"JSON: {name}, {encoding}", functools.partial(as_json, text, encoding)
            for tty in (True, False):
                yield (
                    f"progress: {name}, {encoding}, {tty}",
                    functools.partial(shown, text, encoding, tty=tty),
                )
    for name in NAMES if long else ("ANSI", "reversed"):
        for encoding in ENCODINGS if long else ("ascii",):
            yield f"refused: {name}, {encoding}", functools.partial(refused, NAMES[name], encoding)
    short = (("ANSI", "ascii"), ("new line", "utf-16"))
    for name, encoding in itertools.product(NAMES, ENCODINGS) if long else short:
        yield (
            f"train: {name}, {encoding}",
            functools.partial(trained, NAMES[name], encoding, predict=True),
        )
    for name in STREAMS if long else ("head", "full", "no stream"):
        yield f"streams: {name}", functools.partial(streams, *STREAMS[name])


SHORT = dict(cases(long=False))


@pytest.mark.parametrize("name", SHORT)
def test_a_fault_of_output(name):
    SHORT[name]()


def test_nothing_prints_by_itself():
    """Everything that is printed goes through `evenclip.terminal`."""
    root = Path(terminal.__file__).parent
    found = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.name != "terminal.py" or path.parent != root
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(("print(", "sys.stdout.write", "sys.stderr.write"))
        or " print(" in line.split("#")[0].replace(">>> print(", "").replace("... ", "")
    ]
    assert [path for path in found if path != "data/parquet.py"] == []
