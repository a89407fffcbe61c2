"""Own files, damaged or swapped: every file that the package writes, by the list of its writers.

A damaged file must be refused by a sentence that names it, or read as it was. `cases(long)` yields
(id, callable); a callable raises AssertionError with the class of the outcome: SILENT (another
answer), TRACEBACK (another error than a refusal) or UNNAMED (a refusal that names no file).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import evenclip
from evenclip import export, files, fit
from evenclip.cli import main
from evenclip.data.celeba import _decode, _mapped
from evenclip.files import KINDS, kinds
from evenclip.reproduction import observed
from evenclip.reproduction.artifacts import Artifacts
from evenclip.reproduction.observed import ObservedRun
from evenclip.sweep import Spec, Store, risk
from evenclip.training import checkpoint, journal

SOURCE = Path(evenclip.__file__).parent
REFUSALS = ValueError, OSError
SPEC = Spec({"name": "toy"}, {"name": "mlp"}, {"name": "dpsgd"}, 0.1, 1, 32, None, None, seed=0)


@dataclass(frozen=True)
class Sample:
    """How a kind of file is written and read.

    Attributes:
        write: write it into a folder, in a version that the number decides; return its files.
        read: return what they say, as plain values.
        identified: whether a whole file of another version is refused.
    """

    write: Callable[[Path, int], list[Path]]
    read: Callable[[Path], Any]
    identified: bool = True


# --- how each kind is written and read ------------------------------------------------------------


def _table(seed: int) -> pd.DataFrame:
    stream = np.random.default_rng(seed)
    age = stream.integers(18, 80, 200)
    job, sex = stream.choice(["baker", "miller"], 200), stream.choice(["f", "m"], 200)
    hired = np.where(age > 45, "yes", "no")
    return pd.DataFrame({"age": age, "job": job, "sex": sex, "hired": hired})


@functools.cache
def _trained(version: int) -> export.Trained:
    given = {"epochs": 1, "batch_size": 32, "model": "mlp:4", "progress": False, "seed": version}
    return export.train(_table(version), target="hired", group="sex", epsilon=3.0, **given)


def _write_model(folder: Path, version: int) -> list[Path]:
    place = export.save(_trained(version), folder / "model")
    return [place / name for name in (*sorted(export.folder.FILES[:4]), files.MANIFEST)]


def _read_model(folder: Path) -> Any:
    predictor = export.load(folder / "model")
    return predictor.privacy, predictor.predict(_table(9).head(5)).to_json()


def _write_statement(folder: Path, version: int) -> list[Path]:
    content = files.sealed(_trained(version).privacy)
    return [files.write(folder / "privacy.json", content, kinds.STATEMENT)]


def _epsilon(path: Path) -> dict[str, Any]:
    """Return what `evenclip epsilon` says about a file."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["epsilon", str(path), "--json"])
        except SystemExit as stopped:
            if stopped.code:
                raise ValueError(err.getvalue()) from stopped
    facts: dict[str, Any] = json.loads(out.getvalue())
    return facts


@functools.cache
def _data() -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    return torch.randn(40, 3, generator=stream), torch.arange(40) % 2


def _write_checkpoint(folder: Path, version: int) -> list[Path]:
    torch.manual_seed(version)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    given = {"batch_size": 8, "epochs": 1 + version, "lr": 0.1, "q": 0.1, "delta": 1e-4}
    fit(model, _data(), rule=evenclip.DPSGD(), checkpoint=folder / "run", seed=version, **given)
    place = checkpoint.latest(folder / "run")
    assert place is not None
    return sorted(path for path in place.iterdir())


def _read_checkpoint(folder: Path) -> Any:
    place = checkpoint.latest(folder / "run")
    assert place is not None
    loaded = checkpoint.load(place)
    weights = {name: value.tolist() for name, value in loaded.model.items()}
    return weights, loaded.published, sorted(loaded.secret)


def _write_journal(folder: Path, version: int) -> list[Path]:
    _write_checkpoint(folder, version)
    return [folder / "run" / journal.NAME]


def _read_journal(folder: Path) -> Any:
    """Return the ε of the folder; a lost journal is noted, and the checkpoint has its steps."""
    facts = _epsilon(folder / "run")
    return {name: value for name, value in facts.items() if name != "notes"}


def _write_run(folder: Path, version: int) -> list[Path]:
    store, spec = Store(folder / "runs"), SPEC.at(0)
    store.write(spec, {"accuracy": 80.5 + version}, {"w": torch.arange(3.0) + version})
    return sorted(path for path in store.folder(spec).iterdir())


def _read_run(folder: Path) -> Any:
    return Store(folder / "runs").read(SPEC.at(0))


