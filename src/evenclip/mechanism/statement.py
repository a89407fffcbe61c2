"""The privacy report: all facts needed to judge an ε, as plain values and as text.

The fields are those that regulators and TF-Privacy's privacy statements require: trust model, unit,
neighbouring relation, what is covered and what is not, ε and δ with their accountant, every
constant of the mechanism, and the soundness of the method; and those of the release itself: the
generator, how far its noise may be from Gaussian noise, and what the rounding of sums adds.

*What happened in training is not in it.* Exact counts of empty batches, of samples without a finite
gradient and of clamped weights are functions of the records without noise, and so is the one bit
whether a count is 0. They are private: see `evenclip.training.trace.events`. The soundness of a
rule is therefore a property of its class, and the report says that the bound is enforced, not how
often that was needed.

*Stopping early.* Whether a run is stopped may depend on its results. So ε is that of all steps that
were drawn, and of those that the run would have taken up to the declared number. Draws that were
repeated do not stand for declared steps. Those of other attempts do only if these continued the
run (`evenclip.mechanism.declared`).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from evenclip.mechanism.correction import SamplerError, Terms
from evenclip.mechanism.declared import not_drawn, open_declarations, unmet
from evenclip.mechanism.grid import inflation
from evenclip.mechanism.noise import C
from evenclip.mechanism.paragraph import paragraph, span
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
    "preprocessing, balancing and splitting of the data, except where a record's place depends "
    "on that record alone",
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
ENFORCEMENT = "on every weight, before the sum; how often that was needed is private"
ENCODER = (
    "ε holds for the encoder as given. Scaling, vocabularies and names that were fitted on the "
    "records or read from them move the input of every record, and ε does not cover that. Released "
    "figures, tuning and parallel composition need an encoder that is declared or fitted privately"
)
DECLARED = (
    "ε holds for the encoder as given, which is declared: the trainer states that every kind, "
    "range, category and name in its schema is public"
)
DURABLE = "all attempts: every step was on disk in the ledger before it was taken"
NOT_DURABLE = "this attempt only: steps of an attempt that was interrupted may be missing"


@dataclass(frozen=True)
class Facts:
    """How a run was computed, as far as its report states it.

    Attributes:
        tf32: whether operands of products were rounded to TF32.
        uncovered: further uses of the data that ε does not cover.
        independence: why a sample's gradient does not depend on the other samples, as a sentence.
        company: whether the last bits of a sample's numbers do, as a sentence.
        rounding: ρ, by which the rounding of a sum exceeds the sensitivity; None if unknown.
        durable: whether each step was on disk in the ledger before it was taken.
        remaining: ledger entries, as plain values, of the declared steps that this attempt and the
            ones before it have not taken; None if they are not known.
        first_steps: the number of steps that was declared at first; None if it is not known.
    """

    tf32: bool = False
    uncovered: tuple[str, ...] = ()
    independence: str | None = None
    company: str | None = None
    rounding: float | None = None
    durable: bool = False
    remaining: Sequence[Mapping[str, Any]] | None = None
    first_steps: int | None = None


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
        return unmet(ledger, [Ledger.from_json(facts.remaining)])
    last, missing = ledger.entries[-1], list[Entry]()
    for multipliers, steps in not_drawn(settings.rule, settings.steps, ledger).items():
        entry = Entry(last.q, multipliers, steps, last.sizes, last.tau)
        missing.append(replace(entry, lam=last.lam, beta=last.beta))
    return Ledger(missing)


def report(settings: Settings, ledger: Ledger, facts: Facts | None = None) -> dict[str, Any]:
    """Return the report of one run as values that JSON can hold; ε is None if none is valid.

    Args:
        settings: constants of the run.
        ledger: its releases.
        facts: how it was computed.
    """
    facts = facts or Facts()
    return {
        **_scope(settings, facts.uncovered),
        **encoder(None),
        **_epsilons(settings, ledger, facts),
        **_method(settings.rule),
        **_steps(settings, ledger, facts),
        "q": settings.q,
        "n": settings.n,
        "expected_batch_size": settings.B,
        **_release(settings, ledger, facts),
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


def encoder(declared: bool | None) -> dict[str, Any]:
    """Return what the report says of the encoder, by which raw records become inputs.

    Args:
        declared: whether it was declared without reading the records; None if it is not known.
    """
    return {"encoder": DECLARED if declared else ENCODER, "encoder_declared": declared}


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
            "counts of empty batches, of samples without a finite gradient and of clamped weights",
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


def _method(rule: Rule) -> dict[str, Any]:
    """Return the rule and its soundness, which depends on no record."""
    return {
        "method": rule.name,
        "rule": repr(rule),
        "soundness": soundness(rule),
        "bound_enforced": None if rule.soundness == NO_EPSILON else ENFORCEMENT,
        "why_no_epsilon": rule.why if rule.soundness == NO_EPSILON else None,
        "reference": rule.reference,
        "group_labels_entered_training": rule.uses_groups,
        "divisor": "the public expected batch size" if rule.poisson else "the size of the batch",
        "poisson_sampling": rule.poisson,
    }


def _steps(settings: Settings, ledger: Ledger, facts: Facts) -> dict[str, Any]:
    """Return the steps that were declared and drawn, and the runs that drew them."""
    left, kept = remaining(settings, ledger, facts), Ledger()
    if left.entries:
        known = None if facts.remaining is None else [Ledger.from_json(facts.remaining)]
        kept = left if known is None else open_declarations(ledger, known)
    parents = dict.fromkeys(entry.parent for entry in ledger.entries if entry.parent is not None)
    return {
        **_multipliers(Ledger.joined(ledger, left)),
        "steps": ledger.steps,
        "declared_steps": settings.steps,
        "first_declared_steps": facts.first_steps or settings.steps,
        "reserved_steps": sum(entry.steps for entry in ledger.entries if entry.reserved),
        "remaining": kept.to_json(),
        "steps_note": _steps_note(settings, ledger, left, facts) if ledger.is_private else None,
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


def _steps_note(settings: Settings, ledger: Ledger, rest: Ledger, facts: Facts) -> str | None:
    """Return which steps ε belongs to, if they are not exactly those declared at first."""
    drawn, planned, left = ledger.steps, settings.steps, rest.steps
    first = facts.first_steps or planned
    if drawn and first < planned:
        return (
            f"{first} steps were declared at first, and the run was extended to {planned}; "
            f"{drawn} were drawn and {left} not taken; ε is that of all {drawn + left}, not of the "
            "steps that were declared at first"
        )
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
        "company": facts.company,
        "ledger_covers": DURABLE if facts.durable else NOT_DURABLE,
    }


def _version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
