"""Fill the tables of README and docs from benchmarks/results/*.json.

    python benchmarks/page.py [--check] [--results FOLDER] [--pages FILE ...]

The pages are README.md, docs/performance.md and docs/scale.md. The text between `<!-- NAME -->` and
`<!-- /NAME -->` is replaced by the table of that name. If a result is missing, the command that
makes it is inserted instead. --check changes nothing and fails if a page differs from the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = [
    HERE.parent / "docs" / "performance.md",
    HERE.parent / "docs" / "scale.md",
    HERE.parent / "README.md",
]
TITLES = {
    "dutch": "Dutch, 120 parameters",
    "adult": "Adult, MLP 256-256",
    "mnist": "MNIST, CNN",
    "celeba": "CelebA, CNN",
    "vit": "transformer",
    "lstm": "LSTM",
}

WAYS = (
    "plain SGD",
    "plain compiled",
    "evenclip",
    "evenclip compiled",
    "Opacus ghost",
    "Opacus hooks",
)

Result = dict[str, Any]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all but the first column are right-aligned."""
    bars = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, bars, *rows])


def number(value: float | None) -> str:
    """Format a number with three digits; a dash for None."""
    if value is None:
        return "–"
    return (
        f"{value:.2f}"
        if abs(value) < 10
        else f"{value:.1f}"
        if abs(value) < 100
        else f"{value:,.0f}"
    )


def prose(text: str) -> str:
    """Wrap a paragraph at 100 characters, like the rest of the pages."""
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


def machines(*files: Result) -> str:
    """Describe the machines of a table, one sentence per file."""
    return " ".join(dict.fromkeys(_machine(result["environment"]) for result in files))


def _machine(about: Result) -> str:
    where = about.get("gpu") or f"{about['cpu']}, {about['threads']} threads"
    words = [where, f"torch {about['torch']}", f"Python {about['python']}"]
    words += [f"Opacus {about['opacus']}"] if about.get("opacus") else []
    words += [f"commit {about['commit']}"] if about.get("commit") else []
    return (
        "Measured on " + ", ".join(words) + (f" ({about['date']})." if about.get("date") else ".")
    )


def measured(rows: Sequence[Result], values: str) -> list[str]:
    """Return the ways, after plain SGD, that have a value in some row."""
    return [way for way in WAYS[1:] if any(way in row[values] for row in rows)]


def step_table(*files: Result) -> str:
    """Return the ratios to plain SGD, one row per model and batch size."""
    rows = [row for result in files for row in result["rows"]]
    ways = measured(rows, "ratio")
    head = ["model", "batch", "plain SGD, ms", *ways]
    lines = [
        [TITLES[row["model"]], str(row["batch"]), number(row["ms"].get("plain SGD"))]
        + [number(row["ratio"].get(way)) for way in ways]
        for row in rows
    ]
    dash = (
        "A dash: not measured or not possible; the reason is in the file. "
        if any(r["failed"] for r in rows)
        else ""
    )
    return f"{grid(head, lines)}\n\n{prose(dash + machines(*files))}"


def short_table(result: Result) -> str:
    """Return the short table of ratios for the README."""
    ways = {"plain compiled": "plain SGD compiled", "evenclip": "evenclip"}
    ways |= {way: way for way in ("Opacus ghost", "Opacus hooks")}
    lines = []
    for row in result["rows"]:
        cells = [number(row["ratio"].get(way)) for way in ways]
        lines.append([TITLES[row["model"]], "1", *cells])
    return grid(["model", "plain SGD", *ways.values()], lines)


def memory_table(result: Result) -> str:
    """Return the peak memory in MiB: allocated, and held by the process."""
    ways = ["plain SGD", *measured(result["rows"], "MiB")]
    lines = [
        [TITLES[row["model"]], str(row["batch"])]
        + [
            f"{number(row['MiB'].get(way))} / {number(row['held'].get(way))}"
            if way in row["MiB"]
            else "–"
            for way in ways
        ]
        for row in result["rows"]
    ]
    return grid(["model, MiB allocated / held", "batch", *ways], lines)


def scaling_table(result: Result) -> str:
    """Return one line per axis: every point with its ratio to the first."""
    lines = []
    for axis in result["axes"]:
        ms, points = axis["ms"], list(axis["ms"])
        shown = ", ".join(
            f"{int(point):,}: {number(ms[point] / ms[points[0]])}" for point in points
        )
        lines.append([f"{axis['what']} ({axis['where']})", number(ms[points[0]]), shown])
    head = ["what grows", "ms at the first", "ratio to the first"]
    return f"{grid(head, lines)}\n\n{prose(machines(result))}"


def command_table(*files: Result) -> str:
    """Return the times of whole commands."""
    lines = [
        [f"`{row['command']}`", number(row["seconds"])]
        for result in files
        for row in result["rows"]
    ]
    return f"{grid(['command', 's'], lines)}\n\n{prose(machines(*files))}"


