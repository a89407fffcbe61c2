"""The ledger of releases: what every step released, with how much noise, drawn by which sampler.

Every step of a run has a place: the run's id and the index of its draw. Noise and batches are
functions of the two, so a place belongs to one release, in however many ledgers it occurs. `union`
counts it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from evenclip import check
from evenclip.arguments import check_kinds, shown
from evenclip.mechanism.entry import (
    BETA,
    LAMBDA,
    Entry,
    Parent,
    check_entry,
    entry_of,
    joint_multiplier,
    read,
    row,
    short,
)

__all__ = ["BETA", "LAMBDA", "Entry", "Ledger", "joint_multiplier"]


@dataclass
class Ledger:
    """Every release of a run, in order. `evenclip.mechanism.accounting` computes ε from it.

    >>> ledger = Ledger()
    >>> for _ in range(3):
    ...     ledger.write(0.01, {"count": 10.0, "gradient": 1.0})
    >>> ledger.steps, len(ledger.entries)
    (3, 1)
    >>> Ledger.from_json(ledger.to_json()) == ledger
    True
    """

    entries: list[Entry] = field(default_factory=list)

    def write(
        self,
        q: float | None,
        multipliers: Mapping[str, float],
        sizes: Mapping[str, int] | Iterable[tuple[str, int]] = (),
        tau: float = 0.0,
        run: str = "",
        index: int | None = None,
        parent: Parent | None = None,
    ) -> None:
        """Add one step: its releases had these multipliers, on one batch drawn at rate q.

        A step that is reserved becomes a taken one, and a step that is repeated exactly is not
        added again.

        Args:
            q: Poisson rate of the batch.
            multipliers: name of each release -> multiplier.
            sizes: name of each release -> how many numbers it has.
            tau: probability that the batch has more records than assumed.
            run: id of the run; "" for a ledger made by hand.
            index: index of the draw; by default the one after the run's last.
            parent: checkpoint that the run started from.

        Raises:
            ValueError: the run has another step at this index.
        """
        check_kinds(Ledger.write, locals())
        check.finite(tau=tau, **({} if q is None else {"q": q}))
        entry = entry_of(q, multipliers, sizes=_sizes(sizes), tau=tau, run=run, parent=parent)
        if run:
            entry = replace(entry, first=self.end_of(run) if index is None else int(index))
        check_entry(entry, "The step")
        self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add the steps of an entry, as `write` does."""
        if not entry.run or entry.first >= self.end_of(entry.run):
            _append(self.entries, entry)
        else:
            others = [other for other in self.entries if other.run != entry.run]
            mine = [other for other in self.entries if other.run == entry.run]
            self.entries = [*others, *_joined([*mine, entry])]

    def end_of(self, run: str) -> int:
        """Return the index after the last draw of a run; 0 if it has none."""
        if self.entries and self.entries[-1].run == run:  # entries of a run are in order
            return self.entries[-1].end
        return max((entry.end for entry in self.entries if entry.run == run), default=0)

    @staticmethod
    def union(*ledgers: Ledger) -> Ledger:
        """Return every step of the ledgers once, runs in the order of their ids.

        A step is known by its run and the index of its draw. Of two branches of one checkpoint the
        common steps count once. A step that is reserved in one ledger and taken in another is
        taken. Steps without a run were made by hand and always add up.

        >>> common = Entry(0.01, (("gradient", 1.0),), 100, run="a")
        >>> branch = Entry(0.01, (("gradient", 1.0),), 50, run="b", parent=("a", 100))
        >>> Ledger.union(Ledger([common]), Ledger([common, branch])).steps
        150

        Raises:
            ValueError: two ledgers contradict each other, the steps before a branch are missing, or
                two runs are resumed from each other.
        """
        union = Ledger.joined(*ledgers)
        _check_parents(union.entries)
        return union

    @staticmethod
    def joined(*ledgers: Ledger) -> Ledger:
        """Return every step of the ledgers once, as `union` does, also if others are missing."""
        by_run: dict[str, list[Entry]] = defaultdict(list)
        for ledger in ledgers:
            for entry in ledger.entries:
                by_run[entry.run].append(entry)
        joined: list[Entry] = []
        for entry in by_run.pop("", []):
            _append(joined, entry)
        for run in sorted(by_run):
            joined += _joined(by_run[run])
        return Ledger(joined)

    @property
    def steps(self) -> int:
        """Number of steps, reserved ones included."""
        return sum(entry.steps for entry in self.entries)

    @property
    def is_private(self) -> bool:
        """Whether an ε can be stated for all entries."""
        return all(entry.is_private for entry in self.entries)

    def check(self) -> None:
        """Raise a ValueError for a value that no step can have."""
        for number, entry in enumerate(self.entries, 1):
            check_entry(entry, f"Entry {number} of the ledger")

    def check_whole(self) -> None:
        """Raise a ValueError unless every run has its draws from 0 on, and its parent's.

        A run draws without gaps, so a draw that is missing was left out.
        """
        _check_parents(self.entries)
        held = _held(self.entries)
        for entry in self.entries:
            if entry.run and entry.end > held[entry.run]:
                raise ValueError(
                    f"Draw {held[entry.run]} of run {entry.run} is missing, and later ones are "
                    "there. A run draws from 0 on without gaps; give the ledger that holds the "
                    "draw too."
                )

    def to_json(self) -> list[dict[str, Any]]:
        """Return the entries as plain values, without the fields that are at their defaults."""
        return [row(entry) for entry in self.entries]

    @staticmethod
    def from_json(rows: Iterable[Mapping[str, Any]]) -> Ledger:
        """Return the ledger that `to_json` wrote.

        Raises:
            ValueError: a value is damaged or out of range; the message says which.
        """
        if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
            raise ValueError(f"A ledger is a list of entries, and this is {short(rows)}.")
        ledger = Ledger(
            [read(given, f"Entry {i} of the ledger") for i, given in enumerate(rows, 1)]
        )
        ledger.check()
        return ledger


