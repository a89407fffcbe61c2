"""Step time and peak memory of private training beside plain SGD and Opacus, in one interleaved
run.

    python benchmarks/step.py [--device cpu|cuda] [--models dutch adult mnist celeba vit lstm]
                              [--batch 64 256 1024 4096] [--rounds 15] [--threads 2] [--tf32]
                              [--budget 60] [--quick] [--out FILE]

The whole step is timed as a user runs it; `_ways.py` lists what each way includes. The ways take
turns within a round, so that other load on the machine affects all of them; ratios are taken within
rounds, and their median and quartiles are printed. Peak memory is measured in a separate process;
on a GPU, in one that finds everything in the compiler's cache, and that of the first, which
compiles, is in the file too. A way that fails is a dash in the table, with the reason in the file,
and does not stop the others.

The compiler's cache is empty at the start: "first" is the time to the first step with compiling,
then the same in a process that finds the cache filled.

Writes benchmarks/results/step.json (step-cuda.json, step-cuda-tf32.json) with the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from _cases import CASES, PAPER
from _measure import (
    arguments,
    in_child,
    interleaved,
    memory,
    prepare_torch,
    ratios,
    reason,
    save,
    spread,
)
from _ways import WAYS, Setup, loop

# Seconds that a process may take: a way's few steps for its memory, a model's whole row.
_MEMORY, _ROW = 600.0, 3600.0
# Steps whose peak memory is looked at.
_STEPS = 5
# Seconds of a way's turn.
_TURN = 0.15


def row(setup: Setup, given: argparse.Namespace) -> dict[str, Any]:
    """Everything measured about one model at one batch size."""
    about = {**vars(setup), "threads": given.threads}
    with tempfile.TemporaryDirectory(prefix="compiled-") as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache}
        # Memory first: a way that fails here takes no turn with the others. On a GPU the processes
        # run side by side, since memory is counted by process; and twice, since compiling itself
        # needs memory.
        with ThreadPoolExecutor(1 if setup.device == "cpu" else len(WAYS)) as pool:
            look = partial(_look, about=about, env=env)
            peaks = cold = dict(zip(WAYS, pool.map(look, WAYS), strict=True))
            if setup.device != "cpu":
                peaks = dict(zip(WAYS, pool.map(look, WAYS), strict=True))
        failed = {way: found["error"] for way, found in peaks.items() if "error" in found}
        left = [way for way in WAYS if way not in failed]
        task = {
            "ways": left,
            "rounds": given.rounds,
            "turn": given.turn,
            "budget": given.budget,
            **about,
        }
        timed: dict[str, Any] = (
            in_child(__file__, task, _ROW, env) if left else {"error": "nothing to measure"}
        )
    if "error" in timed:
        timed = {"seconds": {}, "first": {}, "failed": dict.fromkeys(left, timed["error"])}
    seconds = {way: timed["seconds"][way] for way in WAYS if way in timed["seconds"]}
    return {
        "model": setup.case,
        "batch": setup.batch,
        "device": setup.device,
        "tf32": setup.tf32,
        **compared(seconds),
        "MiB": {way: found["MiB"] for way, found in peaks.items() if "MiB" in found},
        "held": {way: found["held"] for way, found in peaks.items() if "held" in found},
        "compiling": {way: found["MiB"] for way, found in cold.items() if "MiB" in found},
        "first": {
            way: [found["first"], timed["first"].get(way)]
            for way, found in cold.items()
            if "first" in found
        },
        "failed": failed | timed["failed"],
        "rounds": seconds,
    }


def _look(way: str, *, about: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """A way's memory, in a process of its own."""
    return in_child(__file__, {"way": way, **about}, _MEMORY, env)


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and ratios to plain SGD and to the quickest way of training without privacy."""
    ms = {way: 1e3 * spread(found)[1] for way, found in seconds.items()}
    plain = [way for way in seconds if way.startswith("plain")]
    if not plain:
        return {"ms": ms, "ratio": {}, "quartiles": {}, "best plain": None, "ratio to best": {}}
    best = min(plain, key=lambda way: ms[way])
    first = spread_to(seconds, plain[0])
    return {
        "ms": ms,
        "ratio": {way: found[1] for way, found in first.items()},
        "quartiles": {way: [found[0], found[2]] for way, found in first.items()},
        "best plain": best,
        "ratio to best": {way: found[1] for way, found in spread_to(seconds, best).items()},
    }


def spread_to(
    seconds: dict[str, list[float]], reference: str
) -> dict[str, tuple[float, float, float]]:
    """Quartiles of the ratios to one way."""
    return {way: spread(ratios(found, seconds[reference])) for way, found in seconds.items()}


def table(found: dict[str, Any]) -> str:
    """A row of the results, readable at 80 columns."""
    title = (
        f"{found['model']}, batch {found['batch']}, "
        f"{found['device']}{', TF32' if found['tf32'] else ''}"
    )
    lines = [
        f"{title:<26}{'ms':>9}{'× plain':>9}{'quartiles':>13}{'× best':>8}{'MiB':>6}{'first s':>9}"
    ]
    for way in [*found["ms"], *(way for way in found["failed"] if way not in found["ms"])]:
        peak, (cold, warm) = found["MiB"].get(way), found["first"].get(way, (None, None))
        if way not in found["ms"]:
            lines.append(f"  {way:<24}{'-':>9}{'-':>9}{'-':>13}{'-':>8}{_whole(peak):>6}{'-':>9}")
            continue
        low, high = found["quartiles"].get(way, (0.0, 0.0))
        ratio, best = found["ratio"].get(way, 0.0), found["ratio to best"].get(way, 0.0)
        between = f"{_short(low)} to {_short(high)}"
        times = f"{_whole(cold)}/{_whole(warm)}"
        lines.append(
            f"  {way:<24}{found['ms'][way]:>9.3f}{_short(ratio):>9}{between:>13}{_short(best):>8}"
            f"{_whole(peak):>6}{times:>9}"
        )
    lines += [f"  {way}: {why}"[:80] for way, why in found["failed"].items()]
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 1 else f"{value:.1f}"


def child(task: dict[str, Any]) -> dict[str, Any]:
    """The body of a process of its own: one way's memory, or the turns of all."""
    setup = Setup(task["case"], task["batch"], task["device"], task["tf32"])
    if setup.device == "cpu":  # better one way without memory than a machine without
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    prepare_torch(task["threads"], setup.device, setup.tf32)
    if "way" in task:
        there = sum(part.nbytes for part in setup.data()) if setup.device != "cpu" else 0
        if setup.device != "cpu":
            torch.cuda.reset_peak_memory_stats(setup.device)
        return memory(partial(loop, task["way"], setup), _STEPS, setup.device, there)
    makes = {way: partial(loop, way, setup) for way in task["ways"]}
    found = interleaved(
        makes,
        rounds=task["rounds"],
        seconds=task["turn"],
        device=setup.device,
        budget=task["budget"],
    )
    return found._asdict()


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__ or "", rounds=15)
    parser.add_argument("--models", nargs="+", default=list(PAPER), choices=list(CASES))
    parser.add_argument("--batch", nargs="+", type=int, default=[256])
    parser.add_argument(
        "--tf32", action="store_true", help="on a GPU, operands of 11 bits on both sides"
    )
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds; a slower model has five rounds only"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        try:
            print(json.dumps(child(given.child)))
        except Exception as error:  # whatever it is, the others go on
            print(json.dumps({"error": reason(error)}))
        return
    if given.tf32 and given.device == "cpu":
        parser.error("--tf32 needs --device cuda")
    given.turn = _TURN
    if given.quick:
        given.rounds, given.turn = min(given.rounds, 3), 0.03
    rows = []
    for case in given.models:
        for batch in given.batch:
            rows.append(row(Setup(case, batch, given.device, given.tf32), given))
            print(table(rows[-1]) + "\n", flush=True)
            save(
                "step", given, {"rows": rows}
            )  # what is measured is kept, whatever becomes of the rest
    print(
        "ms: median step. × plain: ratio to plain SGD within a round, median and quartiles;\n"
        "× best: to the quickest plain way. MiB: peak of the steps. first: seconds to the\n"
        "first step, with an empty compiler cache and with a filled one."
    )


if __name__ == "__main__":
    main()
