"""Steps that were declared and not taken, which ε covers too.

A run declares its number of steps before anything of it is seen. Whether it is stopped may depend
on its results, so stopping saves nothing. A *declaration* is what a run says at one draw: the steps
that it will still take. A run may make several, in checkpoints, journals and reports; each stays
true, so the largest rest counts. Of a run that made no draw, nothing was seen, and nothing counts.

A branch continues the run that it was resumed from: its steps, taken or declared, stand for steps
that the run declared and did not take, if they are the same releases. Each stands for one step of
each run before it at most. So a run that was killed and resumed costs what its attempts drew, and
at least what it declared. Formally, the steps are a partial order (a branch is after its parent),
and the price is the least number of chains with at most one step that was taken, at its end. A
chain without some of its steps is a chain, so a further ledger or declaration never lowers the
price (`tests/attacks/test_lost_declarations.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeGuard

from evenclip.mechanism.entry import Entry, Parent
from evenclip.mechanism.ledger import Ledger
from evenclip.rules import Rule

__all__ = ["covered", "not_drawn", "open_declarations", "undeclared", "unmet"]

_Rest = dict[str, Counter[Entry]]  # run -> release -> steps


def covered(ledger: Ledger, declared: Iterable[Ledger]) -> Ledger:
    """Return the ledger with the declared steps that count too.

    Args:
        ledger: all steps that were taken or written ahead.
        declared: declarations, each as the entries of the steps that were still to be taken.
    """
    return Ledger.joined(ledger, unmet(ledger, declared))


def unmet(ledger: Ledger, declared: Iterable[Ledger]) -> Ledger:
    """Return the declared steps that were not taken and that no branch stands for.

    >>> whole = Entry(0.01, (("gradient", 1.0),), 100, run="a")
    >>> early = Ledger([replace(whole, steps=30)])
    >>> unmet(early, [Ledger([whole])]).steps
    70
    >>> branch = Entry(0.01, (("gradient", 1.0),), 80, run="b", parent=("a", 20))
    >>> unmet(Ledger.union(early, Ledger([branch])), [Ledger([whole])]).steps
    0

    Raises:
        ValueError: two declarations contradict each other.
    """
    declared = list(declared)
    rest, parents = _rest(ledger, declared), _parents(ledger, declared)
    return _placed(ledger, _left(ledger, rest, parents), parents)


def open_declarations(ledger: Ledger, declared: Iterable[Ledger]) -> Ledger:
    """Return the declarations to keep with a ledger, so that `unmet` of both stays the same.

    Those of runs without a draw are kept, because their draws may be in another ledger.
    """
    declared = list(declared)
    rest, parents = _rest(ledger, declared), _parents(ledger, declared)
    left, kept = _left(ledger, rest, parents), defaultdict[str, Counter[Entry]](Counter)
    for run, kinds in left.items():
        kept[run] = Counter({kind: rest[run][kind] for kind in kinds})
    drawn = {entry.run for entry in ledger.entries}
    for run, kinds in _rest(ledger, declared, drawn=False).items():
        if run not in drawn:
            kept[run] = kinds
    return _placed(ledger, kept, parents)


def undeclared(ledger: Ledger, runs: Iterable[str], stated: Collection[str]) -> list[str]:
    """Return those of the runs whose declared number of steps cannot be known.

    A run before a branch needs no declaration: the branch declares at least as many steps.

    Args:
        ledger: steps of all runs.
        runs: which runs need a declaration.
        stated: the runs that have one.
    """
    parents, known = _parents(ledger, []), set(stated)
    for run in stated:
        known.update(_before(run, parents))
    return sorted({run for run in runs if run and run not in known})


def not_drawn(rule: Rule, steps: int, ledger: Ledger) -> Counter[tuple[tuple[str, float], ...]]:
    """Return multipliers of a step -> how many steps like it were declared and not drawn."""
    last = ledger.entries[-1]
    if type(rule).multipliers is Rule.multipliers:  # all steps are alike
        return +Counter({last.multipliers: steps - ledger.steps})
    names = [name for name, _ in last.multipliers]
    planned = Counter(
        tuple((name, float(given[name])) for name in names)
        for given in (rule.multipliers(t) for t in range(steps))
    )
    drawn = Counter[tuple[tuple[str, float], ...]]()
    for entry in ledger.entries:
        drawn[entry.multipliers] += entry.steps
    return planned - drawn


def _rest(ledger: Ledger, declared: Iterable[Ledger], *, drawn: bool = True) -> _Rest:
    """Return how many declared steps each run has not taken, by the largest declaration.

    Steps without a run are not known to be the same in two declarations, so they add up.

    Args:
        ledger: the steps that were taken.
        declared: the declarations.
        drawn: whether to leave out runs without a draw.
    """
    taken = defaultdict[str, list[Entry]](list)
    for entry in ledger.entries:
        taken[entry.run].append(entry)
    rest = defaultdict[str, Counter[Entry]](Counter)
    for declaration in declared:
        for run, entries in _by_run(declaration).items():
            if not run:
                for entry in entries:
                    rest[run][_kind(entry)] += entry.steps
            elif taken[run] or not drawn:
                first = min(entry.first for entry in entries)
                steps = _steps(entries)
                steps.subtract(_steps(_from(first, taken[run])))
                rest[run] |= +Counter({kind: steps[kind] for kind in steps})
    return rest


def _left(ledger: Ledger, rest: _Rest, parents: Mapping[str, Parent | None]) -> _Rest:
    """Return the part of the rest that no branch stands for, without zeros."""
    taken = {run: _steps(entries) for run, entries in _by_run(ledger).items()}
    runs = sorted(
        {*taken, *rest, *(parent[0] for parent in parents.values() if parent)},
        key=lambda run: len(_before(run, parents)),
        reverse=True,
    )  # branches before the runs that they continue
    chains = defaultdict[str, Counter[Entry]](Counter)  # of all branches of a run
    left: _Rest = {}
    for run in runs:
        left[run] = rest.get(run, Counter[Entry]()) - chains[run]
        parent = parents.get(run)
        if _is_link(parent):
            own = (rest.get(run, Counter[Entry]()) | chains[run]) + taken.get(run, Counter[Entry]())
            chains[parent[0]] += own
    return {run: kinds for run, kinds in left.items() if kinds}


def _placed(ledger: Ledger, rest: _Rest, parents: Mapping[str, Parent | None]) -> Ledger:
    """Return steps as entries after the last draws of their runs."""
    placed = Ledger()
    for run in sorted(rest):
        first = ledger.end_of(run) if run else 0
        for kind, steps in rest[run].items():
            placed.entries.append(
                replace(kind, steps=steps, run=run, first=first, parent=parents.get(run))
            )
            first += steps if run else 0
    return placed


def _parents(ledger: Ledger, declared: Iterable[Ledger]) -> dict[str, Parent | None]:
    """Return run -> what it branches off; raise if a declaration states another one."""
    parents: dict[str, Parent | None] = {}
    for entry in (*ledger.entries, *(e for one in declared for e in one.entries)):
        if entry.run and parents.setdefault(entry.run, entry.parent) != entry.parent:
            raise ValueError(
                f"Run {entry.run} has two different parents, and one run has one; one of the "
                "ledgers is damaged or forged."
            )
    return parents


def _before(run: str, parents: Mapping[str, Parent | None]) -> list[str]:
    """Return the runs that a run continues, the nearest first."""
    before: list[str] = []
    parent = parents.get(run)
    while _is_link(parent) and parent[0] not in before:
        before.append(parent[0])
        parent = parents.get(parent[0])
    return before


def _is_link(parent: Parent | None) -> TypeGuard[Parent]:
    """Return whether a branch continues a draw of its parent, whose ledger is then needed too."""
    return parent is not None and parent[1] > 0


def _by_run(ledger: Ledger) -> dict[str, list[Entry]]:
    """Return run -> its entries."""
    by_run = defaultdict[str, list[Entry]](list)
    for entry in ledger.entries:
        by_run[entry.run].append(entry)
    return by_run


def _from(first: int, entries: Iterable[Entry]) -> list[Entry]:
    """Return the steps from a draw on."""
    return [
        replace(entry, first=max(entry.first, first), steps=entry.end - max(entry.first, first))
        for entry in entries
        if entry.end > first
    ]


def _steps(entries: Iterable[Entry]) -> Counter[Entry]:
    """Return release -> number of steps."""
    steps = Counter[Entry]()
    for entry in entries:
        steps[_kind(entry)] += entry.steps
    return steps


def _kind(entry: Entry) -> Entry:
    """Return the release of one step, without its place."""
    multipliers, sizes = tuple(sorted(entry.multipliers)), tuple(sorted(entry.sizes))
    return Entry(entry.q, multipliers, 1, sizes, entry.tau, lam=entry.lam, beta=entry.beta)
