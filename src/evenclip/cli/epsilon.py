"""`evenclip epsilon`: compute the ε of a training run from its noise, or the noise for an ε."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from evenclip import check

__all__ = ["epsilon"]

# The curve extends this many powers of ten to either side of the given δ.
_DECADES = 3


def epsilon(
    rate: Annotated[float, typer.Option(help="Poisson sampling rate q: expected batch size ÷ n.")],
    steps: Annotated[int, typer.Option(help="Number of steps T.")],
    delta: Annotated[float, typer.Option(help="δ, well below 1/n.")],
    sigma: Annotated[
        float | None,
        typer.Option(help="Noise multiplier σ of the gradient: standard deviation ÷ sensitivity."),
    ] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Instead of --sigma: compute σ for this ε, by PLD.")
    ] = None,
    sigma_count: Annotated[
        float | None,
        typer.Option(help="Fixed noise multiplier of a count released on the same batches."),
    ] = None,
    with_curve: Annotated[bool, typer.Option("--curve", help="Also print ε at other δ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute ε from the noise, or with --target-epsilon the noise for an ε."""
    # Imported here so that --help does not wait for torch.
    from evenclip.mechanism import accounting

    check.fraction(**{"--rate": rate})
    check.natural(**{"--steps": steps})
    accounting.check_delta(delta, "--delta")
    if sigma_count is not None:
        check.positive(**{"--sigma-count": sigma_count})
    match sigma, target_epsilon:
        case float(), None:
            check.positive(**{"--sigma": sigma})
        case None, float():
            check.positive(**{"--target-epsilon": target_epsilon})
            exact = _calibrated(target_epsilon, sigma_count, delta=delta, q=rate, steps=steps)
            sigma = float(accounting.rounded_up(exact, digits=6))
        case _:
            given = "neither" if sigma is None else "both"
            raise ValueError(
                f"--sigma or --target-epsilon: {given} given; give exactly one of them."
            )
    facts = _facts(sigma, sigma_count, delta=delta, q=rate, steps=steps, with_curve=with_curve)
    print(json.dumps(facts, indent=2) if as_json else _text(facts))


def _calibrated(
    target: float, sigma_count: float | None, *, delta: float, q: float, steps: int
) -> float:
    """Return the σ for which gradient and count jointly cost at most the target ε."""
    from evenclip.mechanism import calibration

    joint = calibration.scale_for({"joint": 1.0}, epsilon=target, delta=delta, q=q, steps=steps)
    if sigma_count is None:
        return joint
    if sigma_count <= joint:
        raise ValueError(
            f"--sigma-count is {sigma_count:g}; the count alone costs more than ε = {target:g}. "
            f"Give more than {joint:.4g}."
        )
    return calibration.gradient_multiplier(joint, sigma_count)


def _facts(
    sigma: float, sigma_count: float | None, *, delta: float, q: float, steps: int, with_curve: bool
) -> dict[str, Any]:
    """Return what is printed, as plain values."""
    from evenclip.mechanism import accounting
    from evenclip.mechanism.ledger import Entry, Ledger

    multipliers = {"count": sigma_count, "gradient": sigma}
    entry = Entry(q, tuple((name, m) for name, m in multipliers.items() if m is not None), steps)
    ledger = Ledger([entry])
    least = accounting.smallest_delta(ledger)
    others = [delta * 10.0**k for k in range(-_DECADES, _DECADES + 1) if k != 0 and with_curve]
    rows = accounting.curve(ledger, [delta, *(other for other in others if least < other < 1)])
    facts: dict[str, Any] = {
        "rdp": rows[0][1],
        "pld": rows[0][2],
        "sigma": sigma,
        "sigma_count": sigma_count,
        "joint_multiplier": entry.joint,
        "rate": q,
        "steps": steps,
        "delta": delta,
    }
    if with_curve:
        facts["curve"] = [{"delta": d, "rdp": rdp, "pld": pld} for d, rdp, pld in sorted(rows)]
    return facts


def _text(facts: dict[str, Any]) -> str:
    """Format the facts, at most 80 columns wide."""
    from evenclip.mechanism.accounting import rounded_up

    noise = f"σ = {facts['sigma']:.6g}"
    if facts["sigma_count"] is not None:
        noise += f", σ_count = {facts['sigma_count']:.6g}; joint: {facts['joint_multiplier']:.6g}"
    lines = [
        f"noise    {noise}",
        f"steps    {facts['steps']} on Poisson samples of rate {facts['rate']:.6g}",
        f"ε        {rounded_up(facts['pld'])} by PLD, {rounded_up(facts['rdp'])} by RDP, at δ = "
        f"{facts['delta']:g}",
        "unit     one record, added or removed; batches drawn by Poisson sampling",
    ]
    if "curve" in facts:
        lines += ["", f"{'δ':>10}{'PLD':>10}{'RDP':>10}"]
        lines += [
            f"{row['delta']:>10.3g}{rounded_up(row['pld']):>10}{rounded_up(row['rdp']):>10}"
            for row in facts["curve"]
        ]
    return "\n".join(lines)
