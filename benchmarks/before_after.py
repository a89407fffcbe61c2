"""Compare the step times of two source trees in one interleaved run.

    python benchmarks/before_after.py --before CHECKOUT [--models dutch adult mnist celeba]
                                      [--rounds 15] [--threads 2] [--cpu-time] [--quick]
                                      [--out FILE]

"After" is the checkout of this file. Each network has one process per tree. The processes stay
alive and take turns; the trees alternate in order. Both processes run this file and `_ways.py`,
with evenclip imported from their own tree. Only public names are used, so the other tree may be
older. Each process also times plain SGD, the same code in both. The ratio of these two times should
be 1; its deviation shows the accuracy of the run.

On a busy machine use --threads 1 --cpu-time, which measures the processor time of the process
instead of the wall clock.

Prints the median and the quartiles of the ratios within rounds. Writes
benchmarks/results/before-after.json with the environment and both commits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from _measure import (
    arguments,
    commit,
    prepare_torch,
    ratios,
    reason,
    save,
    spread,
    turn_seconds,
    turn_steps,
)

AFTER = Path(__file__).resolve().parents[1]
MODELS = ("dutch", "adult", "mnist", "celeba")
COMPILED = ("dutch", "adult")  # on a CPU, networks with convolutions are not compiled
_TURN = 0.15  # seconds per turn
_BATCH = 256


class Tree:
    """A process that trains one network with the evenclip of one source tree."""

    def __init__(self, root: Path, task: dict[str, Any]) -> None:
        env = {**os.environ, "PYTHONPATH": str(root / "src")}
        self.root = root
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps({"root": str(root), **task})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def request(self, task: dict[str, Any]) -> float:
        """Send a request and return its answer.

        Raises:
            RuntimeError: the request failed; the message says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of {self.root} ended with status {self._process.wait()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.root}: {answer['error']}")
        return float(answer["value"])


def child(task: dict[str, Any]) -> None:
    """Answer requests until the input ends; the body of a process."""
    answers, sys.stdout = sys.stdout, sys.stderr  # other output must not mix with the answers
    import evenclip

    assert evenclip.__file__ is not None
    if not Path(evenclip.__file__).is_relative_to(task["root"]):
        raise SystemExit(f"evenclip was imported from {evenclip.__file__}, not from {task['root']}")
    from _ways import Setup, loop

    prepare_torch(task["threads"], "cpu", tf32=False)
    setup = Setup(task["model"], task["batch"])
    clock = time.process_time if task["cpu_time"] else time.perf_counter
    loops = {}
    for line in sys.stdin:
        request = json.loads(line)
        way = request["way"]
        try:
            if request["do"] == "start":
                loops[way] = loop(way, setup)
                value = float(turn_steps(loops[way], task["turn"], "cpu"))
            else:
                value = turn_seconds(loops[way], request["steps"], "cpu", clock)
            answer: dict[str, Any] = {"value": value}
        except Exception as error:  # the parent reports it
            answer = {"error": reason(error)}
        print(json.dumps(answer), file=answers, flush=True)


def measured(model: str, before: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one network: a row for its step, and one for the compiled step if there is one."""
    ways = ["plain SGD", "evenclip", *(["evenclip compiled"] if model in COMPILED else [])]
    task = {
        "model": model,
        "batch": _BATCH,
        "threads": given.threads,
        "turn": given.turn,
        "cpu_time": given.cpu_time,
    }
    seconds: dict[str, dict[str, list[float]]] = {
        which: {way: [] for way in ways} for which in ("before", "after")
    }
    with ExitStack() as stack:
        trees = {
            which: stack.enter_context(Tree(root, task))
            for which, root in (("before", before), ("after", AFTER))
        }
        # The same number of steps in both, so that both include the same number of epoch ends.
        steps = {
            way: int(max(tree.request({"do": "start", "way": way}) for tree in trees.values()))
            for way in ways
        }
        for done in range(given.rounds):
            order = list(trees) if done % 2 else list(trees)[::-1]
            for way in ways:
                for which in order:
                    seconds[which][way].append(
                        trees[which].request({"do": "turn", "way": way, "steps": steps[way]})
                    )
    control = spread(ratios(seconds["after"]["plain SGD"], seconds["before"]["plain SGD"]))
    return [
        {
            "model": model,
            "way": way,
            "ms": {which: 1e3 * spread(by_way[way])[1] for which, by_way in seconds.items()},
            "ratio": spread(ratios(seconds["after"][way], seconds["before"][way])),
            **{
                which: spread(ratios(by_way[way], by_way["plain SGD"]))
                for which, by_way in seconds.items()
            },
            "plain SGD": control,
            "rounds": {
                which: {name: by_way[name] for name in ("plain SGD", way)}
                for which, by_way in seconds.items()
            },
        }
        for way in ways[1:]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results at 80 columns."""
    lines = [f"{'':<28}{'before':>8}{'after':>8}{'after ÷ before':>26}{'control':>9}"]
    for row in rows:
        low, middle, high = row["ratio"]
        lines.append(
            f"{row['model'] + ', ' + row['way']:<28}{row['before'][1]:>8.2f}{row['after'][1]:>8.2f}"
            f"{f'{middle:.3f} ({low:.3f} to {high:.3f})':>26}{row['plain SGD'][1]:>9.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and save."""
    parser = arguments(__doc__ or "", rounds=15)
    parser.add_argument("--before", type=Path, help="another checkout of evenclip")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time instead of the wall clock"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    if given.device != "cpu":
        parser.error("--device: only the CPU is measured here")
    if given.before is None or not (given.before / "src" / "evenclip").is_dir():
        parser.error("--before must name a checkout of evenclip, with src/evenclip in it")
    before, given.turn = given.before.resolve(), _TURN
    if given.quick:
        given.rounds, given.turn = min(given.rounds, 3), 0.03
    rows: list[dict[str, Any]] = []
    for model in given.models:
        rows += measured(model, before, given)
        print(table(rows[-2:] if model in COMPILED else rows[-1:]) + "\n", flush=True)
        save(
            "before-after", given, {"before": commit(before), "after": commit(AFTER), "rows": rows}
        )
    print(
        "before, after: ratio to plain SGD within a round, median. after ÷ before: median and\n"
        "quartiles. control: plain SGD, after ÷ before; 1 in a quiet run."
    )


if __name__ == "__main__":
    main()
