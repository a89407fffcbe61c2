"""Compare step time and peak memory of evenclip, plain SGD and Opacus in one interleaved run.

    python benchmarks/step.py [--device cpu|cuda] [--models dutch adult mnist celeba vit lstm]
                              [--batch 64 256 1024 4096] [--rounds 15] [--threads 2] [--tf32]
                              [--budget 60] [--quick] [--out FILE]

The whole step is timed; `_ways.py` lists what each training loop includes. The loops take turns
within a round, so that other load on the machine affects all of them. Ratios are taken within
rounds, and their median and quartiles are printed. Peak memory is measured in a separate process.
On a GPU this process uses a filled compiler cache; the file also has the peak of the process that
compiles. A loop that fails is a dash in the table, with the reason in the file, and does not stop
the others.

The compiler's cache is empty at the start. "first" is the time to the first step with compiling,
and then in a process with a filled cache.

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

# Time limits of a process, in seconds: for the memory of one loop, and for a whole row.
_MEMORY, _ROW = 600.0, 3600.0
# Steps whose peak memory is measured.
_STEPS = 5
# Seconds per turn of a loop.
_TURN = 0.15


def row(setup: Setup, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one model at one batch size."""
    about = {**vars(setup), "threads": given.threads}
    with tempfile.TemporaryDirectory(prefix="compiled-") as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache}
        # Memory first: a loop that fails here is not timed. On a GPU the processes run in parallel,
        # because memory is counted per process, and twice, because compiling needs memory itself.
        with ThreadPoolExecutor(1 if setup.device == "cpu" else len(WAYS)) as pool:
            measure = partial(_peak, about=about, env=env)
            peaks = cold = dict(zip(WAYS, pool.map(measure, WAYS), strict=True))
            if setup.device != "cpu":
                peaks = dict(zip(WAYS, pool.map(measure, WAYS), strict=True))
        failed = {way: peak["error"] for way, peak in peaks.items() if "error" in peak}
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
        "MiB": {way: peak["MiB"] for way, peak in peaks.items() if "MiB" in peak},
        "held": {way: peak["held"] for way, peak in peaks.items() if "held" in peak},
        "compiling": {way: peak["MiB"] for way, peak in cold.items() if "MiB" in peak},
        "first": {
            way: [peak["first"], timed["first"].get(way)]
            for way, peak in cold.items()
            if "first" in peak
        },
        "failed": failed | timed["failed"],
        "rounds": seconds,
    }


def _peak(way: str, *, about: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Measure the memory of a loop in a separate process."""
    return in_child(__file__, {"way": way, **about}, _MEMORY, env)


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and ratios to plain SGD and to the fastest loop without privacy."""
    ms = {way: 1e3 * spread(times)[1] for way, times in seconds.items()}
    plain = [way for way in seconds if way.startswith("plain")]
    if not plain:
        return {"ms": ms, "ratio": {}, "quartiles": {}, "best plain": None, "ratio to best": {}}
    best = min(plain, key=lambda way: ms[way])
    first = spread_to(seconds, plain[0])
    return {
        "ms": ms,
        "ratio": {way: quartiles[1] for way, quartiles in first.items()},
        "quartiles": {way: [quartiles[0], quartiles[2]] for way, quartiles in first.items()},
        "best plain": best,
        "ratio to best": {way: quartiles[1] for way, quartiles in spread_to(seconds, best).items()},
    }


def spread_to(
    seconds: dict[str, list[float]], reference: str
) -> dict[str, tuple[float, float, float]]:
    """Return the quartiles of the ratios to one loop."""
    return {way: spread(ratios(times, seconds[reference])) for way, times in seconds.items()}


def table(row: dict[str, Any]) -> str:
    """Format a row of the results at 80 columns."""
    title = (
        f"{row['model']}, batch {row['batch']}, {row['device']}{', TF32' if row['tf32'] else ''}"
    )
    lines = [
        f"{title:<26}{'ms':>9}{'× plain':>9}{'quartiles':>13}{'× best':>8}{'MiB':>6}{'first s':>9}"
    ]
    for way in [*row["ms"], *(way for way in row["failed"] if way not in row["ms"])]:
        peak, (cold, warm) = row["MiB"].get(way), row["first"].get(way, (None, None))
        if way not in row["ms"]:
            lines.append(f"  {way:<24}{'-':>9}{'-':>9}{'-':>13}{'-':>8}{_whole(peak):>6}{'-':>9}")
            continue
        low, high = row["quartiles"].get(way, (0.0, 0.0))
        ratio, best = row["ratio"].get(way, 0.0), row["ratio to best"].get(way, 0.0)
        between = f"{_short(low)} to {_short(high)}"
        times = f"{_whole(cold)}/{_whole(warm)}"
        lines.append(
            f"  {way:<24}{row['ms'][way]:>9.3f}{_short(ratio):>9}{between:>13}{_short(best):>8}"
            f"{_whole(peak):>6}{times:>9}"
        )
    lines += [f"  {way}: {why}"[:80] for way, why in row["failed"].items()]
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 1 else f"{value:.1f}"


def child(task: dict[str, Any]) -> dict[str, Any]:
    """Measure one loop's memory or all loops' times; the body of a separate process."""
    setup = Setup(task["case"], task["batch"], task["device"], task["tf32"])
    if setup.device == "cpu":  # let one loop run out of memory, not the machine
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    prepare_torch(task["threads"], setup.device, setup.tf32)
    if "way" in task:
        data_bytes = sum(part.nbytes for part in setup.data()) if setup.device != "cpu" else 0
        if setup.device != "cpu":
            torch.cuda.reset_peak_memory_stats(setup.device)
        return memory(partial(loop, task["way"], setup), _STEPS, setup.device, data_bytes)
    makes = {way: partial(loop, way, setup) for way in task["ways"]}
    timed = interleaved(
        makes,
        rounds=task["rounds"],
        seconds=task["turn"],
        device=setup.device,
        budget=task["budget"],
    )
    return timed._asdict()


def main() -> None:
    """Measure, print and save."""
    parser = arguments(__doc__ or "", rounds=15)
    parser.add_argument("--models", nargs="+", default=list(PAPER), choices=list(CASES))
    parser.add_argument("--batch", nargs="+", type=int, default=[256])
    parser.add_argument(
        "--tf32", action="store_true", help="allow TF32 products on a GPU, in all loops"
    )
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds; a slower model gets only five rounds"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        try:
            print(json.dumps(child(given.child)))
        except Exception as error:  # the other loops continue
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
            save("step", given, {"rows": rows})  # after every row, in case a later one fails
    print(
        "ms: median step. × plain: ratio to plain SGD within a round, median and quartiles;\n"
        "× best: to the fastest plain loop. MiB: peak of the steps. first: seconds to the\n"
        "first step, with an empty compiler cache and with a filled one."
    )


if __name__ == "__main__":
    main()
