"""`evenclip epsilon`: ε from noise, noise from ε, or the joint ε of ledgers in files."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenclip import check, terminal
from evenclip.cli import ledgers
from evenclip.cli.options import grouped

if TYPE_CHECKING:
    from evenclip.mechanism.ledger import Ledger

__all__ = ["epsilon"]

# The curve extends this many powers of ten to either side of the given δ.
_DECADES = 3
# Numbers in a count, at most.
_COUNT = 10**4


@dataclass(frozen=True)
class NoiseOptions:
    """Options that describe a training which need not exist yet."""

    rate: Annotated[
        float | None, typer.Option(help="Poisson sampling rate q: expected batch size ÷ n.")
    ] = None
    steps: Annotated[int | None, typer.Option(help="Number of steps T.")] = None
    sigma: Annotated[
        float | None,
        typer.Option(help="Noise multiplier σ of the gradient: standard deviation ÷ sensitivity."),
    ] = None
    target_epsilon: Annotated[
        float | None, typer.Option(help="Instead of --sigma: compute σ for this ε, by PLD.")
    ] = None
    sigma_count: Annotated[
        float | None,
        typer.Option(help="Fixed noise multiplier of a count released on the same batches."),
    ] = None
    parameters: Annotated[
        int | None,
        typer.Option(
            help="Number of parameters of the model; ε then includes how far the drawn noise may "
            "be from Gaussian noise."
        ),
    ] = None


@grouped
def epsilon(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files with ledgers: privacy reports, folders of checkpoints, journals, stored "
            "results. Their joint ε is printed; steps that several files hold count once."
        ),
    ] = None,
    *,
    noise: NoiseOptions,
    delta: Annotated[
        float | None, typer.Option(help="δ, well below 1/n; default: the δ that the files state.")
    ] = None,
    with_curve: Annotated[bool, typer.Option("--curve", help="Also print ε at other δ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute ε from the noise, with --target-epsilon the noise for an ε, or the joint ε of files.

    Example: evenclip epsilon first/privacy.json second/privacy.json
    """
    # Imported here so that --help does not wait for torch.
    from evenclip.mechanism import accounting

    if delta is not None:
        accounting.check_delta(delta, "--delta")
    if files:
        facts = _of_files(files, noise, delta, with_curve=with_curve)
        lines = _lines_of_files(facts)
    else:
        facts = _of_noise(noise, delta, with_curve=with_curve)
        lines = _lines_of_noise(facts)
    if as_json:
        terminal.say_json(json.dumps(facts, indent=2))
    else:
        terminal.say("\n".join([*lines, *_curve_lines(facts)]))


# --- files ----------------------------------------------------------------------------------------


def _of_files(
    files: Sequence[Path], noise: NoiseOptions, delta: float | None, *, with_curve: bool
) -> dict[str, Any]:
    """Return what is printed about the ledgers of files."""
    from evenclip.mechanism.ledger import Ledger

    if noise != NoiseOptions():
        raise ValueError(
            "Files and options of the noise are given; give only one of them, with --delta."
        )
    held = [ledgers.read(path) for path in files]
    ledger = Ledger.union(*(one.ledger for one in held))
    ledger.check_whole()
    ledgers.check_declared(held, ledger)
    covered = Ledger.joined(ledger, ledgers.remaining(held, ledger))
    if not covered.steps:
        raise ValueError("The files hold no step; give the report of a training, or its journal.")
    why = next((one.why for one in held if one.why is not None), None)
    if why is None and not covered.is_private:
        why = "a value was released in clear, or a batch was not a Poisson sample"
    delta = ledgers.delta_of(held) if delta is None else delta
    return {
        **_epsilons(None if why else covered, delta, with_curve=with_curve),
        "why_no_epsilon": why,
        "steps": ledger.steps,
        "reserved_steps": sum(entry.steps for entry in ledger.entries if entry.reserved),
        "remaining_steps": covered.steps - ledger.steps,
        "runs": list(dict.fromkeys(entry.run for entry in ledger.entries if entry.run)),
        "files": [str(one.path) for one in held],
        "notes": ledgers.notes(held, ledger),
    }


def _lines_of_files(facts: dict[str, Any]) -> list[str]:
    """Format the facts about files."""
    runs = ", ".join(run[:8] for run in facts["runs"]) or "without ids"
    reserved = facts["reserved_steps"]
    kept = f", {reserved} of them reserved and perhaps not taken" if reserved else ""
    left = facts["remaining_steps"]
    also = f"; ε counts {left} more that were declared and not taken" if left else ""
    why = facts["why_no_epsilon"]
    lines = [
        f"runs     {runs}",
        f"steps    {facts['steps']}{kept}; steps that several files hold count once{also}",
        f"ε        none: {why}" if why else _epsilon_line(facts),
        "unit     one record, added or removed; batches drawn by Poisson sampling",
        *(f"note     {note}" for note in facts["notes"]),
    ]
    return [
        textwrap.fill(
            line, 80, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False
        )
        for line in lines
    ]


# --- noise ----------------------------------------------------------------------------------------


