"""Ledgers in files: those of `evenclip epsilon A B`, and what is known about each.

A run that was stopped, also by a kill, may have been stopped because of its results. So the steps
that a file declares and that were not taken count, unless another file shows the branch that went
on with them. A file that declares nothing takes nothing back, so a further file never lowers ε.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenclip import files
from evenclip.arguments import shown
from evenclip.files import kinds, strict

if TYPE_CHECKING:
    from evenclip.mechanism.ledger import Ledger

__all__ = ["Held", "check_declared", "delta_of", "notes", "read", "remaining"]

_LARGEST = 2.0**53
_LISTED = {"published.json": kinds.CHECKPOINT, "result.json": kinds.RUN}
_EXPECTED = "give a privacy report, a checkpoint, a journal.jsonl, a stored result or a ledger"


@dataclass(frozen=True)
class Held:
    """What a file holds.

    Attributes:
        path: the file.
        ledger: its ledger, with the steps that were written ahead.
        remaining: declarations, each as the entries of the steps that were still to be taken.
        delta: its δ; None if it states none.
        declared: its number of declared steps; None if it states none.
        why: why its rule has no valid ε; None if that is not known to be so.
        lacks_journal: whether it is a checkpoint whose journal is gone.
        stated: the runs whose declared number of steps is in it.
        unfinished: the runs that may have been killed, so that their number of steps is needed.
    """

    path: Path
    ledger: Ledger
    remaining: tuple[Ledger, ...] = ()
    delta: float | None = None
    declared: int | None = None
    why: str | None = None
    lacks_journal: bool = False
    stated: frozenset[str] = frozenset()
    unfinished: frozenset[str] = frozenset()


def read(path: Path) -> Held:
    """Read a privacy report, a checkpoint, a folder of checkpoints, a journal, or a ledger.

    Raises:
        ValueError: the file cannot be read, or holds no ledger; the message names it.
    """
    from evenclip.training import checkpoint, journal

    if path.suffix == ".jsonl":
        _content(path)  # raises if there is none
        return _read_journal(path)
    if (path / "published.json").is_file():
        return _read_checkpoint(path)
    last = checkpoint.latest(path)
    if last is not None:
        return replace(_read_checkpoint(last), path=path)
    if (path / journal.NAME).is_file():
        return replace(read(path / journal.NAME), path=path)
    return _read_json(path)


def _read_checkpoint(path: Path) -> Held:
    """Read a checkpoint's published.json, and the journal beside the checkpoint."""
    from evenclip.mechanism.ledger import Ledger
    from evenclip.training import journal

    held = _read_json(path / "published.json")
    kept = strict.loads(_content(path / "published.json")).get("journal")
    try:
        is_there = journal.check_fingerprint(path, kept)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path / 'published.json'} has journal = {kept!r}; it must be the length and digest "
            "of a journal. Bring the file back from a copy."
        ) from error
    beside = _read_journal(path.parent / journal.NAME)
    known = _runs(beside.ledger)  # how far they came is in the journal
    own = [entry for entry in held.ledger.entries if not (entry.reserved and entry.run in known)]
    return replace(
        held,
        path=path,
        ledger=Ledger.joined(Ledger(own), beside.ledger),
        remaining=(*held.remaining, *beside.remaining),
        why=held.why or beside.why,
        lacks_journal=not is_there,
        stated=held.stated | beside.stated,
        unfinished=beside.unfinished,
    )


def _read_journal(path: Path) -> Held:
    """Read a journal, and what its runs declare; of one that does not exist, nothing."""
    from evenclip.training import journal

    ledger, declared = journal.read_journal(path), journal.declarations(path)
    return Held(
        path,
        ledger,
        tuple(one.remaining for one in declared),
        declared=declared[-1].steps if declared else None,
        why=next((one.why_no_epsilon for one in declared if one.why_no_epsilon), None),
        stated=frozenset(one.run for one in declared),
        unfinished=_runs(ledger),
    )


def _runs(ledger: Ledger) -> frozenset[str]:
    """Return the runs of a ledger."""
    return frozenset(entry.run for entry in ledger.entries)


