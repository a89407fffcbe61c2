"""Damaged, disguised and lying tables: the same table, a note, or a refusal, and no crash."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from evenclip.data.formats import column_names, read_noted
from evenclip.data.table import Tabled, table
from outcomes import NOTED, REFUSED, SAME, Answer, called, commanded, outcome

ROWS = 600


@functools.cache
def people() -> pd.DataFrame:
    stream = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": stream.integers(1000, 90_000, ROWS),
            "income": stream.normal(30, 9, ROWS).round(2),
            "job": stream.choice(["baker", "miller", "pilot"], ROWS),
            "since": (np.datetime64("2001-01-01") + stream.integers(7000, size=ROWS)).astype(str),
            "sex": stream.choice(["f", "m"], ROWS),
        }
    )
    return frame.assign(hired=np.where(stream.random(ROWS) < 0.5, "yes", "no"))


@functools.cache
def lines() -> tuple[str, ...]:
    """Return the lines of the undamaged CSV file; the first is the header."""
    return tuple(people().to_csv(index=False).splitlines(keepends=True))


def text(*changes: tuple[int, str]) -> bytes:
    """Return the CSV file with some lines replaced; line 1 is the header."""
    changed = list(lines())
    for number, line in changes:
        changed[number - 1] = line
    return "".join(changed).encode()


def fields(number: int) -> list[str]:
    return lines()[number - 1].rstrip("\n").split(",")


def line(number: int, place: int, value: str) -> tuple[int, str]:
    """Return a line with another field."""
    values = fields(number)
    values[place] = value
    return number, ",".join(values) + "\n"


def swallowing(first: int, last: int, place: int, other: int | None = None) -> bytes:
    """Return a file with a quote that opens in one line and closes in a later one."""
    other = place if other is None else other
    return text(
        line(first, place, '"' + fields(first)[place]), line(last, other, fields(last)[other] + '"')
    )


def everywhere(place: int, change: Callable[[str], str]) -> bytes:
    numbers = range(2, ROWS + 2)
    return text(*(line(number, place, change(fields(number)[place])) for number in numbers))


def stored(frame: pd.DataFrame | pa.Table, suffix: str = ".parquet", **how: object) -> bytes:
    """Return a table as the bytes of a Parquet or Feather file."""
    made = frame if isinstance(frame, pa.Table) else pa.Table.from_pandas(frame)
    sink = io.BytesIO()
    if suffix == ".parquet":
        pq.write_table(made, sink, row_group_size=250, **how)
    else:
        with pa.ipc.new_file(sink, made.schema) as writer:
            writer.write_table(made, max_chunksize=250)
    return sink.getvalue()


def typed(**types: pa.DataType) -> bytes:
    """Return a Parquet file in which some columns have other Arrow types."""
    made = pa.Table.from_pandas(people())
    for name, kind in types.items():
        place = made.schema.get_field_index(name)
        made = made.set_column(place, name, made.column(name).cast(kind))
    return stored(made)


def added(column: pa.Array) -> bytes:
    """Return a Parquet file with another column."""
    return stored(pa.Table.from_pandas(people()).append_column("more", column))


def lying(old: bytes, new: bytes) -> bytes:
    """Return a Parquet file whose metadata say something else."""
    content = stored(people())
    assert old in content
    return content.replace(old, new.ljust(len(old)))


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("people.csv", text())
    return out.getvalue()


TEXTS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "line ends only": lambda: b"\n\r\n\n",
    "header only": lambda: lines()[0].encode(),
    "a name twice": lambda: text((1, "age,income,job,since,sex,age\n")),
    "UTF-16": lambda: text().decode().encode("utf-16"),
    "UTF-16 without its mark": lambda: text().decode().encode("utf-16-le"),
    "UTF-32": lambda: text().decode().encode("utf-32"),
    "Latin-1": lambda: everywhere(2, lambda v: "Küfer").decode().encode("latin1"),
    "gzip": lambda: gzip.compress(text()),
    "bzip2": lambda: bz2.compress(text()),
    "xz": lambda: lzma.compress(text()),
    "ZIP": zipped,
    "Parquet": lambda: stored(people()),
    "NUL bytes": lambda: text(line(300, 2, "bak\0er")),
    "NULs at the end": lambda: text() + b"\0" * 500,
    "random bytes": lambda: random.Random(0).randbytes(5000),
    "byte order mark": lambda: b"\xef\xbb\xbf" + text(),
    "Windows": lambda: text().replace(b"\n", b"\r\n"),
    "Macintosh": lambda: text().replace(b"\n", b"\r"),
    "mixed line ends": lambda: text().replace(b"\n", b"\r\n", 99),
    "no last line end": lambda: text()[:-1],
    "blank lines at the end": lambda: text() + b"\n\n",
    "blank lines between": lambda: text((50, "\n" + lines()[49])),
    "a field too many": lambda: text((300, lines()[299].replace("\n", ",1\n"))),
    "a field too few": lambda: text((300, lines()[299].rsplit(",", 1)[0] + "\n")),
    "an empty last field": lambda: text((2, lines()[1].replace("\n", ",\n"))),
    "a cut line": lambda: text()[:-9],
    "cut in the middle": lambda: text()[: len(text()) // 2 - 8],
    "two quotes 200 lines apart": lambda: swallowing(100, 300, 2),
    "two quotes in two lines": lambda: swallowing(100, 101, 2),
    "two quotes in other columns": lambda: swallowing(100, 300, 1, 4),
    "two quotes that open": lambda: text(line(100, 2, '"baker'), line(300, 2, '"baker')),
    "one quote": lambda: text(line(100, 2, '"baker')),
    "a quote in the middle": lambda: text(line(100, 2, 'ba"ker')),
    "text after a quote": lambda: text(line(100, 2, '"bak"er')),
    "a field of two lines": lambda: text(line(100, 2, '"bak\ner"')),
    "semicolons": lambda: text().replace(b",", b";"),
    "bars in some lines": lambda: text((300, lines()[299].replace(",", "|"))),
    "thousands": lambda: everywhere(0, lambda v: f'"{int(v):,}"'),
    "points for thousands": lambda: everywhere(0, lambda v: f"{int(v) // 100}.{v}.000"),
    "apostrophes": lambda: everywhere(0, lambda v: f"{int(v):,}".replace(",", "'")),
    "decimal commas": lambda: everywhere(1, lambda v: f'"{v.replace(".", ",")}"'),
    "currency": lambda: everywhere(1, lambda v: f"€{v}"),
    "percent": lambda: everywhere(1, lambda v: f"{v} %"),
    "month names": lambda: everywhere(3, lambda v: f"{v[8:]} May {v[:4]}"),
    "two-digit years": lambda: everywhere(3, lambda v: f"{v[8:]}.{v[5:7]}.{v[2:4]}"),
    "half of the numbers unknown": lambda: everywhere(
        0, lambda v: v if int(v) % 2 else f"about {int(v) % 977}"
    ),
    "no name": lambda: text((1, ",income,job,since,sex,hired\n")),
    "names unlike in case": lambda: text((1, "age,AGE,job,since,sex,hired\n")),
    "a name with a mark": lambda: text((1, "age,in\u202ecome,job,since,sex,hired\n")),
    "a class in upper case": lambda: text(*(line(k, 5, "YES\n") for k in range(100, 150))),
    "a class with a blank": lambda: text(*(line(k, 5, "yes\u00a0\n") for k in range(100, 150))),
    "a group with a mark": lambda: text(*(line(k, 4, "f\u200b") for k in range(100, 150))),
    "infinity": lambda: text(line(100, 1, "inf")),
    "overflow": lambda: text(line(100, 1, "1e400")),
    "a far number": lambda: text(line(100, 1, "1e300")),
    "a sentinel": lambda: text(line(100, 0, "9223372036854775807")),
    "a footer": lambda: text() + b"sum,,,,,\n",
    "a comment": lambda: b"# exported\n" + text(),
    "sep=": lambda: b"sep=,\n" + text(),
    "SQLite": lambda: b"SQLite format 3\0" + bytes(500),
    "Excel of 1997": lambda: bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600),
    "half characters": lambda: text().replace(b"baker", b"\xed\xa0\xbdx", 2),
    "semicolons and thousands": lambda: b"".join(
        part.encode().replace(b",", b";") if i == 0 else ";".join(
            [f"{int(part.split(',')[0]):,}", str(i % 70), *part.split(",")[2:]]
        ).encode()
        for i, part in enumerate(lines())
    ),
}  # fmt: skip
STORED: dict[str, Callable[[], bytes]] = {
    "as it is": lambda: stored(people()),
    "with checksums": lambda: stored(people(), write_page_checksum=True),
    "decimals": lambda: typed(income=pa.decimal128(12, 2)),
    "date32": lambda: typed(since=pa.date32()),
    "large strings": lambda: typed(job=pa.large_string(), sex=pa.large_string()),
    "binary": lambda: typed(job=pa.binary(), sex=pa.binary()),
    "dictionaries": lambda: typed(job=pa.dictionary(pa.int8(), pa.string())),
    "times": lambda: added(pa.array([1] * ROWS, pa.time64("us"))),
    "late times": lambda: added(pa.array([2**60] * ROWS, pa.timestamp("us"))),
    "no texts": lambda: added(pa.array([b"\xff"] * ROWS, pa.binary()).view(pa.string())),
    "views of texts": lambda: added(pa.array(["a"] * ROWS, pa.string_view())),
    "maps": lambda: added(pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int8()))),
    "nulls": lambda: added(pa.nulls(ROWS)),
    "no rows": lambda: stored(people().head(0)),
    "NUL in a name": lambda: stored(people().rename(columns={"age": "a\0b"})),
    "infinity": lambda: stored(people().assign(income=math.inf)),
    "lists": lambda: stored(people().assign(job=[[1]] * ROWS)),
    "structs": lambda: stored(people().assign(job=[{"a": 1}] * ROWS)),
    "all null": lambda: stored(people().assign(job=None)),
    "a list as target": lambda: stored(people().assign(hired=[[1]] * ROWS)),
    "a list as group": lambda: stored(people().assign(sex=[[1]] * ROWS)),
    "a name twice": lambda: stored(pa.Table.from_arrays([pa.array([1, 2])] * 2, ["a", "a"])),
    "metadata of pandas that are none": lambda: lying(b'{"index_columns"', b'{"index"'),
    "metadata that name an index": lambda: lying(b'"kind": "range"', b'"kind": "rang"'),
    "metadata with other types": lambda: lying(b'"numpy_type": "int64"', b'"numpy_type": "bool"'),
    "cut": lambda: stored(people())[:-20],
    "not at all": lambda: b"PAR1" + b"\0" * 400 + b"PAR1",
    "text": text,
}


@functools.cache
def place() -> Path:
    return Path(tempfile.mkdtemp(prefix="evenclip-tables-"))


def made(content: bytes, suffix: str) -> Answer:
    """Return the table of a file, with its notes, or its refusal."""
    path = place() / f"people{suffix}"
    path.write_bytes(content)
    answer = called(lambda: table(path, target="hired", group="sex"))
    notes = "" if answer.refusal is not None else "\n".join([answer.notes, *answer.value.notes])
    return answer._replace(notes=notes.strip())


@functools.cache
def clean() -> Tabled:
    return made(text(), ".csv").value


def same(one: Tabled, two: Tabled) -> bool:
    # The places of rows do not matter here: they depend on the texts of all fields.
    return one.encoder == two.encoder and all(
        a.x.equal(b.x) and a.y.equal(b.y) for a, b in zip(one.splits, two.splits, strict=True)
    )


def judged(content: bytes, suffix: str) -> str:
    """Return the outcome of making a table of these bytes."""
    return outcome(clean(), made(content, suffix), same=same)


# --- flips ----------------------------------------------------------------------------------------

CRASHING = """
import os, random, sys, warnings
warnings.simplefilter("ignore")
from evenclip.data.formats import column_names, read_noted
path, seeds = sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3]))
content, suffix = open(path, "rb").read(), os.path.splitext(path)[1]
for seed in seeds:
    child = os.fork()
    if child == 0:
        chance, flipped = random.Random(seed), bytearray(content)
        start = max(0, len(content) - 1500) if seed % 3 == 0 else 0  # the metadata
        for _ in range(chance.choice([1, 1, 3])):
            flipped[chance.randrange(start, len(content))] ^= 1 << chance.randrange(8)
        copy = f"{path}.{os.getpid()}{suffix}"
        open(copy, "wb").write(flipped)
        status = 3
        try:
            column_names(copy)
            frame, _ = read_noted(copy)
            [frame[name].astype(str).nunique() for name in frame]
            status = 0
        except (ValueError, TypeError, OSError) as error:
            status = 1 if str(error).endswith(".") and "\\n" not in str(error) else 2
        finally:
            os.unlink(copy)
            os._exit(status)
    ended = os.waitpid(child, 0)[1]
    if ended not in (0, 256):
        print(seed, ended, flush=True)
