"""One entry of the ledger: consecutive equal steps, checked, and as plain values.

All releases of one step use the same Poisson batch. A later release may depend on the noisy value
of an earlier one, and on no other result of the step. Together they are one sampled Gaussian
mechanism with the joint multiplier (Σ_j m_j⁻²)^(-1/2). Proof: stack the values, each divided by its
sensitivity and multiplied by m_j⁻¹. One record moves this vector by at most (Σ_j m_j⁻²)^(1/2),
under unit noise, and adaptivity does not change the guarantee of a Gaussian mechanism (Dong, Roth,
Su 2022, "Gaussian differential privacy").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

from evenclip.arguments import check_fields
from evenclip.mechanism.noise import BETA, LAMBDA

__all__ = [
    "BETA", "LAMBDA", "Entry", "Parent", "check_entry", "entry_of", "joint_multiplier", "read",
    "row", "short",
]  # fmt: skip

T = TypeVar("T")

_MOST_NUMBERS = 2**53  # in one release
_SQUARABLE = 1e-100  # a smaller multiplier has a square that is 0

Parent = tuple[str, int]  # (run id, index of a draw)


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """Return (Σ_j m_j⁻²)^(-1/2), the multiplier of several releases on one batch taken as one.

    It is 0 if any of the multipliers is 0.

    >>> joint_multiplier([3.0, 4.0])
    2.4
    >>> joint_multiplier([])
    inf
    """
    # float(): dp-accounting silently drops multipliers that are integers or numpy numbers.
    values = [float(m) for m in multipliers]
    if not all(m > 0 for m in values):  # in clear, or no multiplier at all
        return 0.0
    if values and min(values) < _SQUARABLE:
        return min(values) / math.sqrt(len(values))  # a lower bound, as Σ_j m_j⁻² ≤ k·min⁻²
    precision = sum(m**-2 for m in values)
    return math.inf if precision == 0 else precision**-0.5


@dataclass(frozen=True)
class Entry:
    """Consecutive steps with the same releases and the same multipliers.

    Attributes:
        q: Poisson rate of the batches; None if the batches were not Poisson samples, so that no ε
            can be stated.
        multipliers: name of each release of a step -> noise standard deviation ÷ sensitivity; 0 is
            a release in clear.
        steps: number of consecutive steps.
        sizes: name of each release -> how many numbers it has; empty for ideal Gaussian noise, as
            in ledgers made by hand.
        tau: probability that a batch has more records than the bound on rounding assumes, per step.
        run: id of the run, a hash of its key; "" for a ledger made by hand, whose steps are always
            distinct.
        first: index of the first step's draw.
        parent: (run id, index of the draw) of the checkpoint that the run started from.
        reserved: whether the steps were written ahead and may not have been taken. They count.
        lam: λ of the sampler of the noise.
        beta: β of the sampler of the noise.
    """

    q: float | None
    multipliers: tuple[tuple[str, float], ...]
    steps: int = 1
    sizes: tuple[tuple[str, int], ...] = ()
    tau: float = 0.0
    run: str = ""
    first: int = 0
    parent: Parent | None = None
    reserved: bool = False
    lam: float = LAMBDA
    beta: float = BETA

    @property
    def joint(self) -> float:
        """The multiplier of all releases of one step taken as one."""
        return joint_multiplier(m for _, m in self.multipliers)

    @property
    def is_private(self) -> bool:
        """Whether these steps have an ε: Poisson batches, and noise on every released value."""
        return self.q is not None and self.joint > 0

    @property
    def pairs(self) -> int:
        """Pairs of draws in all these steps: each release draws its numbers two at a time."""
        return self.steps * sum((size + 1) // 2 for _, size in self.sizes)

    @property
    def end(self) -> int:
        """The index after that of the last step's draw."""
        return self.first + self.steps

    @property
    def release(self) -> tuple[Any, ...]:
        """Everything about a step except its place and whether it was taken."""
        sampler = (self.lam, self.beta) if self.sizes else ()
        return self.q, dict(self.multipliers), dict(self.sizes), self.tau, self.parent, sampler

    def is_same_release(self, other: Entry) -> bool:
        """Return whether a step of both is the same release, apart from its place."""
        return self.release == other.release

    def continues(self, last: Entry) -> bool:
        """Return whether these steps follow those of `last` directly and are like them."""
        follows = self.run == last.run and (not self.run or self.first == last.end)
        return follows and self.reserved == last.reserved and self.is_same_release(last)


# --- plain values ---------------------------------------------------------------------------------


def entry_of(
    q: float | None,
    multipliers: Mapping[str, float],
    steps: int = 1,
    *,
    sizes: Iterable[tuple[str, int]] = (),
    **rest: Any,
) -> Entry:
    """Return an entry with Python's numbers; dp-accounting silently drops other numbers."""
    return Entry(
        None if q is None else float(q),
        tuple((name, float(m)) for name, m in multipliers.items()),
        steps,
        tuple((name, int(size)) for name, size in sizes),
        **rest,
    )


def row(entry: Entry) -> dict[str, Any]:
    """Return an entry as plain values, without fields at their defaults."""
    values: dict[str, Any] = {"q": entry.q, "multipliers": dict(entry.multipliers)}
    values["steps"] = entry.steps
    if entry.sizes:
        values |= {"sizes": dict(entry.sizes), "lam": entry.lam, "beta": entry.beta}
    if entry.tau:
        values["tau"] = entry.tau
    if entry.run:
        values |= {"run": entry.run, "first": entry.first}
    if entry.parent is not None:
        values["parent"] = list(entry.parent)
    return values | ({"reserved": True} if entry.reserved else {})


