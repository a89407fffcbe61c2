"""The journal of a checkpoint folder: ledger lines written ahead, so that no step can be lost.

    DIR/journal.jsonl       draws of all runs of the folder, before they are made   may be published
    DIR/digests-0.secret    keyed digests of what each step published, by rank      never share

Every line is sealed (`evenclip.files.seal`). Before the first draw of a block, the ledger entries
of the whole block are on the disk, marked as reserved. So if a process is killed, all steps that it
may have published are counted when the training is resumed; the reserved steps that it did not take
are counted too. A run that ends in order, also by Ctrl-C or by an exception, writes how far it
came, and the rest of its block is free again. Nothing is flushed between two blocks, so that this
takes no noticeable time.

A line replaces what the earlier lines *of its attempt* say about its first draw and all later ones;
at the time of writing, the attempt has made none of these. An attempt never replaces the lines of
another one: with `resume="exact"` both make the same draws, and the other one may have come further
(or may still be training). The journal holds every step of every attempt once.

An attempt also writes what it declared: how many steps, which of them it has not taken yet, and why
its rule has no valid ε, if it has none. Whether it is stopped may depend on its results, so these
steps count too (`evenclip.mechanism.declared`). A line without a declaration repeats the last one
of its attempt; only steps that are drawn more often than declared change it. No later line takes a
declaration back.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenclip import files
from evenclip.files import kinds, strict, synchronise
from evenclip.mechanism import Ledger
from evenclip.mechanism.entry import Entry, check_entry, read, row
from evenclip.training.checkpoint import CheckpointError

__all__ = [
    "NAME", "Declaration", "Journal", "check_fingerprint", "check_place", "declarations",
    "fingerprint", "journaled", "made", "read_journal",
]  # fmt: skip

NAME = "journal.jsonl"
_VOID = b"~"  # ends a line that a process was writing when it was killed


@dataclass(frozen=True)
class Declaration:
    """What a run says at one of its draws about the steps that it will take.

    Attributes:
        run: id of the run.
        steps: the declared number of steps.
        first_steps: the number that was declared at first, before the run was extended.
        remaining: the declared steps that are not taken yet, at the places of their draws.
        why_no_epsilon: why the rule has no valid ε; None if it has one.
    """

    run: str
    steps: int
    first_steps: int
    remaining: Ledger = field(default_factory=Ledger)
    why_no_epsilon: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the declaration as plain values, without its run."""
        return {
            "steps": self.steps,
            "first_steps": self.first_steps,
            "remaining": self.remaining.to_json(),
            "why_no_epsilon": self.why_no_epsilon,
        }


def declarations(path: Path) -> list[Declaration]:
    """Return all declarations in a journal, in the order in which they were written.

    Raises:
        CheckpointError: a line is damaged.
    """
    return [line.declared for line in _lines(path) if line.declared is not None]


def journaled(folder: Path) -> Ledger:
    """Return the draws of all runs in the journal of a folder, as reserved steps.

    Raises:
        CheckpointError: a line is damaged, or two lines contradict each other.
    """
    return read_journal(folder / NAME)


def read_journal(path: Path) -> Ledger:
    """Return the draws of all runs in a journal, as `journaled` does."""
    attempts: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for line in _lines(path):
        attempts[line.place] = [*_before(line.first, attempts[line.place]), *line.entries]
    try:
        return Ledger.joined(*map(Ledger, attempts.values()))
    except ValueError as error:
        raise CheckpointError(
            f"{path} contradicts itself, so the steps of earlier attempts cannot be counted: "
            f"{error} Bring the file back from a copy, or start again in another folder."
        ) from error


def made(folder: Path, run: str) -> int:
    """Return how many draws of a run were made for certain: those before its last block.

    Raises:
        CheckpointError: a line of the journal is damaged.
    """
    blocks = [line.first for line in _lines(folder / NAME) if line.run == run and line.entries]
    return max(blocks, default=0)


def fingerprint(folder: Path) -> dict[str, Any] | None:
    """Return length and digest of a folder's journal; None if there is none."""
    content = _read(folder / NAME)
    return None if content is None else _fingerprint(content)