def _write_results(folder: Path, version: int) -> list[Path]:
    content = files.sealed({"epsilon": 3.0 + version, "rules": ["dpsgd", None, True, "ü"]})
    return [files.write(folder / "results.json", content, kinds.RESULTS)]


def _write_measurements(folder: Path, version: int) -> list[Path]:
    place = files.make_folder(folder / "risk", kinds.MEASUREMENTS) / f"{SPEC.hash}.json"
    content = files.sealed({"run": SPEC.at(version).hash, "measurements": [{"t": 1, "dir": [0.5]}]})
    return [files.write(place, content, kinds.MEASUREMENTS)]


def _read_measurements(folder: Path) -> Any:
    measured = risk._stored(folder / "risk", SPEC)
    if measured is None:  # they are measured again
        raise files.DamagedError(f"{SPEC.hash}.json is not believed.")
    return measured


def _write_record(folder: Path, version: int) -> list[Path]:
    files.make_folder(folder / "tables", kinds.RECORD)
    content = files.sealed({"table": "adult", "accuracy": [80.5 + version, 81.0]})
    return [files.write(folder / "tables" / "adult.json", content, kinds.RECORD)]


def _write_observed(folder: Path, version: int) -> list[Path]:
    given = ObservedRun("adult", "dpsgd")
    content = files.sealed({"hash": given.hash if not version else "other", "rows": [0.25]}, None)
    return [files.write(folder / f"{given.name}.json", content, kinds.OBSERVED)]


def _read_observed(folder: Path) -> Any:
    measured = observed.read(folder, ObservedRun("adult", "dpsgd"))
    if measured is None:  # it is observed again
        raise files.DamagedError("adult-published-dpsgd.json is not believed.")
    return measured


def _write_images(folder: Path, version: int) -> list[Path]:
    from PIL import Image

    jpg, kept = folder / "images", folder / "celeba.npy"
    jpg.mkdir()
    for i in range(3):
        Image.new("RGB", (12, 16), (40 * i, 20 + version, 200)).save(jpg / f"{i}.jpg")
    _decode(jpg, [f"{i}.jpg" for i in range(3)], 8, kept)
    return [kept]


def _read_images(folder: Path) -> Any:
    images = _mapped(folder / "celeba.npy", (3, 3, 8, 8))
    if images is None:  # they are decoded again
        raise files.DamagedError("celeba.npy is not believed.")
    return images.tolist()


def _read_record(folder: Path) -> Any:
    record = Artifacts(folder).record("adult")
    if record is None:  # the table is not drawn
        raise FileNotFoundError("adult.json is not there.")
    return record


SAMPLES = {
    kinds.MODEL: Sample(_write_model, _read_model),
    kinds.STATEMENT: Sample(
        _write_statement, lambda folder: _epsilon(folder / "privacy.json"), identified=False
    ),
    kinds.CHECKPOINT: Sample(_write_checkpoint, _read_checkpoint),
    kinds.JOURNAL: Sample(_write_journal, _read_journal, identified=False),
    kinds.RUN: Sample(_write_run, _read_run),
    kinds.RESULTS: Sample(
        _write_results,
        lambda folder: files.read_sealed(folder / "results.json", kinds.RESULTS),
        identified=False,
    ),
    kinds.MEASUREMENTS: Sample(_write_measurements, _read_measurements),
    kinds.RECORD: Sample(_write_record, _read_record, identified=False),
    kinds.IMAGES: Sample(_write_images, _read_images, identified=False),
    kinds.OBSERVED: Sample(_write_observed, _read_observed),
}


# --- damage ---------------------------------------------------------------------------------------


