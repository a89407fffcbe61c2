"""The long campaign of faults: every case of every class, counted.

    python tests/faults/campaign.py            all classes
    python tests/faults/campaign.py files      those whose name contains a word

The counts are kept in results/faults.json, and fill the table of docs/reliability.md.

Each `test_*.py` of this folder has a function `cases(long)`, which yields (id, callable). A
callable that returns has held; one that raises AssertionError has failed, with the class of the
outcome as the first word of its message. A failure that the module's `LIMITS` has is a documented
limit, if the page says so in these words. Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the folder of `outcomes`
PAGE, KEPT = ROOT / "docs" / "reliability.md", ROOT / "results" / "faults.json"
TITLES = {
    "files": "own files damaged or swapped",
    "writing": "writing killed or on a full disk",
    "arguments": "bad arguments",
    "tables": "bad tables",
    "predict": "new rows unlike those of training",
    "processes": "processes, private rows",
    "output": "terminals and names",
}


Cases = Callable[[bool], Iterator[tuple[str, Callable[[], None]]]]


def cases_of(name: str) -> Cases:
    """Return the function `cases` of a class."""
    cases: Cases = module_of(name).cases
    return cases


def module_of(name: str) -> Any:
    """Return the module of a class."""
    path = Path(__file__).with_name(f"test_{name}.py")
    spec = importlib.util.spec_from_file_location(f"faults_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def is_limit(name: str, case: str, outcome: str) -> bool:
    """Return whether a failure is a limit that the page states."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    limits = getattr(sys.modules[f"faults_{name}"], "LIMITS", {})
    return any(
        re.fullmatch(failure, f"{case}: {outcome}") and sentence in page
        for failure, sentence in limits.items()
    )


def run(name: str) -> dict[str, Any]:
    """Carry out all cases of a class."""
    started, tried = time.perf_counter(), 0
    failed, limits = list[list[str]](), list[list[str]]()
    for case, attempt in cases_of(name)(True):
        tried += 1
        try:
            attempt()
        except AssertionError as outcome:
            limited = is_limit(name, case, str(outcome))
            (limits if limited else failed).append([case, str(outcome)[:300]])
        except Exception as error:
            failed.append([case, f"TRACEBACK {type(error).__name__}: {error}"[:300]])
    kinds = Counter(outcome.split()[0] if outcome else "" for _, outcome in failed)
    seconds = round(time.perf_counter() - started, 1)
    return {
        "tried": tried, "held": tried - len(failed) - len(limits), "failed": failed, "by": kinds,
        "limits": limits, "seconds": seconds,
    }  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of counts, as Markdown."""
    lines = [
        "| class | tried | held | documented limits | failed | silent wrong answers |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, counts in results.items():
        failed, silent = len(counts["failed"]), counts["by"].get("SILENT", 0)
        title = TITLES.get(name, name)
        lines.append(
            f"| {title} | {counts['tried']:,} | {counts['held']:,} | "
            f"{len(counts.get('limits', ()))} | {failed} | {silent} |"
        )
    return "\n".join(lines)


def _keep(results: dict[str, dict[str, Any]]) -> None:
    """Keep the counts beside those of other classes, and fill the table of the page."""
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    python = {"python": platform.python_version()}
    known = {**kept, **{name: {**counts, **python} for name, counts in results.items()}}
    kept = {name: known[name] for name in TITLES if name in known}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    filled = re.sub(
        r"(?s)(<!-- faults -->\n).*(<!-- /faults -->)",
        lambda m: f"{m[1]}{table(kept)}\n{m[2]}",
        PAGE.read_text(encoding="utf-8"),
    )
    PAGE.write_text(filled, encoding="utf-8")


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only classes whose name contains one of these")
    given = parser.parse_args()
    names = [
        path.stem.removeprefix("test_") for path in sorted(Path(__file__).parent.glob("test_*"))
    ]
    chosen = [n for n in names if not given.names or any(word in n for word in given.names)]
    with ProcessPoolExecutor(2) as pool:
        results = dict(zip(chosen, pool.map(run, chosen), strict=True))
    for name, counts in results.items():
        for case, outcome in counts["failed"]:
            print(f"{name}: {case}: {outcome}")
        print(f"{name}: {counts['held']} of {counts['tried']} held, {counts['seconds']} s")
    _keep(results)
    sys.exit(any(counts["failed"] for counts in results.values()))


if __name__ == "__main__":
    main()