def check_fingerprint(path: Path, kept: dict[str, Any] | None) -> bool:
    """Return whether a checkpoint's journal exists and still has every line that it had.

    Args:
        path: folder of the checkpoint.
        kept: fingerprint of the journal when the checkpoint was saved; None: there was none.

    Raises:
        CheckpointError: the journal is shorter, or its beginning is another one.
    """
    journal = path.parent / NAME
    content = _read(journal)
    if kept is None or content is None:
        return kept is None
    if _fingerprint(content[: kept["bytes"]]) != kept:
        held = f"it holds {len(content)} bytes, and {kept['bytes']} were written"
        raise CheckpointError(
            f"{journal} is not the one that {path.name} was saved with: "
            f"{held if len(content) < kept['bytes'] else 'its beginning differs'}. Steps of "
            "earlier attempts may be missing in it; bring the file back from a copy, or start "
            "again in another folder."
        )
    return True


def _fingerprint(content: bytes) -> dict[str, Any]:
    """Return length and digest of a journal's content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _read(path: Path) -> bytes | None:
    """Return the content of a journal; None if there is none."""
    try:
        return files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}), so the steps of earlier attempts cannot be "
            "counted; make it readable, or start again in another folder."
        ) from error


@dataclass(frozen=True)
class _Line:
    """One line: what an attempt says about a run from draw `first` on."""

    attempt: str
    run: str
    first: int
    entries: list[Entry]
    declared: Declaration | None = None

    @property
    def place(self) -> tuple[str, str]:
        """The attempt and the run, whose lines replace one another."""
        return self.attempt, self.run


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the complete lines of a journal.

    A last line without its end is complete if it can be read. A line that a process was writing
    when it was killed cannot, and none of its draws was made.
    """
    *lines, last = (_read(path) or b"").split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.endswith(_VOID):
            yield _line(path, number, line)
    if _is_complete(last):
        yield _line(path, len(lines) + 1, last)


def _is_complete(line: bytes) -> bool:
    """Return whether a line without its end is JSON."""
    try:
        strict.loads(line)
    except ValueError:
        return False
    return True


def _line(path: Path, number: int, line: bytes) -> _Line:
    """Return a line; raise if it is damaged."""
    place = f"Line {number} of {path}"
    try:
        plain = files.unsealed(line, place, kinds.JOURNAL)
        entries = [read(entry, place) for entry in plain["entries"]]
        run = str(plain["run"])
        declared = _declaration(run, plain["declared"], place) if "declared" in plain else None
        if not all(isinstance(plain[name], str) for name in ("attempt", "run")):
            raise ValueError(f"{place} has no run.")
        if type(plain["first"]) is not int:
            raise ValueError(f"{place} begins at no draw.")
        one = _Line(plain["attempt"], run, plain["first"], entries, declared)
        _check(one, place)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place} is damaged, so the steps of earlier attempts cannot be counted; bring the "
            "file back from a copy, or start again in another folder."
        ) from error
    return one


def _declaration(run: str, plain: dict[str, Any], place: str) -> Declaration:
    """Return the declaration of a line."""
    rows = [read(entry, place) for entry in plain["remaining"]]
    counts = plain["steps"], plain["first_steps"]
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"{place} declares {counts} steps.")
    why = plain["why_no_epsilon"]
    return Declaration(run, *counts, Ledger(rows), None if why is None else str(why))


def _check(line: _Line, place: str) -> None:
    """Raise a ValueError if no run writes such a line."""
    declared = [] if line.declared is None else line.declared.remaining.entries
    for entry in (*line.entries, *declared):
        check_entry(entry, place)
        if entry.run != line.run or entry.first < line.first or not entry.steps:
            raise ValueError(f"{place} has an entry of other draws.")
    if line.first < 0:
        raise ValueError(f"{place} begins at draw {line.first}.")


