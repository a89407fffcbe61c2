"""The privacy report: all facts needed to judge an ε, as plain values and as text.

The fields are those that regulators and TF-Privacy's privacy statements require: trust model, unit,
neighbouring relation, what is covered and what is not, ε and δ with their accountant, every
constant of the mechanism, and the soundness of the method.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from evenclip.mechanism.release import Ledger
from evenclip.rules import NO_EPSILON, soundness

if TYPE_CHECKING:
    from evenclip.mechanism.settings import Settings

__all__ = ["epsilon", "paragraph", "report"]

UNIT = "one record with its labels; no guarantee for a person with several records"
RELATION = "add or remove one record, with q, B, T, δ and the rule's constants fixed"
NOT_COVERED = (
    "the number of records n and of groups, from which q and T are computed",
    "preprocessing, balancing and splitting of the data",
    "the choice of model, rule, settings and seed, if it was made on these data",
    "a check of a few records before training, which only ever stops it",
)


def epsilon(
    settings: Settings, ledger: Ledger, accountant: str = "pld", delta: float | None = None
) -> float | None:
    """Return ε of a run at δ, by default the δ of its settings.

    It is None if the ledger is not private or the rule declares `NO_EPSILON`.
    """
    from evenclip.mechanism import accounting

    if settings.rule.soundness == NO_EPSILON:
        return None
    return accounting.epsilon(ledger, settings.delta if delta is None else delta, accountant)


def report(
    settings: Settings, ledger: Ledger, trace: Sequence[dict[str, Any]], *, tf32: bool = False,
    uncovered: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the report of one run as values that JSON can hold; ε is None if none is valid.

    Args:
        settings: constants of the run.
        ledger: its releases.
        trace: rows of its trace.
        tf32: whether operands of products were rounded to TF32.
        uncovered: further uses of the data that ε does not cover.
    """
    rule, last = settings.rule, ledger.entries[-1] if ledger.entries else None
    return {
        **_scope(uncovered),
        **_epsilons(settings, ledger),
        "method": rule.name,
        "rule": repr(rule),
        "soundness": soundness(rule),
        "why_no_epsilon": rule.why if rule.soundness == NO_EPSILON else None,
        "reference": rule.reference,
        "group_labels_entered_training": rule.uses_groups,
        "multipliers": {} if last is None else dict(last.multipliers),
        "joint_multiplier": None if last is None else last.joint,
        "steps": ledger.steps,
        "q": settings.q,
        "n": settings.n,
        "expected_batch_size": settings.B,
        "divisor": "the public expected batch size" if rule.poisson else "the size of the batch",
        "poisson_sampling": rule.poisson,
        "empty_batches": sum(row["empty_batches"] for row in trace),
        "non_finite_samples": sum(row["non_finite"] for row in trace),
        "clamped_weights": sum(row["clamped"] for row in trace),
        "precision": (
            "TF32: operands of products rounded to 11 bits, norms enlarged to allow for it"
            if tf32
            else "that of the parameters"
        ),
        "random_generator": "Philox 4×64-10 (noise), PCG64 (batches); not cryptographic",
        "seed": (
            "from the operating system, not kept"
            if settings.seed is None
            else "given and not stated here: reproducible, so not private against anyone who "
            "knows it"
        ),
        "specification": settings.specification,
        "ledger": ledger.to_json(),
        "versions": {
            "evenclip": _version("evenclip"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _scope(uncovered: Sequence[str]) -> dict[str, Any]:
    """Return what the guarantee protects, for whom, and what it does not cover."""
    return {
        "trust_model": "central: the trainer sees the data; recipients of the model do not",
        "unit": UNIT,
        "neighbouring_relation": RELATION,
        "protected": [
            "the final model",
            "every intermediate model",
            "the rule's state",
            "the ledger",
        ],
        "not_protected": [
            "traces and group figures",
            "what observers record",
            "metrics on test data",
            "the counts of empty batches, non-finite samples and clamped weights in this report",
        ],
        "not_covered": [*NOT_COVERED, *uncovered],
    }


def _epsilons(settings: Settings, ledger: Ledger) -> dict[str, Any]:
    """Return ε and δ, with the accountant that computed them."""
    from evenclip.mechanism import accounting

    delta, valid = settings.delta, settings.rule.soundness != NO_EPSILON
    return {
        "epsilon": epsilon(settings, ledger, "pld"),
        "epsilon_rdp": epsilon(settings, ledger, "rdp"),
        "epsilon_without_amplification": (
            accounting.epsilon_without_amplification(ledger, delta) if valid else None
        ),
        "delta": delta,
        "delta_times_n": delta * settings.n,
        "accountant": {
            "epsilon": "PLD",
            "library": "dp-accounting",
            "version": _version("dp-accounting"),
        },
    }


def paragraph(report: dict[str, Any], width: int = 79) -> str:
    """Return the report as text, wrapped at `width` columns."""
    labels = "used" if report["group_labels_entered_training"] else "did not use"
    limits = (
        f"The rule {labels} group labels (the features may still contain them). The seed is "
        f"{report['seed']}. Not covered by ε: {'; '.join(report['not_covered'])}. Not protected: "
        f"{', '.join(report['not_protected'])}."
    )
    return "\n\n".join(textwrap.fill(text, width) for text in (_guarantee(report), limits))


def _guarantee(report: dict[str, Any]) -> str:
    """Return the guarantee of the report as text, or that there is none."""
    from evenclip.mechanism.accounting import rounded_up

    if report["epsilon"] is None:
        reason = f" ({report['why_no_epsilon']})" if report["why_no_epsilon"] else ""
        return (
            f"This model was trained by {report['method']} and has no valid ε{reason}: it promises "
            "no privacy to the records it was trained on."
        )
    pld, rdp, without_sampling = (
        rounded_up(report[name])
        for name in ("epsilon", "epsilon_rdp", "epsilon_without_amplification")
    )
    multipliers = ", ".join(f"{m:g} ({name})" for name, m in report["multipliers"].items())
    return (
        f"This model was trained by {report['method']} ({report['soundness']}) and is (ε, "
        f"δ)-differentially private with ε = {pld} at δ = {report['delta']:g} (by PLD; {rdp} "
        "by RDP). Without the amplification by Poisson sampling it would be "
        f"{without_sampling}. Unit: {report['unit']}. Neighbours: "
        f"{report['neighbouring_relation']}. {report['steps']} steps at rate q = "
        f"{report['q']:.6g}; noise multipliers {multipliers}, jointly "
        f"{report['joint_multiplier']:.4g}; sums divided by {report['divisor']}, "
        f"{report['expected_batch_size']:g}."
    )


def _version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