"""


def flipped(suffix: str, first: int, last: int, **how: object) -> str:
    """Read files with flipped bits, each in a process of its own; raise if one of them ends."""
    path = place() / f"flipped{suffix}"
    path.write_bytes(stored(people(), suffix, **how))
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, str(path), str(first), str(last)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    return REFUSED


def cases(long: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield names and checks; a check raises AssertionError for a silent change or a traceback."""
    for name, content in TEXTS.items():
        yield f"text: {name}", functools.partial(judged, content(), ".csv")
    for name, content in STORED.items():
        yield f"Parquet: {name}", functools.partial(judged, content(), ".parquet")
    for number in range(2, ROWS + 1, 7 if long else 97):
        for span in (1, 2, 5, 50, 199):
            content = swallowing(number, min(number + span, ROWS + 1), number % 6)
            yield f"quotes: {number}, {span}", functools.partial(judged, content, ".csv")
    for suffix in (".parquet", ".feather"):
        for first in range(0, 400 if long else 20, 20):
            name = f"flips: {suffix}, {first}"
            yield name, functools.partial(flipped, suffix, first, first + 20)


# --- tests ----------------------------------------------------------------------------------------


def test_the_short_campaign():
    wrong, outcomes = [], []
    for name, check in cases(long=False):
        try:
            outcomes.append(check())
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)
    assert min(outcomes.count(kind) for kind in (SAME, NOTED, REFUSED)) >= 5


