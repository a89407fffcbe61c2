"""Fill the tables of the pages below and the README from benchmarks/results/*.json, so that no number is typed.

    python benchmarks/page.py [--check] [--results FOLDER] [--pages FILE ...]

What stands between `<!-- NAME -->` and `<!-- /NAME -->` is replaced by the table of that name; text around it is left
as it is. A result that is not there is said to be missing, with the command that makes it. --check changes nothing and
fails if a page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = [HERE.parent / "docs" / "performance.md", HERE.parent / "docs" / "scale.md", HERE.parent / "README.md"]
TITLES = {
    "dutch": "Dutch, 120 parameters", "adult": "Adult, MLP 256-256", "mnist": "MNIST, CNN", "celeba": "CelebA, CNN",
    "vit": "transformer", "lstm": "LSTM",
}  # fmt: skip

WAYS = (
    "plain SGD", "plain compiled", "plain graphed", "evenclip", "evenclip compiled", "stack, per run",
    "stack compiled, per run", "Opacus ghost", "Opacus hooks",
)  # fmt: skip

Found = dict[str, Any]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; all but the first column to the right."""
    bars = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, bars, *rows])


def number(value: float | None) -> str:
    """Three digits; a dash for nothing."""
    if value is None:
        return "–"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def machine(found: Found) -> str:
    """What a table was measured on, as a sentence."""
    about = found["environment"]
    where = about.get("gpu") or f"{about['cpu']}, {about['threads']} threads"
    words = [where, f"torch {about['torch']}", f"Python {about['python']}"]
    words += [f"Opacus {about['opacus']}"] if about.get("opacus") else []
    words += [f"commit {about['commit']}"] if about.get("commit") else []
    return "Measured on " + ", ".join(words) + (f" ({about['date']})." if about.get("date") else ".")


def step_table(found: Found) -> str:
    """Ratios to plain SGD, a row for each model and batch size."""
    rows = found["rows"]
    ways = list(dict.fromkeys(way for row in rows for way in [*row["ms"], *row.get("failed", {})]))
    order = sorted(ways, key=lambda way: WAYS.index(way) if way in WAYS else len(WAYS))
    head = ["model", "batch", "plain SGD, ms", *(way for way in order if way != "plain SGD")]
    lines = [
        [TITLES.get(row["model"], row["model"]), str(row["batch"]), number(row["ms"].get("plain SGD"))]
        + [number(row["ratio"].get(way)) for way in order if way != "plain SGD"]
        for row in rows
    ]
    return f"{grid(head, lines)}\n\n{_failures(rows)}{machine(found)}"


def short_table(found: Found) -> str:
    """The same in short, for the README."""
    ways = {"plain compiled": "plain SGD compiled", "evenclip": "evenclip", "evenclip compiled": "compiled"}
    ways |= {way: way for way in ("Opacus ghost", "Opacus hooks")}
    lines = []
    for row in found["rows"]:
        cells = [number(row["ratio"].get(way)) for way in ways]
        lines.append([TITLES.get(row["model"], row["model"]), "1", *cells])
    return grid(["model", "plain SGD", *ways.values()], lines)


def _failures(rows: Sequence[Found]) -> str:
    if not any(row.get("failed") for row in rows):
        return ""
    return "A dash is a way that was not measured or does not do it; the reason is in the file. "


def memory_table(found: Found) -> str:
    """Peak memory in MiB: allocated, and held of the machine for it; on a GPU, while compiling too."""
    rows = found["rows"]
    ways = list(dict.fromkeys(way for row in rows for way in row["MiB"]))
    lines = [
        [TITLES.get(row["model"], row["model"]), str(row["batch"]), *(_memory(row, way) for way in ways)]
        for row in rows
    ]
    compiling = any(row["device"] != "cpu" for row in rows)
    title = f"model, MiB allocated / held{' (allocated while compiling)' if compiling else ''}"
    return grid([title, "batch", *ways], lines)


def _memory(row: Found, way: str) -> str:
    shown = f"{number(row['MiB'].get(way))} / {number(row['held'].get(way))}"
    compiles = row["device"] != "cpu" and ("compiled" in way or "graphed" in way)
    cold = row.get("compiling", {}).get(way) if compiles else None
    return shown if cold is None else f"{shown} ({number(cold)})"