def _content(path: Path) -> str:
    """Return the content of a file, which is that of its folder's manifest, if it is in one."""
    listed = _LISTED.get(path.name)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not an ordinary file; {_EXPECTED}.")
    try:
        if listed is not None and (path.parent / files.MANIFEST).is_file():
            return files.read_folder(path.parent, listed, [path.name])[path.name].decode()
        return files.read(path).decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {_EXPECTED}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); {_EXPECTED}.") from error


def _read_json(path: Path) -> Held:
    """Read a privacy report, a checkpoint's published.json, a stored result, or a ledger."""
    content = _content(path)
    try:
        values = strict.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {_EXPECTED}.") from error
    if isinstance(values, dict) and "checksum" in values:
        values = files.unsealed(content.encode(), path, kinds.STATEMENT)
    facts: dict[str, Any] = values if isinstance(values, dict) else {"ledger": values}
    if not isinstance(facts.get("ledger"), list):
        raise ValueError(f"{path} holds no ledger; {_EXPECTED}.")
    settings = {} if facts.get("settings") is None else facts["settings"]
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: settings = {shown(settings)}; it must be an object.")
    delta = _number(facts.get("delta", settings.get("delta")))
    try:
        _check_stated(facts, settings)
        declared = _steps(facts.get("declared_steps", settings.get("steps")), "declared steps")
        ledger = _ledger(facts, declared)
        left = _remaining(facts, ledger, declared)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    stated = frozenset[str]() if declared is None else _runs(ledger)
    return Held(path, ledger, (left,), delta, declared, _why(facts, settings), stated=stated)