# --- joining --------------------------------------------------------------------------------------


def _sizes(sizes: Mapping[str, int] | Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """Return the size of each release; raise unless there is a pair of name and size for each."""
    pairs = list(sizes.items() if isinstance(sizes, Mapping) else sizes)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"sizes is {shown(sizes)}; it must be a dict of the size of each release, or pairs of "
            "name and size."
        )
    for name, size in pairs:
        check.natural(**{f"sizes[{name!r}]": size})
    return pairs


def _append(entries: list[Entry], entry: Entry) -> None:
    """Add an entry; if its steps continue the last entry's, lengthen that one."""
    if entries and entry.continues(entries[-1]):
        entries[-1] = replace(entries[-1], steps=entries[-1].steps + entry.steps)
    else:
        entries.append(entry)


def _joined(entries: Sequence[Entry]) -> list[Entry]:
    """Return every step of one run once, in order, in as few entries as possible."""
    waiting = sorted((e for e in entries if e.steps), key=lambda e: e.first, reverse=True)
    ends = sorted({index for e in waiting for index in (e.first, e.end)})
    joined: list[Entry] = []
    active: list[Entry] = []  # entries that hold the steps from `left` to `right`
    for left, right in pairwise(ends):
        active = [entry for entry in active if entry.end > left]
        while waiting and waiting[-1].first == left:
            active.append(waiting.pop())
        if active:
            _append(joined, _common(active, left, right))
    return joined


def _common(entries: Sequence[Entry], left: int, right: int) -> Entry:
    """Return the steps from `left` to `right`, which all of the entries hold."""
    one = entries[0]
    for other in entries[1:]:
        if not one.is_same_release(other):
            a, b = one.release, other.release
            names = ("q", "multipliers", "sizes", "tau", "parent", "sampler")
            name, this, that = next(
                (n, x, y) for n, x, y in zip(names, a, b, strict=True) if x != y
            )
            raise ValueError(
                f"Draw {left} of run {one.run} has {name} = {this} in one ledger and {that} in "
                "another, and one key makes one step; one of the ledgers is damaged or forged."
            )
    taken = not all(entry.reserved for entry in entries)
    return replace(one, first=left, steps=right - left, reserved=not taken)


def _held(entries: Sequence[Entry]) -> dict[str, int]:
    """Return run -> number of its draws from 0 on without a gap; entries of a run are in order."""
    held: dict[str, int] = defaultdict(int)
    for entry in entries:
        if entry.first <= held[entry.run]:
            held[entry.run] = max(held[entry.run], entry.end)
    return held


def _check_parents(entries: Sequence[Entry]) -> None:
    """Raise unless all steps that a branch started from are there, and no run began with itself."""
    held, parents = _held(entries), dict[str, set[str]]()
    for entry in entries:
        if entry.parent is None:
            continue
        run, index = entry.parent
        parents.setdefault(entry.run, set()).add(run)
        if held[run] < index:
            raise ValueError(
                f"Run {entry.run} was resumed from draw {index} of run {run}, and the ledgers "
                f"hold only {held[run]} of those draws; give the ledger of run {run} too."
            )
    for run in parents:
        if run in _ancestors(run, parents):
            raise ValueError(
                f"Run {run} was resumed from itself, by way of its parents, and no run is; one of "
                "the ledgers is damaged or forged."
            )


def _ancestors(run: str, parents: Mapping[str, set[str]]) -> set[str]:
    """Return all runs that a run goes back to."""
    known: set[str] = set()
    waiting = [run]
    while waiting:
        new = parents.get(waiting.pop(), set()) - known
        known |= new
        waiting += new
    return known