def first_table(found: Found) -> str:
    """Seconds to the first step, with an empty compiler cache and a filled one."""
    rows = [row for row in found["rows"] if row.get("first")]
    if not rows:
        return "Not measured yet: `python benchmarks/step.py`."
    ways = list(dict.fromkeys(way for row in rows for way in row["first"] if "compiled" in way or "graphed" in way))
    ways += [way for way in dict.fromkeys(w for row in rows for w in row["first"]) if way == "stack, per run"]
    lines = [
        [TITLES.get(row["model"], row["model"]), str(row["batch"])]
        + [" / ".join(number(value) for value in row["first"].get(way, (None, None))) for way in ways]
        for row in rows
    ]
    return grid(["model, s cold / warm", "batch", *ways], lines)


def floor_table(found: Found) -> str:
    """The parts of a step, side by side for all models."""
    rows = found["rows"]
    names = [TITLES.get(row["model"], row["model"]).split(",")[0] for row in rows]
    head = ["part", *(f"{name}, {unit}" for name in names for unit in ("MFLOP", "MB", "ms at least"))]
    lines = [
        [part, *(number(row[unit][part]) for row in rows for unit in ("MFLOP", "MB", "floor"))]
        for part in rows[0]["floor"]
    ]
    for way, floor in (("plain SGD", "plain floor"), ("evenclip", "floor")):
        lines.append(
            [f"{way}, all parts", *(cell for row in rows for cell in ("", "", number(sum(row[floor].values()))))]
        )
        lines.append([f"{way}, measured", *(cell for row in rows for cell in ("", "", number(row["ms"].get(way))))])
    speeds = "; ".join(
        f"{name}: {row['GFLOP/s']:,.0f} GFLOP/s, {row['GB/s']:,.0f} GB/s" for name, row in zip(names, rows, strict=True)
    )
    return f"{grid(head, lines)}\n\nSpeeds taken for the floors: {speeds}. {machine(found)}"


def scaling_table(found: Found) -> str:
    """A line for each axis: every point with its ratio to the first."""
    lines = []
    for axis in found["axes"]:
        key = "ms a run" if axis["axis"].startswith("runs") else "ms"
        points = list(axis[key])
        if not points:
            continue
        shown = ", ".join(f"{int(point):,}: {number(axis[key][point] / axis[key][points[0]])}" for point in points)
        each = ", per run" if key == "ms a run" else ""
        lines.append([f"{axis['what']}{each} ({axis['where']})", number(axis[key][points[0]]), shown])
    head = ["what grows", "ms at the first", "ratio to the first"]
    return f"{grid(head, lines)}\n\n{machine(found)}"


def compare_table(found: Found) -> str:
    """Whole comparisons."""
    lines = [
        [f"`{row['command']}`", number(row["seconds"]["cold"]), number(row["seconds"].get("warm"))]
        for row in found["rows"]
    ]
    return f"{grid(['command', 'first time, s', 'again, s'], lines)}\n\n{_rounds(found)}{machine(found)}"


def _rounds(found: Found) -> str:
    """Each time a command was given, and how quick the machine was then; nothing where that was not measured."""
    said = []
    for row in found["rows"]:
        pairs = zip(row["rounds"].items(), row.get("GFLOP/s", {}).values(), strict=False)
        each = sorted((took, speed) for (_, times), speeds in pairs for took, speed in zip(times, speeds, strict=True))
        if each:
            said.append(f"`{row['command']}`: " + ", ".join(f"{took:.0f} ({speed:.0f})" for took, speed in each))
    if not said:
        return ""
    return f"Each time, in brackets the GFLOP/s of a product on every core just then. {'; '.join(said)}. "


def sharing_table(found: Found) -> str:
    """Steps a second by processes and runs, and whole comparisons."""
    lines = [
        [TITLES.get(row["model"], row["model"]), *(str(row[key]) for key in ("processes", "runs")), *_rate(row)]
        for row in found["rows"]
    ]
    each = ", ".join(f"{TITLES[model].split(',')[0]} {minutes:.1f}" for model, minutes in found["minutes"].items())
    head = ["model", "processes", "runs in each", "steps a second", "ms a step"]
    return f"{grid(head, lines)}\n\nMinutes of a whole comparison so, 25 runs: {each}. {machine(found)}"


def _rate(row: Found) -> list[str]:
    """Steps a second, and milliseconds a step."""
    return [f"{row['steps a second']:,.0f}", number(1e3 / row["steps a second"])]


def parquet_table(found: Found) -> str:
    """A file beside the memory, and items by their readers; rates as ratios to the last and to no reader."""
    rows = []
    for row in found["rows"]:
        for name, way in row["ways"].items():
            figures = [number(way[key]) for key in ("open", "train", "cpu", "rows/s", "ratio", "peak")]
            rows.append([f"{row.get('model', 'items')}, {name}", f"{row['batch']:,}", *figures])
    head = ["", "batch", "until the first step, s", "the epoch, s", "CPU, s", "rows/s", "ratio", "peak, MiB"]
    file = f"The file: {found['file']['rows']:,} rows, {found['file']['MiB']:.0f} MiB."
    return f"{grid(head, rows)}\n\n{file} {machine(found)}"