def _check_stated(facts: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise if a file states a δ that is none, or a soundness that is no text."""
    for place in (facts, settings):
        given = place.get("delta")
        known = _number(given)
        if given is not None and (known is None or not 0 < known < 1):
            raise ValueError(f"delta = {shown(given)}; it must lie above 0 and below 1.")
    soundness = facts.get("soundness")
    if not isinstance(soundness, str | None):
        raise ValueError(f"soundness = {shown(soundness)}; it must be a text.")


def _ledger(facts: dict[str, Any], declared: int | None) -> Ledger:
    """Return the ledger of a file and what was written ahead; raise if it lacks steps."""
    from evenclip.mechanism.ledger import Ledger

    ledger = Ledger.from_json(facts["ledger"])
    stated = _steps(facts.get("steps"), "steps")
    if stated is not None and stated != ledger.steps:
        raise ValueError(
            f"The ledger holds {ledger.steps} steps, and the file states {stated}; one of them is "
            "damaged. Give the file as it was written."
        )
    run, drawn = _place(facts.get("place"))
    if ledger.end_of(run) < drawn or (
        stated is None and run == "" and declared and not ledger.steps
    ):
        raise ValueError(
            f"The ledger holds {ledger.steps} steps, and the file is of a run with "
            f"{drawn or declared}; it is damaged. Give the file as it was written."
        )
    return Ledger.joined(ledger, Ledger.from_json(facts.get("reserved", [])))


def _remaining(facts: dict[str, Any], ledger: Ledger, declared: int | None) -> Ledger:
    """Return the declared steps that were not taken; like the last one, if none is listed."""
    from evenclip.mechanism.declared import covered
    from evenclip.mechanism.ledger import Ledger

    missing = 0 if declared is None else max(0, declared - ledger.steps)
    if "remaining" in facts:
        left = _placed(Ledger.from_json(facts["remaining"]), ledger)
        short = covered(ledger, [left]).steps < ledger.steps + missing
        if missing and ledger.is_private and short:
            raise ValueError(
                f"The file declares {declared} steps, and holds {ledger.steps} and {left.steps} "
                "that remain; it is damaged. Give the file as it was written."
            )
        return left
    if not (missing and ledger.entries):
        return Ledger()
    last = ledger.entries[-1]
    return Ledger([replace(last, first=last.end if last.run else 0, steps=missing)])


def _placed(left: Ledger, ledger: Ledger) -> Ledger:
    """Return declared steps after the draws of the run that declared them, if there is only one."""
    from evenclip.mechanism.ledger import Ledger

    runs = {entry.run: entry.parent for entry in ledger.entries}
    if len(runs) != 1 or any(entry.run for entry in left.entries):
        return left
    ((run, parent),) = runs.items()
    first = ledger.end_of(run) if run else 0
    return Ledger([replace(entry, run=run, first=first, parent=parent) for entry in left.entries])


def remaining(held: Sequence[Held], ledger: Ledger) -> Ledger:
    """Return the declared steps that were not taken and that no branch went on with.

    Args:
        held: all files.
        ledger: the union of their ledgers.
    """
    from evenclip.mechanism.declared import unmet

    return unmet(ledger, (left for one in held for left in one.remaining))


def check_declared(held: Sequence[Held], ledger: Ledger) -> None:
    """Raise if no file states how many steps a run of a journal declared."""
    from evenclip.mechanism.declared import undeclared

    stated = {run for one in held for run in one.stated}
    for one in held:
        unknown = undeclared(ledger, one.unfinished, stated)
        if unknown:
            raise ValueError(
                f"{one.path} does not state how many steps run {unknown[0]} declared, because an "
                "older version wrote it, and ε counts all declared steps; give the run's report "
                "or a checkpoint of it too."
            )


def delta_of(held: Sequence[Held]) -> float:
    """Return the δ that the files state; raise if it is not one."""
    stated = sorted({one.delta for one in held if one.delta is not None})
    if not stated:
        raise ValueError("The files state no δ; give --delta.")
    if len(stated) > 1:
        which = ", ".join(f"{delta:g}" for delta in stated)
        raise ValueError(f"The files state different values of δ ({which}); give --delta.")
    return stated[0]


def notes(held: Sequence[Held], ledger: Ledger) -> list[str]:
    """Return what a reader of the joint ε has to know about the files."""
    from evenclip.mechanism.declared import undeclared

    said, left = [], _runs(remaining(held, ledger))
    stated = {run for one in held for run in one.stated}
    for one in held:
        if left & _declaring(one.remaining):
            said.append(
                f"{one.path} declares {one.declared} steps and holds {one.ledger.steps}; the steps "
                "that were not taken count too, because stopping may depend on the results."
            )
        if one.lacks_journal:
            said.append(
                f"{one.path} has lost its journal; steps after the checkpoint may be missing."
            )
        if any(not entry.run for entry in one.ledger.entries):
            said.append(
                f"{one.path} has steps without a run id; they count in every file that has them."
            )
        if any(not entry.sizes for entry in one.ledger.entries):
            said.append(f"{one.path} has steps without sizes; their noise is taken as Gaussian.")
        if undeclared(ledger, _runs(one.ledger), stated):
            said.append(
                f"{one.path} does not state how many steps were declared; if the run was stopped "
                "early, give its report, its checkpoints or its journal too."
            )
    return list(dict.fromkeys(said))


def _declaring(remaining: Iterable[Ledger]) -> frozenset[str]:
    """Return the runs of declarations."""
    return frozenset(entry.run for one in remaining for entry in one.entries)


def _steps(value: Any, name: str) -> int | None:
    """Return a number of steps; None if there is none."""
    number = _number(value)
    if value is not None and (number is None or number < 0 or number != int(number)):
        raise ValueError(f"{name} = {value!r}; it must be a whole number of at least 0.")
    return None if number is None else int(number)


def _place(value: Any) -> tuple[str, int]:
    """Return the run of a checkpoint and its number of draws."""
    if value is None:
        return "", 0
    run, drawn = value if isinstance(value, list) and len(value) == 2 else (None, None)
    drawn = _steps(drawn, "draws")
    if not isinstance(run, str) or drawn is None:
        raise ValueError(f"place = {value!r}; it must be a run id and a number of draws.")
    return run, drawn


def _number(value: Any) -> float | None:
    """Return a finite number of JSON; None for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and abs(value) < _LARGEST else None


def _why(facts: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """Return why the rule of a file has no valid ε, if its ledger does not show it."""
    from evenclip.rules import NO_EPSILON, RULES

    if facts.get("soundness") == NO_EPSILON:
        return str(facts.get("why_no_epsilon") or facts.get("method"))
    rule = settings.get("rule")
    name = rule.get("name") if isinstance(rule, dict) else None
    known = RULES.get(name) if isinstance(name, str) else None
    return known.why if known is not None and known.soundness == NO_EPSILON else None