def read(given: Any, place: str) -> Entry:
    """Return the entry that `row` wrote; `place` is its name in messages.

    Raises:
        ValueError: a field is missing, unknown, or not of its kind.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is {short(given)}; it must be an object with q and multipliers.")
    missing = [name for name in ("q", "multipliers", "steps") if name not in given]
    unknown = [name for name in given if name not in Entry.__dataclass_fields__]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"the unknown field {unknown[0]!r}"
        raise ValueError(
            f"{place} has {what}; give a ledger as this version of evenclip writes it."
        )
    q, reserved = given["q"], given.get("reserved", False)
    run, parent = given.get("run", ""), given.get("parent")
    if not isinstance(reserved, bool):
        raise _wrong(place, "reserved", reserved, "true or false")
    if not isinstance(run, str):
        raise _wrong(place, "run", run, "a text")
    if not given["multipliers"]:
        raise _wrong(place, "multipliers", given["multipliers"], "at least one release's")
    if not isinstance(q, bool) and q == 0:
        raise _wrong(place, "q", q, "a Poisson rate above 0; no run draws empty batches only")
    if not isinstance(given["steps"], bool) and given["steps"] == 0:
        raise _wrong(place, "steps", 0, "a whole number of at least 1")
    for name, least in (("lam", LAMBDA), ("beta", BETA)):
        if name in given and _number(given[name], place, name) < least:
            raise _wrong(place, name, given[name], f"{least:.3g} or more, as of every sampler")
    sizes = _pairs(given.get("sizes", {}), place, "sizes", _whole)
    if any(not 0 < size <= _MOST_NUMBERS for _, size in sizes):
        raise _wrong(place, "sizes", given["sizes"], f"from 1 to {_MOST_NUMBERS} numbers each")
    return Entry(
        None if q is None else _number(q, place, "q"),
        _pairs(given["multipliers"], place, "multipliers", _number),
        _whole(given["steps"], place, "steps"),
        sizes,
        _number(given.get("tau", 0.0), place, "tau"),
        run,
        _whole(given.get("first", 0), place, "first"),
        None if parent is None else _parent(parent, place),
        reserved,
        _number(given.get("lam", LAMBDA), place, "lam"),
        _number(given.get("beta", BETA), place, "beta"),
    )


def check_entry(entry: Entry, place: str) -> None:
    """Raise a ValueError if the entry has a value that no step can have."""
    if not isinstance(entry, Entry):
        raise ValueError(f"{place} is {short(entry)}; it must be an Entry.")
    try:
        check_fields(Entry, entry)
    except TypeError as error:
        raise ValueError(f"{place}: {error}") from error
    if entry.q is not None and not 0 <= entry.q <= 1:
        raise _wrong(place, "q", entry.q, "a Poisson rate, from 0 to 1, or null")
    if len(dict(entry.multipliers)) < len(entry.multipliers):
        raise _wrong(place, "multipliers", entry.multipliers, "one for each release")
    for name, m in entry.multipliers:
        if not 0 <= m < math.inf:
            raise _wrong(place, f"multiplier {name!r}", m, "a finite number of at least 0")
    for name, size in (*entry.sizes, ("steps", entry.steps), ("first", entry.first)):
        if not _is_whole(size) or size < 0:
            raise _wrong(place, name, size, "a whole number of at least 0")
    for name, value in (("tau", entry.tau), ("lam", entry.lam), ("beta", entry.beta)):
        if not 0 <= value < 1:
            raise _wrong(place, name, value, "a number of at least 0 and below 1")
    sizes = dict(entry.sizes)
    absent = [name for name, _ in entry.multipliers if sizes and name not in sizes]
    if absent:
        raise ValueError(
            f"{place} has sizes, but none of the release {absent[0]!r}; give the size of each."
        )


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or float(value).is_integer()


def short(value: Any) -> str:
    """Return a value as text, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a huge number, or nested too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _wrong(place: str, name: str, given: Any, expected: str) -> ValueError:
    return ValueError(f"{place} has {name} = {short(given)}; it must be {expected}.")


def _number(given: Any, place: str, name: str) -> float:
    """Return a number of JSON as a float."""
    if isinstance(given, bool | str) or not isinstance(given, Real):
        raise _wrong(place, name, given, "a number")
    try:
        return float(given)
    except OverflowError:
        raise _wrong(place, name, given, "a number") from None


def _whole(given: Any, place: str, name: str) -> int:
    """Return a whole number of JSON."""
    value = _number(given, place, name)
    if not math.isfinite(value) or value != int(value):
        raise _wrong(place, name, given, "a whole number of at least 0")
    return int(given)


def _pairs(
    given: Any, place: str, name: str, value: Callable[[Any, str, str], T]
) -> tuple[tuple[str, T], ...]:
    """Return an object of JSON as pairs of a name and a checked value."""
    if not isinstance(given, Mapping):
        raise _wrong(place, name, given, "an object of names and numbers")
    return tuple((str(key), value(v, place, f"{name}[{key!r}]")) for key, v in given.items())


def _parent(given: Any, place: str) -> Parent:
    """Return the checkpoint that a run started from."""
    pair = list(given) if isinstance(given, list | tuple) else []
    if len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
        raise _wrong(place, "parent", given, "a run id and the index of a draw")
    index = _whole(pair[1], place, "parent")
    if index < 0:
        raise _wrong(place, "parent", given, "a run id and the index of a draw")
    return pair[0], index