MESSAGES = {
    "gzip": "is compressed with gzip; unpack it with `gunzip`.",
    "UTF-16": "is UTF-16; convert it, for example with `iconv -f UTF-16 -t UTF-8`.",
    "NUL bytes": "has a NUL byte in line 300; it is damaged or not UTF-8: export it again as "
    "UTF-8.",
    "a field too few": "is not a table (5 fields in line 300, and 6 in the header); every line "
    "must have as many fields as the header, and texts with separators in them must be quoted.",
    "two quotes 200 lines apart": "is not a table: a quoted text in the row that begins in line "
    "100 takes in 200 further rows; remove the stray quotes in lines 100 to 300.",
    "one quote": "is not a table: in the row that begins in line 100, the quote that opens there "
    'is not closed, and takes in 502 lines; double the quotes inside of quoted texts (""), and '
    "remove stray ones.",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_wrong_is_said_with_its_line(name):
    answer = made(TEXTS[name](), ".csv")
    assert answer.refusal == f"{place() / 'people.csv'} {MESSAGES[name]}"


NOTES = {
    "thousands": "Column 'age' is read as texts, and [0-9]+ of its [0-9]+ different values look "
    "like numbers or dates, such as '[0-9]+,[0-9]{3}'; write numbers as 1234.5 and dates as "
    "2001-12-31.",
    "a field of two lines": "people.csv: 1 rows have a quoted text of several lines, the longest "
    "of 2 lines from line 100; if a quote is missing there, correct it.",
    "blank lines between": "people.csv: 1 blank line is left out; rows are numbered without them.",
    "semicolons and thousands": "people.csv: Its commas are read as decimal commas, ",
}


@pytest.mark.parametrize("name", NOTES)
def test_what_is_doubtful_is_noted(name):
    assert re.search(NOTES[name], made(TEXTS[name](), ".csv").notes)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".feather"])