def damages(content: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield (name, damaged content): flipped bits, cuts, zeroed and doubled parts, and more."""
    size = len(content)
    for i in range(count):
        at = (2 * i + 1) * size // (2 * count)
        bit = 1 << (i * 5) % 8
        yield f"bit {at}", content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
        yield f"digit {at}", _other_digit(content, at)
        if i % 3 == 0:
            yield f"cut {at}", content[:at]
            yield f"zeros {at}", content[:at] + bytes(min(64, size - at)) + content[at + 64 :]
            yield f"twice {at}", content[:at] + content[max(0, at - 16) :]
            yield f"gone {at}", content[:at] + content[at + 16 :]
    yield "empty", b""
    yield "zeros", bytes(size)
    yield "deep", b"[" * 100_000
    yield "deep object", b'{"a":' * 100_000
    yield "null", b"null"
    yield "infinite", b'{"checksum": Infinity, "files": NaN}'
    yield "more", content + b"\0"
    yield "twice", content + content
    yield "no text", b"\xff\xfe\x00" + content


def rewritings(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of JSON that other programs write, with the same values or others."""
    try:
        value, text = json.loads(content.splitlines()[0]), content.decode()
    except (ValueError, IndexError):
        try:
            value, text = json.loads(content), content.decode()
        except ValueError:
            return
    first = next((name for name in value if isinstance(name, str)), "a")
    yield "byte order mark", b"\xef\xbb\xbf" + content
    yield "Windows", content.replace(b"\n", b"\r\n")
    yield "UTF-16", text.encode("utf-16")
    yield "UTF-7", text.encode("utf-7")
    yield "Latin-1", content.replace("ü".encode(), b"\xfc") + b" "
    yield "blanks", b" \n\t" + content + b"\n\n"
    yield "form feed", b"\x0c" + content
    yield "comment", content + b"// a comment\n"
    yield "comma at the end", text.replace("}", ",}").encode()
    yield "single quotes", text.replace('"', "'").encode()
    yield "a name twice", text.replace("{", f'{{"{first}": 1, ', 1).encode()
    yield "a name twice, equal", text.replace("{", '{"checksum": null, ', 1).encode()
    yield "infinity", text.replace("{", '{"more": Infinity, ', 1).encode()
    yield "NaN", text.replace("1", "NaN", 1).encode()
    yield "overflow", text.replace("1", "1e400", 1).encode()
    yield "huge number", text.replace("1", "9" * 5000, 1).encode()
    yield "a fraction", text.replace("1", "1.0", 1).encode()
    yield "an exponent", text.replace("1", "1e0", 1).encode()
    yield "a text", text.replace("1", '"1"', 1).encode()
    yield "negative zero", text.replace("0", "-0", 1).encode()
    yield "escapes", json.dumps(value, ensure_ascii=True, indent=3).encode()
    yield "sorted", json.dumps(value, ensure_ascii=False, sort_keys=True).encode()
    yield "upper case", text.replace(first, first.upper(), 1).encode()
    yield "half a character", text.replace("{", '{"\\ud800": 1, ', 1).encode()
    yield "NUL in a name", text.replace("{", '{"\\u0000": 1, ', 1).encode()
    yield "decomposed", text.replace("ü", "u\u0308").encode()
    yield "in a list", b"[" + content.strip() + b"]"
    yield "empty object", b"{}"
    yield "true for numbers", text.replace("1", "true", 1).encode()
    yield "another version", text.replace(": 1", ": 99", 1).encode()


def _become(kind: str, path: Path) -> None:
    """Put something else in the place of a file, or change it otherwise than in its content."""
    kept = path.with_name(f"kept-{path.name}")
    if kind in ("more bytes by a hole", "future", "before 1970", "another name", "neighbours"):
        if kind == "more bytes by a hole":
            os.truncate(path, 2**36)
        elif kind == "another name":
            path.rename(path.with_name(path.name.upper()))
        elif kind == "neighbours":
            for name in ("x", ".hidden", f"{path.name}~", f"{path.name}.tmp", "Thumbs.db"):
                (path.parent / name).write_text("x")
        else:
            os.utime(path, ((2**33, 2**33) if kind == "future" else (-10, -10)))
        return
    path.rename(kept)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as place:
            here = os.open(path.parent, os.O_RDONLY)
            place.bind(f"/proc/self/fd/{here}/{path.name}")  # a path of 108 bytes at most
            os.close(here)
    elif kind == "hard link":
        os.link(kept, path)
    else:
        links = {"link": kept, "link to itself": path, "dead link": path.with_name("none"),
                 "link to zeros": Path("/dev/zero"), "link to a folder": path.parent}  # fmt: skip
        path.symlink_to(links[kind])


BECOMES = (
    "folder", "pipe", "socket", "link", "link to itself", "dead link", "link to zeros",
    "link to a folder", "hard link", "more bytes by a hole", "future", "before 1970",
    "another name", "neighbours",
)  # fmt: skip


def _other_digit(content: bytes, at: int) -> bytes:
    """Change the first digit from a place on."""
    for i in range(at, len(content)):
        if 48 <= content[i] <= 57:
            return content[:i] + bytes([48 + (content[i] - 47) % 10]) + content[i + 1 :]
    return content[:-1]


def _check(sample: Sample, folder: Path, damaged: Path, answer: str) -> None:
    """Read the damaged files; raise AssertionError if the outcome is none of the allowed."""
    try:
        read = json.dumps(sample.read(folder), sort_keys=True, default=str)
    except REFUSALS as refusal:
        text = " ".join(str(refusal).split())
        named = damaged.name in text or damaged.parent.name in text
        assert named, f"UNNAMED {text[:200]}"
        assert text.endswith((".", ".'")), f"UNNAMED {text[:200]}"
        return
    except Exception as error:
        raise AssertionError(f"TRACEBACK {type(error).__name__}: {error}"[:300]) from error
    assert read == answer, f"SILENT {damaged.name}"


def _case(kind: kinds.Kind, name: str, content: Callable[[Path, Path], Any]) -> None:
    """Damage one file of a kind, and read: other content, nothing (None), or one of `BECOMES`."""
    sample, kept = SAMPLES[kind], _written(kind, 0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "copy"
        shutil.copytree(kept, folder)
        answer = json.dumps(sample.read(folder), sort_keys=True, default=str)
        path = folder / name
        damaged = content(path, Path(name))
        if isinstance(damaged, str):
            _become(damaged, path)
        elif damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        with _at_most(20):
            _check(sample, folder, path, answer)


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise if it takes longer, as with a pipe that nothing is written to."""
    slow = []

    def stop(*_: Any) -> None:
        slow.append(True)
        raise AssertionError("HANGS")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        assert not slow, "HANGS"  # also where the error was caught


@functools.cache
def _written(kind: kinds.Kind, version: int) -> Path:
    """Write the files of a kind once; return their folder."""
    folder = Path(_ROOT.name) / f"{KINDS.index(kind)}-{version}"
    folder.mkdir()
    SAMPLES[kind].write(folder, version)
    return folder


@functools.cache
def _names(kind: kinds.Kind) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as place:
        return tuple(str(path.relative_to(place)) for path in SAMPLES[kind].write(Path(place), 0))


_ROOT = tempfile.TemporaryDirectory(prefix="faults-")


def cases(long: bool = False) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every damage of every file."""
    for kind, sample in SAMPLES.items():
        for name in _names(kind):
            content = (_written(kind, 0) / name).read_bytes()
            others = [*rewritings(content), *((other, other) for other in BECOMES)]
            some = others if long else others[len(name) % 5 :: 5]
            for what, damaged in (*damages(content, 40 if long else 4), *some):
                yield (
                    f"{kind.name}/{Path(name).name}/{what}",
                    functools.partial(_case, kind, name, lambda *_, d=damaged: d),
                )
            gone = functools.partial(_case, kind, name, lambda *_: None)
            yield f"{kind.name}/{Path(name).name}/missing", gone
            if sample.identified:
                other = _written(kind, 1) / name
                swapped = functools.partial(_case, kind, name, lambda *_, o=other: o.read_bytes())
                yield f"{kind.name}/{Path(name).name}/swapped", swapped


# --- tests ----------------------------------------------------------------------------------------


def test_every_kind_of_file_that_is_read_back_has_a_sample():
    read_back = {kind for kind in KINDS if kind.vouched not in (kinds.NAMED, kinds.UNREAD)}
    assert read_back == set(SAMPLES)


def test_no_damaged_file_is_believed():
    failed = []
    for name, case in cases():
        try:
            case()
        except AssertionError as outcome:
            failed.append(f"{name}: {outcome}")
    assert not failed, "\n".join(failed)


# Calls that create or change a file, and the modules that may make them without `evenclip.files`:
# files that grow by lines, and streams of processes.
WRITING = {
    "write_text", "write_bytes", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryDirectory",
    "savefig", "save_file", "fdopen", "ftruncate", "truncate", "rename", "renames", "symlink",
    "makedirs", "mkfifo", "copyfile", "copytree", "to_parquet", "to_feather",
}  # fmt: skip
MAY_WRITE = {
    "files",  # the writer
    "training/journal.py", "training/repeats.py",  # lines, each flushed before its step
    "training/logs",  # lines
    "sweep/worker.py", "sweep/pool.py",  # pipes
    "sweep/slurm.py",  # events of jobs, lines
}  # fmt: skip


def test_files_are_written_by_one_module():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if any(name.startswith(place) for place in MAY_WRITE):
            continue
        found += [f"{name}:{line} {call}" for line, call in _writes(path)]
    assert not found, "\n".join(found)


def _writes(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the calls in a source file that write a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        mode = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if _text(a)]
        if name in WRITING or (name == "open" and any(_is_mode(m) for m in mode)):
            call = ast.unparse(node)
            if "buffer" in call or "columns=" in call:  # in memory; columns are renamed
                continue
            yield node.lineno, call[:80]


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_mode(text: str) -> bool:
    return 0 < len(text) <= 3 and text[0] in "wax"


@pytest.mark.parametrize(("source", "writes"), [("p.write_text('x')", 1), ("open(p, 'r')", 0)])
def test_the_search_for_writers_finds_them(tmp_path, source, writes):
    (tmp_path / "module.py").write_text(source)
    assert len(list(_writes(tmp_path / "module.py"))) == writes