def _before(first: int, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the steps before a draw."""
    for entry in entries:
        if entry.first < first:
            yield replace(entry, steps=min(entry.steps, first - entry.first))


def check_place(ledger: Ledger, draw: Entry) -> None:
    """Raise a CheckpointError if a ledger holds another step in the place of a draw."""
    try:
        Ledger.joined(ledger, Ledger([draw]))
    except ValueError as error:
        raise CheckpointError(
            f"Draw {draw.first} is another step than the one that an earlier attempt made or "
            "reserved there, and one noise must not hide two sums, so it is not made. Resume with "
            "resume=True, which draws new noise."
        ) from error


class Journal:
    """The journal that an attempt of a run writes before it draws.

    Args:
        folder: folder of the checkpoints.
        writes: whether this process writes it, and not another rank.

    Attributes:
        folder: folder of the checkpoints.
        reserved: the entries of the current block.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self._path, self._writes = folder, folder / NAME, writes
        self.reserved: list[Entry] = []
        self._declared: tuple[str, int] | None = None
        self._attempt = os.urandom(8).hex()

    def is_in(self, folder: Path) -> bool:
        """Return whether this is the journal of a folder."""
        return self.folder.resolve() == folder.resolve()

    def covers(self, draw: Entry) -> bool:
        """Return whether this draw is reserved on the disk."""
        return any(
            entry.run == draw.run
            and entry.first <= draw.first < entry.end
            and entry.is_same_release(draw)
            for entry in self.reserved
        )

    def adopt(self, ledger: Ledger, declared: Sequence[Declaration], steps: int) -> None:
        """Write the steps of a ledger that are not in the journal: they were taken without it.

        Args:
            ledger: steps of this run and of the attempts before it.
            declared: their declarations, as far as steps remain.
            steps: number of steps that the others declared.
        """
        if not self._writes:
            return
        held = read_journal(self._path)
        if Ledger.joined(held, ledger).steps > held.steps:
            for run in dict.fromkeys(entry.run for entry in ledger.entries):
                mine = [one for one in declared if one.run == run]
                rows = [entry for entry in ledger.entries if entry.run == run]
                for one in mine or [Declaration(run, steps, steps)]:
                    self._write(run, 0, rows, one)
            self.renew()

    def has_declared(self, run: str, shift: int) -> bool:
        """Return whether this attempt has declared its steps.

        Args:
            run: id of the run.
            shift: number of draws less the number of steps taken, which repeated steps change.
        """
        return self._declared == (run, shift)

    def reserve(
        self,
        run: str,
        first: int,
        entries: Sequence[Entry],
        declared: Declaration | None = None,
        shift: int = 0,
    ) -> None:
        """Write entries from draw `first` of a run on, and wait until they are on the disk.

        Args:
            run: id of the run.
            first: the next draw.
            entries: the draws that are reserved.
            declared: what the run declares at this draw; None: what it declared before.
            shift: as for `has_declared`.
        """
        self.reserved = self._write(run, first, entries, declared)
        if declared is not None:
            self._declared = (run, shift)

    def close(self, run: str, drawn: int, declared: Declaration | None = None) -> None:
        """Write that a run ended after `drawn` draws; the rest of its block is free again."""
        is_open = any(entry.run == run and entry.end > drawn for entry in self.reserved)
        if is_open or declared is not None:
            self.reserve(run, drawn, [], declared)

    def renew(self) -> None:
        """Begin another attempt, which may repeat the draws of this one."""
        self.reserved, self._attempt = [], os.urandom(8).hex()
        self._declared = None

    def _write(
        self, run: str, first: int, entries: Sequence[Entry], declared: Declaration | None
    ) -> list[Entry]:
        """Write a line, and return its entries."""
        entries = [replace(entry, reserved=True) for entry in entries]
        rows = [row(entry) for entry in entries]
        plain = {"attempt": self._attempt, "run": run, "first": first, "entries": rows}
        if declared is not None:
            plain["declared"] = declared.to_json()
        if self._writes:
            self._append(files.sealed(plain, None))
        return entries

    def _append(self, line: bytes) -> None:
        """Write a line, and wait until it is on the disk."""
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                line = self._end(handle) + line
                if os.write(handle, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
            synchronise(self._path.parent)
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be written ({error.strerror}), and no step is taken before "
                "it is in the journal; make room, or choose another folder."
            ) from error

    def _end(self, handle: int) -> bytes:
        """Return what ends the last line, if a process was killed while it wrote it."""
        size = os.fstat(handle).st_size
        if not size or os.pread(handle, 1, size - 1) == b"\n":
            return b""
        last = self._path.read_bytes().rpartition(b"\n")[2]
        return b"\n" if _is_complete(last) else _VOID + b"\n"