def test_what_is_no_file_is_refused(tmp_path, suffix):
    folder, pipe = tmp_path / f"folder{suffix}", tmp_path / f"pipe{suffix}"
    folder.mkdir()
    os.mkfifo(pipe)
    for path, message in ((folder, "(it is a folder)"), (pipe, "is not an ordinary file")):
        for attempt in (lambda path=path: read_noted(path), lambda path=path: column_names(path)):
            assert message in str(called(attempt).refusal)


def test_a_parquet_file_that_claims_billions_of_rows_is_refused(tmp_path, monkeypatch):
    """Sizes are compared with memory before anything is read."""
    monkeypatch.setattr("evenclip.data.stored._available", lambda: 10_000)
    path = tmp_path / "t.parquet"
    path.write_bytes(stored(people()))
    assert "which take about" in str(called(lambda: read_noted(path)).refusal)


@pytest.mark.parametrize("value", ["x" * 200_000, '"' + "x" * 200_000 + '"'])
def test_long_texts_are_texts(tmp_path, value):
    path = tmp_path / "t.csv"
    path.write_bytes(text(line(100, 2, value)))
    frame, notes = read_noted(path)
    assert (len(frame["job"][98]), len(frame), notes) == (200_000, ROWS, [])


def test_an_index_with_a_name_is_a_column(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_bytes(stored(people().set_index("age")))
    assert sorted(read_noted(path)[0].columns) == sorted(people().columns)


def test_long_numbers_with_gaps_stay_apart(tmp_path):
    """As floats, 2^60 and 2^60 + 1 are equal, and two persons would be one."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": pa.array([2**60, 2**60 + 1, None])}), path)
    frame, _ = read_noted(path)
    assert frame["id"].nunique() == 2


def test_a_test_set_in_another_form_is_refused_or_noted(tmp_path):
    test = people().assign(since=pd.to_datetime(people()["since"]).dt.strftime("%d/%m/%Y"))
    answer = called(lambda: table(people(), target="hired", group="sex", test=test))
    assert str(answer.refusal).startswith("Column 'since' cannot be read: its values, such as")
    some = people().astype({"age": object})
    some.loc[:9, "age"] = "1,234"
    notes = table(people(), target="hired", group="sex", test=some).notes
    assert any(
        note.startswith("The test set: Column 'age': 10 of 600 values are not numbers")
        for note in notes
    )


def test_the_command_line_says_it_too(tmp_path):
    path = tmp_path / "people.csv"
    path.write_bytes(TEXTS["a field too few"]())
    answer = commanded("data", "schema", path)
    assert str(answer.refusal).startswith(f"{path} is not a table (5 fields in line 300")