def _of_noise(noise: NoiseOptions, delta: float | None, *, with_curve: bool) -> dict[str, Any]:
    """Return what is printed about noise that is described by options."""
    from evenclip.mechanism.accountants import LEAST_MULTIPLIER
    from evenclip.mechanism.ledger import Entry, Ledger
    from evenclip.mechanism.rounding import TAU

    q, steps = noise.rate, noise.steps
    if q is None or steps is None or delta is None:
        raise ValueError(
            "--rate, --steps and --delta are needed to compute ε from noise; give all three, or "
            "files with ledgers."
        )
    check.fraction(**{"--rate": q})
    check.natural(**{"--steps": steps})
    if steps > check.MOST_STEPS:
        raise ValueError(
            f"--steps is {steps}; ε is computed for at most {check.MOST_STEPS} steps: give fewer."
        )
    if noise.sigma_count is not None:
        check.positive(**{"--sigma-count": noise.sigma_count})
    if noise.parameters is not None:
        check.natural(**{"--parameters": noise.parameters})
    sigma = _sigma(noise, q, steps, delta)
    given = {"count": noise.sigma_count, "gradient": sigma}
    multipliers = tuple((name, m) for name, m in given.items() if m is not None)
    sizes = _sizes(noise)
    entry = Entry(q, multipliers, steps, tuple(sizes.items()), TAU if sizes else 0.0)
    if entry.joint < LEAST_MULTIPLIER:
        raise ValueError(
            f"--sigma is {sigma:g}, and the joint noise multiplier {entry.joint:g}; below "
            f"{LEAST_MULTIPLIER:g} a single step costs an ε of more than 500,000: give more noise."
        )
    return {
        **_epsilons(Ledger([entry]), delta, with_curve=with_curve),
        "sigma": sigma,
        "sigma_count": noise.sigma_count,
        "joint_multiplier": entry.joint,
        "parameters": noise.parameters,
        "rate": q,
        "steps": steps,
    }


def _sigma(noise: NoiseOptions, q: float, steps: int, delta: float) -> float:
    """Return the given σ, or the one for the given ε."""
    from evenclip.mechanism import accounting

    match noise.sigma, noise.target_epsilon:
        case float(sigma), None:
            check.positive(**{"--sigma": sigma})
            return sigma
        case None, float(target):
            check.positive(**{"--target-epsilon": target})
            exact = _calibrated(target, noise, delta=delta, q=q, steps=steps)
            return float(accounting.rounded_up(exact, digits=6))
    given = "neither" if noise.sigma is None else "both"
    raise ValueError(f"--sigma or --target-epsilon: {given} given; give exactly one of them.")


def _calibrated(target: float, noise: NoiseOptions, *, delta: float, q: float, steps: int) -> float:
    """Return the σ for which gradient and count jointly cost at most the target ε."""
    from evenclip.mechanism import calibration

    joint = calibration.scale_for(
        {"joint": 1.0}, epsilon=target, delta=delta, q=q, steps=steps, sizes=_sizes(noise)
    )
    if noise.sigma_count is None:
        return joint
    if noise.sigma_count <= joint:
        raise ValueError(
            f"--sigma-count is {noise.sigma_count:g}; the count alone costs more than ε = "
            f"{target:g}. Give more than {joint:.4g}."
        )
    return calibration.gradient_multiplier(joint, noise.sigma_count)


def _sizes(noise: NoiseOptions) -> dict[str, int]:
    """Return how many numbers each release has; empty for ideal noise."""
    if noise.parameters is None:
        return {}
    count = {} if noise.sigma_count is None else {"count": _COUNT}
    return count | {"gradient": noise.parameters}


def _lines_of_noise(facts: dict[str, Any]) -> list[str]:
    """Format the facts about noise, at most 80 columns wide."""
    noise, parameters = f"σ = {facts['sigma']:.6g}", facts["parameters"]
    if facts["sigma_count"] is not None:
        noise += f", σ_count = {facts['sigma_count']:.6g}; joint: {facts['joint_multiplier']:.6g}"
    return [
        f"noise    {noise}",
        "drawn    "
        + (
            "taken as Gaussian; --parameters includes how far it may be from that"
            if parameters is None
            else f"for {parameters} parameters; ε includes how far it may be from Gaussian"
        ),
        f"steps    {facts['steps']} on Poisson samples of rate {facts['rate']:.6g}",
        _epsilon_line(facts),
        "unit     one record, added or removed; batches drawn by Poisson sampling",
    ]


# --- ε --------------------------------------------------------------------------------------------


def _epsilons(ledger: Ledger | None, delta: float, *, with_curve: bool) -> dict[str, Any]:
    """Return ε at δ by both accountants, and at other δ on request; None if there is none."""
    from evenclip.mechanism import accounting

    rows: list[tuple[float, float | None, float | None]] = [(delta, None, None)]
    if ledger is not None:
        least = accounting.smallest_delta(ledger)
        others = [delta * 10.0**k for k in range(-_DECADES, _DECADES + 1) if k != 0 and with_curve]
        rows = accounting.curve(ledger, [delta, *(other for other in others if least < other < 1)])
    facts: dict[str, Any] = {"rdp": rows[0][1], "pld": rows[0][2], "delta": delta}
    if with_curve:
        facts["curve"] = [{"delta": d, "rdp": rdp, "pld": pld} for d, rdp, pld in sorted(rows)]
    return facts


def _epsilon_line(facts: dict[str, Any]) -> str:
    """Format ε by both accountants."""
    from evenclip.mechanism.accounting import rounded_up

    return (
        f"ε        {rounded_up(facts['pld'])} by PLD, {rounded_up(facts['rdp'])} by RDP, at δ = "
        f"{facts['delta']:g}"
    )


def _curve_lines(facts: dict[str, Any]) -> list[str]:
    """Format ε at other δ, if they were computed."""
    from evenclip.mechanism.accounting import rounded_up

    if "curve" not in facts:
        return []
    return [
        "",
        f"{'δ':>10}{'PLD':>10}{'RDP':>10}",
        *(
            f"{row['delta']:>10.3g}{rounded_up(row['pld']):>10}{rounded_up(row['rdp']):>10}"
            for row in facts["curve"]
        ),
    ]