def parquet_table(result: Result) -> str:
    """Return the table of Parquet files and of items by number of readers.

    Ratios are to training from memory, and to no reader.
    """
    rows = []
    for row in result["rows"]:
        for name, way in row["ways"].items():
            figures = [
                number(way[key]) for key in ("open", "train", "cpu", "rows/s", "ratio", "peak")
            ]
            rows.append([f"{row.get('model', 'items')}, {name}", f"{row['batch']:,}", *figures])
    head = [
        "",
        "batch",
        "until the first step, s",
        "the epoch, s",
        "CPU, s",
        "rows/s",
        "ratio",
        "peak, MiB",
    ]
    file = f"The file: {result['file']['rows']:,} rows, {result['file']['MiB']:.0f} MiB."
    return f"{grid(head, rows)}\n\n{prose(f'{file} {machines(result)}')}"


def before_after_table(result: Result) -> str:
    """Return the step times of two source trees as ratios to each other and to plain SGD."""
    lines = [
        [f"{TITLES[row['model']]}{', compiled' if 'compiled' in row['way'] else ''}"]
        + [number(row[which][1]) for which in ("before", "after", "ratio")]
        + [f"{number(row['ratio'][0])} to {number(row['ratio'][2])}"]
        for row in result["rows"]
    ]
    commits = f"Before: commit {result['before']}; after: commit {result['after']}."
    head = ["model", "before ÷ plain SGD", "after ÷ plain SGD", "after ÷ before", "quartiles"]
    return f"{grid(head, lines)}\n\n{prose(f'{commits} {machines(result)}')}"


def passes_table(result: Result) -> str:
    """Return the times of passes, mapped and at once, as ratios to a forward and backward pass."""
    ways = ("mapped", "at once", "mapped, with sums", "at once, with sums")
    lines = [
        [row["title"], str(row["batch"]), number(row["ms"].get("plain"))]
        + [number(row["ratio"][way][1] if way in row["ratio"] else None) for way in ways]
        for row in result["rows"]
    ]
    dash = (
        "A dash: not possible; the reason is in the file. "
        if any(row["failed"] for row in result["rows"])
        else ""
    )
    note = result["arguments"].get("note")
    also = f"{dash}{machines(result)}{f' Meanwhile: {note}.' if note else ''}"
    return f"{grid(['model', 'batch', 'plain, ms', *ways], lines)}\n\n{prose(also)}"


def sums_table(result: Result) -> str:
    """Return the ways to compute a weighted sum, as multiples of one product in float32."""
    lines = [
        [" × ".join(f"{size:,}" for size in row["shape"]), number(row["us"]["float32"])]
        + [number(row["ratio"][way][1]) for way in ("float64", "blocks of 64")]
        for row in result["rows"]
    ]
    head = ["records × outputs × inputs", "float32, µs", "float64", "float32 in blocks of 64"]
    return f"{grid(head, lines)}\n\n{prose(machines(result))}"


# Name of each table -> its input files, its function, and the command that writes the files.
TABLES: dict[str, tuple[str, Callable[..., str], str]] = {
    "step": ("step.json", step_table, "step.py"),
    "step-short": ("step.json", short_table, "step.py"),
    "step-others": (
        "step-batches.json step-others.json",
        step_table,
        "step.py --models dutch adult mnist --batch 64 1024 4096 --out "
        "benchmarks/results/step-batches.json; python benchmarks/step.py --models vit lstm --out "
        "benchmarks/results/step-others.json",
    ),
    "memory": ("step.json", memory_table, "step.py"),
    "scaling": ("scaling.json", scaling_table, "scaling.py"),
    "commands": (
        "compare.json paper.json",
        command_table,
        "compare.py; python benchmarks/paper.py",
    ),
    "parquet": ("parquet.json", parquet_table, "parquet.py"),
    "passes": ("passes.json", passes_table, "passes.py"),
    "sums": ("sums.json", sums_table, "sums.py"),
    "before-after": ("before-after.json", before_after_table, "before_after.py --before CHECKOUT"),
}


def table(name: str, results: Path) -> str:
    """Return the table of this name, or the command that it needs."""
    files, make, command = TABLES[name]
    paths = [results / file for file in files.split()]
    if not all(path.exists() for path in paths):
        return f"Not measured yet: `python benchmarks/{command}`."
    return make(*(json.loads(path.read_text()) for path in paths))


def filled(text: str, results: Path) -> str:
    """Return the page with all its tables replaced.

    Raises:
        ValueError: a mark names an unknown table.
    """
    for name in re.findall(r"<!-- ([\w-]+) -->", text):
        if name not in TABLES:
            raise ValueError(
                f"The page has the mark {name!r}, which is not a table; choose among "
                f"{', '.join(TABLES)}."
            )
        between = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        new = f"<!-- {name} -->\n{table(name, results)}\n<!-- /{name} -->"
        text = between.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


def main() -> None:
    """Fill the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    given = parser.parse_args()
    for page in given.pages:
        text = page.read_text()
        new = filled(text, given.results)
        if not given.check:
            page.write_text(new)
        elif text != new:
            sys.exit(f"{page} differs from the results; run python benchmarks/page.py.")


if __name__ == "__main__":
    main()
