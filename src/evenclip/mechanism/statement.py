"""The privacy report: all facts needed to judge an ε, as plain values and as text.

The fields are those that regulators and TF-Privacy's privacy statements require: trust model, unit,
neighbouring relation, what is covered and what is not, ε and δ with their accountant, every
constant of the mechanism, and the soundness of the method; and those of the release itself: the
generator, how far its noise may be from Gaussian noise, and what the rounding of sums adds.

*Stopping early.* Whether a run is stopped may depend on its results. So ε is that of all steps that
were drawn, and of those that the run would have taken up to the declared number. Draws that were
repeated, and those of other attempts, do not stand for declared steps.
"""

from __future__ import annotations

import platform
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from evenclip.mechanism.correction import SamplerError, Terms
from evenclip.mechanism.grid import inflation
from evenclip.mechanism.noise import C
from evenclip.mechanism.release import Entry, Ledger
from evenclip.rules import NO_EPSILON, Rule, soundness

if TYPE_CHECKING:
    from evenclip.mechanism.settings import Settings

__all__ = ["Facts", "declared", "epsilon", "paragraph", "remaining", "report", "span"]

UNIT = "one record with its labels; no guarantee for a person with several records"
RELATION = (
    "add or remove one record, where neither dataset has more than 2B/q records; q, B, T, δ and "
    "the rule's constants are fixed"
)
COUNTED = "the number of records n, from which q and T are computed"
NOT_COVERED = (
    "the number of groups",
    "preprocessing, balancing and splitting of the data, except where each record's is a function "
    "of that record alone",
    "the choice of model, rule, settings and seed, if it was made on these data",
    "a check of a few records before training, which only ever stops it",
)
GENERATOR = (
    "AES-256 in counter mode (noise, batches, and the states that dropout starts from), keyed by "
    "BLAKE2b"
)
SHUFFLED = "; shuffled batches: PCG64, with a seed from it"
CLAIM = (
    "computational: against anyone who does not know the key and cannot break AES-256 or BLAKE2b"
)
DURABLE = "all attempts: every step was on disk in the ledger before it was taken"
NOT_DURABLE = "this attempt only: steps of an attempt that was interrupted may be missing"


@dataclass(frozen=True)
class Facts:
    """How a run was computed, as far as its report states it.

    Attributes:
        tf32: whether operands of products were rounded to TF32.
        uncovered: further uses of the data that ε does not cover.
        independence: whether a sample's numbers depend on the rest of its batch, as a sentence.
        rounding: ρ, by which the rounding of a sum exceeds the sensitivity; None if unknown.
        durable: whether each step was on disk in the ledger before it was taken.
        remaining: ledger entries, as plain values, of the declared steps that the run has not
            taken; None if they are not known.
    """

    tf32: bool = False
    uncovered: tuple[str, ...] = ()
    independence: str | None = None
    rounding: float | None = None
    durable: bool = False
    remaining: Sequence[Mapping[str, Any]] | None = None


def epsilon(
    settings: Settings,
    ledger: Ledger,
    accountant: str = "pld",
    delta: float | None = None,
    facts: Facts | None = None,
) -> float | None:
    """Return ε of a run at δ, by default the δ of its settings.

    It is that of `declared`, so it does not shrink if the run is stopped early. It is None if the
    ledger is not private or the rule declares `NO_EPSILON`.
    """
    from evenclip.mechanism import accounting

    if settings.rule.soundness == NO_EPSILON:
        return None
    at = settings.delta if delta is None else delta
    return accounting.epsilon(declared(settings, ledger, facts), at, accountant)


def declared(settings: Settings, ledger: Ledger, facts: Facts | None = None) -> Ledger:
    """Return the ledger with the declared steps that were not taken, which ε covers too."""
    return Ledger.joined(ledger, remaining(settings, ledger, facts))


def remaining(settings: Settings, ledger: Ledger, facts: Facts | None = None) -> Ledger:
    """Return the declared steps that were not taken; none for a ledger without steps or ε.

    Without facts, every drawn step stands for a declared one.
    """
    if not (ledger.entries and ledger.is_private):
        return Ledger()
    if facts is not None and facts.remaining is not None:
        return Ledger.from_json(facts.remaining)
    last, missing = ledger.entries[-1], list[Entry]()
    for multipliers, steps in _missing(settings, ledger).items():
        entry = Entry(last.q, multipliers, steps, last.sizes, last.tau)
        missing.append(replace(entry, lam=last.lam, beta=last.beta))
    return Ledger(missing)


def _missing(settings: Settings, ledger: Ledger) -> Counter[tuple[tuple[str, float], ...]]:
    """Return multipliers of a step -> how many steps like it were declared and not drawn."""
    rule, last = settings.rule, ledger.entries[-1]
    if type(rule).multipliers is Rule.multipliers:  # all steps are alike
        return +Counter({last.multipliers: settings.steps - ledger.steps})
    names = [name for name, _ in last.multipliers]
    planned = Counter(
        tuple((name, float(given[name])) for name in names)
        for given in (rule.multipliers(t) for t in range(settings.steps))
    )
    drawn = Counter[tuple[tuple[str, float], ...]]()
    for entry in ledger.entries:
        drawn[entry.multipliers] += entry.steps
    return planned - drawn


