"""Measure how the time of a step grows with samples, batch size, parameters and groups.

    python benchmarks/scaling.py [--axes samples batch parameters groups] [--device cpu|cuda]
                                 [--compiled] [--rounds 9] [--threads 2] [--quick] [--out FILE]

The points of an axis take turns within a round; ratios are to the first point, taken within rounds.
Writes benchmarks/results/scaling.json (scaling-cuda.json) with the environment.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _cases import CASES, data, grouped
from _measure import Loop, arguments, interleaved, prepare_torch, ratios, save, spread
from _ways import LR, steps

import evenclip
from evenclip.models import mlp

Points = dict[int, Callable[[], Loop]]

# Seconds per turn of a point.
_TURN = 0.15
BATCH = 256


def run_of(
    case: str,
    device: str,
    compile: bool,
    *,
    n: int | None = None,
    batch: int = BATCH,
    width: int = 256,
    groups: int | None = None,
) -> Loop:
    """Return a run with these numbers of samples and groups, batch size, and MLP width."""
    about = CASES[case] if n is None else replace(CASES[case], n=n)
    given: Any = data(about, batch if n is None else 1, device)
    rule: evenclip.Rule = evenclip.DPSGDGlobalAdapt()
    if groups is not None:
        given, rule = grouped(given, groups), evenclip.DPSGDF()
    model = mlp(hidden=(width, width)) if case == "adult" else about.make(0)
    performance = evenclip.Performance(compile=compile)
    run = evenclip.prepare(
        model,
        given,
        rule=rule,
        epochs=10_000,
        batch_size=batch,
        lr=LR,
        seed=0,
        device=device,
        performance=performance,
    )
    return steps(run)


def axes(device: str, compile: bool, quick: bool) -> dict[str, tuple[str, str, Points]]:
    """Return for each axis: its title, the fixed case, and its points."""
    run: Callable[..., Loop] = partial(run_of, device=device, compile=compile)
    samples = [1_000, 10_000, 100_000, 1_000_000]
    batches = [64, 256, 1024, 4096]
    widths = [64, 128, 256, 512, 1024, 2048]
    groups = [2, 4, 16, 64, 256]
    if quick:
        samples, batches, widths, groups = samples[:2], batches[:2], widths[:2], groups[:2]
    return {
        "samples": ("samples", "Dutch", {n: partial(run, "dutch", n=n) for n in samples}),
        "batch": (
            "batch size",
            "Adult's MLP",
            {b: partial(run, "adult", batch=b) for b in batches},
        ),
        "parameters": (
            "width of the MLP",
            "Adult",
            {w: partial(run, "adult", width=w) for w in widths},
        ),
        "groups": (
            "groups",
            "Dutch, DPSGD-F",
            {k: partial(run, "dutch", groups=k) for k in groups},
        ),
    }


def measured(
    name: str, about: tuple[str, str, Points], given: argparse.Namespace, turn: float
) -> dict[str, Any]:
    """Measure one axis."""
    what, where, points = about
    makes = {str(point): make for point, make in points.items()}
    timed = interleaved(makes, rounds=given.rounds, seconds=turn, device=given.device, mute=False)
    first = next(iter(timed.seconds), None)
    return {
        "axis": name,
        "what": what,
        "where": where,
        "ms": {point: 1e3 * spread(times)[1] for point, times in timed.seconds.items()},
        "ratio": {
            point: spread(ratios(times, timed.seconds[first]))[1]
            for point, times in timed.seconds.items()
            if first is not None
        },
        "parameters": {
            str(w): sum(p.numel() for p in mlp(hidden=(w, w)).parameters()) for w in points
        }
        if name == "parameters"
        else {},
        "failed": timed.failed,
        "rounds": timed.seconds,
    }


def table(axis: dict[str, Any]) -> str:
    """Format an axis at 80 columns."""
    counts = axis["parameters"]
    title = f"{axis['what']} ({axis['where']})"
    lines = [f"{title:<36}{'ms a step':>12}{'ratio':>10}"]
    for point, ms in axis["ms"].items():
        label = f"{int(point):,}" + (f" ({counts[point]:,} parameters)" if counts else "")
        lines.append(f"  {label:<34}{ms:>12.3f}{axis['ratio'][point]:>10.2f}")
    lines += [f"  {point}: {why}"[:80] for point, why in axis["failed"].items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and save."""
    parser = arguments(__doc__ or "", rounds=9)
    names = ("samples", "batch", "parameters", "groups")
    parser.add_argument("--axes", nargs="+", default=list(names), choices=names)
    parser.add_argument("--compiled", action="store_true", help="compile the steps")
    given = parser.parse_args()
    if given.quick:
        given.rounds = min(given.rounds, 3)
    prepare_torch(given.threads, given.device, tf32=False)
    measurements = []
    for name, about in axes(given.device, given.compiled, given.quick).items():
        if name not in given.axes:
            continue
        measurements.append(measured(name, about, given, 0.03 if given.quick else _TURN))
        print(table(measurements[-1]) + "\n", flush=True)
        gc.collect()
        if given.device != "cpu":
            torch.cuda.empty_cache()
    save("scaling", given, {"compiled": given.compiled, "axes": measurements})


if __name__ == "__main__":
    main()