def paper_table(found: Found) -> str:
    """The paper's tables, as a user makes them."""
    lines = [[f"`{row['command']}`", number(row["seconds"])] for row in found["rows"]]
    return f"{grid(['command', 's'], lines)}\n\n{machine(found)}"


def four_tables(found: Found, compare: Found, sharing: Found) -> str:
    """All four on a GPU. MNIST's runs are those of the comparison; CelebA's are as many on random images."""
    seconds = {f"`{row['command']}`": row["seconds"] for row in found["rows"]}
    whole = next(row for row in compare["rows"] if row["what"] == "mnist")
    seconds[f"MNIST's runs: `{whole['command']}`"] = whole["seconds"]["cold"]
    seconds["CelebA's runs on 162,770 random images: a part was measured"] = 60 * sharing["minutes"]["celeba"]
    lines = [[name, number(value)] for name, value in seconds.items()]
    others = {"MNIST's": compare["environment"]["commit"], "CelebA's": sharing["environment"]["commit"]}
    since = [f" {whose} runs: commit {at}." for whose, at in others.items() if at != found["environment"]["commit"]]
    total = f"Together {sum(seconds.values()) / 60:.1f} minutes. {machine(found)}{''.join(since)}"
    return f"{grid(['', 's'], lines)}\n\n{total}"


# Name of each table -> the files it is made from, what makes it, and the command that writes the first of them.
TABLES: dict[str, tuple[str, Callable[..., str], str]] = {
    "step": ("step.json", step_table, "step.py"),
    "step-short": ("step.json", short_table, "step.py"),
    "step-batches": (
        "step-batches.json",
        step_table,
        "step.py --models dutch adult mnist --batch 64 1024 4096 --out benchmarks/results/step-batches.json",
    ),
    "step-others": (
        "step-others.json",
        step_table,
        "step.py --models vit lstm --out benchmarks/results/step-others.json",
    ),
    "step-cuda": ("step-cuda.json", step_table, "step.py --device cuda"),
    "step-cuda-tf32": ("step-cuda-tf32.json", step_table, "step.py --device cuda --tf32"),
    "memory": ("step.json", memory_table, "step.py"),
    "first": ("step.json", first_table, "step.py"),
    "first-cuda": ("step-cuda.json", first_table, "step.py --device cuda"),
    "floor": ("floor.json", floor_table, "floor.py"),
    "scaling": ("scaling.json", scaling_table, "scaling.py"),
    "scaling-cuda": ("scaling-cuda.json", scaling_table, "scaling.py --device cuda --compiled"),
    "compare": ("compare.json", compare_table, "compare.py"),
    "parquet": ("parquet.json", parquet_table, "parquet.py"),
    "sharing-cuda": ("sharing-cuda.json", sharing_table, "sharing.py"),
    "memory-cuda": ("step-cuda.json", memory_table, "step.py --device cuda"),
    "compare-cuda": ("compare-cuda.json", compare_table, "compare.py --device cuda"),
    "paper": ("paper.json", paper_table, "paper.py"),
    "paper-cuda": (
        "paper-cuda.json compare-cuda.json sharing-cuda.json",
        four_tables,
        "paper.py --device cuda --what adult dutch",
    ),
}


def table(name: str, results: Path) -> str:
    """The table of this name, or the command that it needs."""
    files, make, command = TABLES[name]
    paths = [results / file for file in files.split()]
    if not all(path.exists() for path in paths):
        return f"Not measured yet: `python benchmarks/{command}`."
    return make(*(json.loads(path.read_text()) for path in paths))


def filled(text: str, results: Path) -> str:
    """The page with all its tables made anew.

    Raises:
        ValueError: a mark whose name is no table's.
    """
    for name in re.findall(r"<!-- ([\w-]+) -->", text):
        if name not in TABLES:
            raise ValueError(f"The page has the mark {name!r}; tables are {', '.join(TABLES)}.")
        between = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        new = f"<!-- {name} -->\n{table(name, results)}\n<!-- /{name} -->"
        text = between.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


def main() -> None:
    """Fill the pages, or say that one is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    given = parser.parse_args()
    for page in given.pages:
        text = page.read_text()
        new = filled(text, given.results)
        if given.check and text != new:
            sys.exit(f"{page} is not what the results say; run python benchmarks/page.py.")
        page.write_text(new)


if __name__ == "__main__":
    main()