def report(
    settings: Settings,
    ledger: Ledger,
    trace: Sequence[dict[str, Any]],
    facts: Facts | None = None,
) -> dict[str, Any]:
    """Return the report of one run as values that JSON can hold; ε is None if none is valid.

    Args:
        settings: constants of the run.
        ledger: its releases.
        trace: rows of its trace.
        facts: how it was computed.
    """
    facts = facts or Facts()
    clamped = sum(row["clamped"] for row in trace)
    return {
        **_scope(settings, facts.uncovered),
        **_epsilons(settings, ledger, facts),
        **_method(settings.rule, clamped),
        **_steps(settings, ledger, facts),
        "q": settings.q,
        "n": settings.n,
        "expected_batch_size": settings.B,
        **_release(settings, ledger, facts),
        "empty_batches": sum(row["empty_batches"] for row in trace),
        "non_finite_samples": sum(row["non_finite"] for row in trace),
        "clamped_weights": clamped,
        "precision": (
            "TF32: operands of products rounded to 11 bits, norms enlarged to allow for it"
            if facts.tf32
            else "that of the parameters; private sums in float64"
        ),
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


def _scope(settings: Settings, uncovered: Sequence[str]) -> dict[str, Any]:
    """Return what the guarantee protects, for whom, and what it does not cover."""
    counted = () if settings.declared else (COUNTED,)
    return {
        "trust_model": "central: the trainer sees the data; recipients of the model do not",
        "claim": CLAIM,
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
        "not_covered": [*counted, *NOT_COVERED, *uncovered],
    }


def _epsilons(settings: Settings, ledger: Ledger, facts: Facts) -> dict[str, Any]:
    """Return ε and δ, the accountant that computed them, and what the sampler of the noise took."""
    from evenclip.mechanism import accounting

    delta, covered = settings.delta, declared(settings, ledger, facts)
    valid = settings.rule.soundness != NO_EPSILON
    real = accounting.real(covered, delta) if valid else None
    return {
        "epsilon": None if real is None else real.epsilon,
        "epsilon_rdp": epsilon(settings, ledger, "rdp", facts=facts),
        "epsilon_without_amplification": (
            accounting.epsilon_without_amplification(covered, delta) if valid else None
        ),
        "delta": delta,
        "delta_times_n": delta * settings.n,
        "accountant": {
            "epsilon": "PLD",
            "library": "dp-accounting",
            "version": _version("dp-accounting"),
        },
        "sampler": None if real is None else _sampler(covered, real.terms),
    }


def _sampler(ledger: Ledger, terms: Terms) -> dict[str, Any]:
    """Return how far the noise as drawn may be from Gaussian noise, see `correction`."""
    error = SamplerError.of(ledger.entries)
    return {
        "epsilon_s": terms.epsilon_s,
        "delta_s": terms.delta_s,
        "pairs": error.pairs,
        "c": C,
        "lambda": max((entry.lam for entry in ledger.entries), default=0.0),
        "beta": max((entry.beta for entry in ledger.entries), default=0.0),
        "tau": error.tau,
    }


def _method(rule: Rule, clamped: int) -> dict[str, Any]:
    """Return the rule and its soundness, given how many of its weights were clamped."""
    return {
        "method": rule.name,
        "rule": repr(rule),
        "soundness": soundness(rule, clamped),
        "why_no_epsilon": rule.why if rule.soundness == NO_EPSILON else None,
        "reference": rule.reference,
        "group_labels_entered_training": rule.uses_groups,
        "divisor": "the public expected batch size" if rule.poisson else "the size of the batch",
        "poisson_sampling": rule.poisson,
    }


def _steps(settings: Settings, ledger: Ledger, facts: Facts) -> dict[str, Any]:
    """Return the steps that were declared and drawn, and the runs that drew them."""
    left = remaining(settings, ledger, facts)
    parents = dict.fromkeys(entry.parent for entry in ledger.entries if entry.parent is not None)
    return {
        **_multipliers(Ledger.joined(ledger, left)),
        "steps": ledger.steps,
        "declared_steps": settings.steps,
        "reserved_steps": sum(entry.steps for entry in ledger.entries if entry.reserved),
        "remaining": left.to_json(),
        "steps_note": _steps_note(settings, ledger, left.steps) if ledger.is_private else None,
        "runs": list(dict.fromkeys(entry.run for entry in ledger.entries if entry.run)),
        "parents": [f"draw {index} of run {run}" for run, index in parents],
    }


def _multipliers(ledger: Ledger) -> dict[str, Any]:
    """Return the multipliers of each release and of all together, over all steps."""
    by_name = dict[str, list[float]]()
    for entry in ledger.entries:
        for name, multiplier in entry.multipliers:
            by_name.setdefault(name, []).append(multiplier)
    return {
        "multipliers": {name: _range(values) for name, values in by_name.items()},
        "joint_multiplier": _range([entry.joint for entry in ledger.entries]),
    }


def _range(values: Sequence[float]) -> float | list[float] | None:
    """Return the value if all are equal, [least, most] if they differ, None if there is none."""
    if not values:
        return None
    least, most = min(values), max(values)
    return least if least == most else [least, most]


def span(value: float | Sequence[float] | None, digits: int = 6) -> str:
    """Format a multiplier of the report: a value, or the least and the most of all steps.

    >>> span(1.0), span([1.0, 1.18])
    ('1', '1 to 1.18')
    """
    if value is None:
        return "none"
    ends = value if isinstance(value, Sequence) else [value]
    return " to ".join(f"{end:.{digits}g}" for end in ends)


def _steps_note(settings: Settings, ledger: Ledger, left: int) -> str | None:
    """Return which steps ε belongs to, if they are not exactly the declared ones."""
    drawn, planned = ledger.steps, settings.steps
    if left and drawn + left > planned:
        return (
            f"{planned} steps were declared, {drawn} drawn (some were repeated or interrupted), "
            f"and {left} not taken; ε is that of all {drawn + left}, because stopping early may "
            "depend on the results"
        )
    if drawn > planned:
        return (
            f"{planned} steps were declared and {drawn} drawn: the run was extended, or steps were "
            "repeated or interrupted; ε is that of all drawn steps"
        )
    if 0 < drawn < planned:
        return (
            f"{planned} steps were declared and {drawn} drawn; ε is that of all declared steps, "
            "because stopping early may depend on the results"
        )
    return None


def _release(settings: Settings, ledger: Ledger, facts: Facts) -> dict[str, Any]:
    """Return how values were released: generator, rounding, independence and ledger."""
    rounding = facts.rounding if ledger.is_private else None
    return {
        "random_generator": GENERATOR + ("" if settings.rule.poisson else SHUFFLED),
        "bound_inflation": None if rounding is None else inflation(rounding),
        "independence": facts.independence,
        "ledger_covers": DURABLE if facts.durable else NOT_DURABLE,
    }


def paragraph(report: dict[str, Any], width: int = 79) -> str:
    """Return the report as text, wrapped at `width` columns."""
    labels = "used" if report["group_labels_entered_training"] else "did not use"
    limits = (
        f"The rule {labels} group labels (the features may still contain them). The seed is "
        f"{report['seed']}. Not covered by ε: {'; '.join(report['not_covered'])}. Not protected: "
        f"{', '.join(report['not_protected'])}."
    )
    texts = [_guarantee(report), *_conditions(report), limits]
    return "\n\n".join(textwrap.fill(text, width) for text in texts)


def _guarantee(report: dict[str, Any]) -> str:
    """Return the guarantee of the report as text, or that there is none."""
    from evenclip.mechanism.accounting import rounded_up

    if report["epsilon"] is None:
        reason = f" ({report['why_no_epsilon']})" if report["why_no_epsilon"] else ""
        return (
            f"This model was trained by {report['method']} and has no valid ε{reason}: it promises "
            "no privacy to the records it was trained on."
        )
    unsampled = report["epsilon_without_amplification"]
    without_sampling = (
        "no ε would be valid" if unsampled is None else f"it would be {rounded_up(unsampled)}"
    )
    multipliers = ", ".join(f"{span(m)} ({name})" for name, m in report["multipliers"].items())
    return (
        f"This model was trained by {report['method']} ({report['soundness']}) and is (ε, "
        f"δ)-differentially private with ε = {rounded_up(report['epsilon'])} at δ = "
        f"{report['delta']:g} (by PLD; {rounded_up(report['epsilon_rdp'])} by RDP). "
        f"Without the amplification by Poisson sampling {without_sampling}. "
        f"Unit: {report['unit']}. Neighbours: {report['neighbouring_relation']}. "
        f"{report['steps']} steps at rate q = {report['q']:.6g}; noise multipliers {multipliers}, "
        f"jointly {span(report['joint_multiplier'], 4)}; sums divided by {report['divisor']}, "
        f"{report['expected_batch_size']:g}."
    )


def _conditions(report: dict[str, Any]) -> list[str]:
    """Return on what the guarantee rests, as one text; nothing without an ε."""
    if report["epsilon"] is None:
        return []
    sampler, enlarged = report["sampler"], report["bound_inflation"]
    sentences = [
        report["steps_note"],
        f"The claim is {report['claim']}",
        f"Random numbers: {report['random_generator']}",
        f"ε includes {2 * sampler['epsilon_s']:.1e} for the distance of the {sampler['pairs']} "
        "pairs of drawn numbers from Gaussian noise"
        if sampler["pairs"]
        else None,
        None
        if enlarged is None
        else f"The noise is enlarged by at most {100 * enlarged:.2g} % for the rounding of sums",
        report["independence"],
        f"The ledger covers {report['ledger_covers']}",
    ]
    return [" ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)]


def _version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
