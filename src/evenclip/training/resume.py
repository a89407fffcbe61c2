"""Save a run in a checkpoint, and continue from one: as a branch, or by repeating its steps.

A branch draws new batches and new noise from the operating system, so nothing that the earlier
attempts published shares its noise. Its ledger has the steps before the checkpoint, every step that
the earlier attempts may have taken after it (`evenclip.training.journal`), and its own; so ε is
that of everything that may have been published. Steps that an earlier attempt declared and did not
take count too, unless this one continues it with at least as many (`evenclip.mechanism.declared`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evenclip.mechanism import Ledger
from evenclip.mechanism.declared import undeclared
from evenclip.mechanism.entry import Parent, row
from evenclip.rules import NO_EPSILON
from evenclip.training import checkpoint
from evenclip.training.ahead import declaration
from evenclip.training.checkpoint import Checkpoint, CheckpointError
from evenclip.training.identity import mark
from evenclip.training.journal import (
    NAME,
    Declaration,
    check_fingerprint,
    declarations,
    fingerprint,
    journaled,
)
from evenclip.training.keys import different, fresh_key, keyed, run_id

if TYPE_CHECKING:
    from evenclip.training.run import Run

__all__ = ["begin", "is_used", "restore", "save"]


def save(run: Run, folder: Path) -> None:
    """Write a checkpoint of the run; every rank calls it, and the leading rank writes."""
    trace, (model, optimizer) = run.trace.state(), run.update_state()
    if not run.ranks.leads:
        return
    published = {
        "settings": run.settings.to_json(),
        "t": run.t,
        "place": [run.run_id, run.drawn],
        "parent": run.parent,
        "state": run.state.tolist(),
        "state_dtype": str(run.state.dtype).removeprefix("torch."),
        "ledger": run.ledger.to_json(),
        "reserved": [row(entry) for entry in run.reserved],
        "remaining": run.open_declarations.to_json(),
        "first_steps": run.first_steps,
        "durable": run.is_durable_in(folder),
        "journal": fingerprint(folder),
    }
    secret = {
        "key": run.key,
        "drawn": run.drawn,
        "conditions": keyed(run.key, run.conditions),
        "seed": run.settings.seed,
        "data": mark(run.data, run.ranks, run.data_digest, run.key),
        "optimizer": optimizer,
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "trace": trace,
    }
    checkpoint.save(folder, run.t, Checkpoint(model, published, secret))


def restore(run: Run, path: Path, *, exact: bool) -> None:
    """Continue the run from a checkpoint; see `Run.restore`."""
    saved = checkpoint.load(path)
    published, secret = saved.published, saved.secret
    key: bytes = secret["key"]
    _check(run, path, saved, exact=exact)
    run.end_attempt()
    journal, written = _earlier(run, path.parent)
    ledger = Ledger.union(run.ledger, *_ledgers(published, journal))
    ledger.check_whole()
    declared = [*_declared(published), *written]
    known = Ledger.from_json([*published["ledger"], *published["reserved"]]).entries
    stated = {*(one.run for one in declared), *(entry.run for entry in known)}
    _check_declared(path.parent, ledger, journal, stated)
    whole = check_fingerprint(path, published["journal"]) if run.ranks.leads else None
    run.is_on_disk &= bool(run.ranks.first(whole)) and published["durable"]
    try:
        run.set_update_state(saved.model, secret["optimizer"])
    except RuntimeError as error:
        message = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} belongs to another model ({message}). Resume with the model it was "
            "started with, or choose another folder."
        ) from error
    if run.drawn:  # steps of this process, which may have been seen
        declared.append(declaration(run))
    run.declarations = [*run.declarations, *declared]
    run.first_steps = published.get("first_steps", published["settings"]["steps"])
    run.t = published["t"]
    # A rule may return a state of another dtype than its first.
    dtype = getattr(torch, published.get("state_dtype", ""), run.state.dtype)
    run.state = torch.tensor(published["state"], dtype=dtype, device=run.device)
    run.ledger = ledger
    if exact:
        run.batches.close()  # readers may be ahead of the checkpoint
        run.drawn = secret["drawn"]
    else:
        run.conditions = {}
        parent = (run_id(key), secret["drawn"]) if secret["drawn"] else _saved_parent(published)
        run.set_key(fresh_key(run.ranks), parent)
    if run.scheduler is not None:
        run.scheduler.load_state_dict(secret["scheduler"])
    run.trace.set_state(secret["trace"])


def begin(run: Run, folder: Path, *, exact: bool) -> None:
    """Start a run in a folder without a checkpoint, and count the steps in its journal.

    Args:
        run: before its first step.
        folder: created if it does not exist.
        exact: whether to repeat the steps of a run that ended before its first checkpoint.
            Otherwise a run with a seed has new noise, because the journal may have its draws.
    """
    journal, declared = _earlier(run, folder)
    run.ledger = Ledger.union(journal)
    run.ledger.check_whole()
    _check_declared(folder, run.ledger, journal, {one.run for one in declared})
    _check_epsilon(run, folder, declared)
    run.declarations = declared
    if run.ledger.entries and not exact:
        run.conditions = {}
        run.set_key(fresh_key(run.ranks), _continued(run, declared))
    if run.ranks.leads:
        checkpoint.create(folder)
    run.ranks.first(None)  # the folder exists from here on


def is_used(run: Run, folder: Path) -> bool:
    """Return whether a folder has a journal, as the leading rank finds it; it may be damaged."""
    used = fingerprint(folder) is not None if run.ranks.leads else None
    return bool(run.ranks.first(used))


def _earlier(run: Run, folder: Path) -> tuple[Ledger, list[Declaration]]:
    """Return what the journal of a folder holds and declares, as the leading rank reads it."""
    read = (journaled(folder), declarations(folder / NAME)) if run.ranks.leads else None
    earlier: tuple[Ledger, list[Declaration]] = run.ranks.first(read)
    return earlier


def _continued(run: Run, declared: list[Declaration]) -> Parent | None:
    """Return the last draw of the attempt that a run starts again, if it has as many steps.

    An attempt that declared more steps is not continued, and all its declared steps count.
    """
    last = declared[-1]
    drawn = run.ledger.end_of(last.run)
    if run.settings.steps < last.steps or not drawn:
        return None
    run.first_steps = last.first_steps
    return last.run, drawn


def _declared(published: dict[str, Any]) -> list[Declaration]:
    """Return the declarations in a checkpoint."""
    steps = published["settings"]["steps"]
    first, by_run = published.get("first_steps", steps), dict[str, Ledger]()
    for entry in Ledger.from_json(published["remaining"]).entries:
        by_run.setdefault(entry.run, Ledger()).entries.append(entry)
    return [Declaration(run, steps, first, ledger) for run, ledger in by_run.items()]


def _saved_parent(published: dict[str, Any]) -> Parent | None:
    """Return what the run of a checkpoint branches off."""
    parent = published.get("parent")
    return None if parent is None else (parent[0], parent[1])


def _check_declared(folder: Path, ledger: Ledger, journal: Ledger, stated: set[str]) -> None:
    """Raise if the journal has a run whose declared number of steps is not known."""
    unknown = undeclared(ledger, (entry.run for entry in journal.entries), stated)
    if unknown:
        raise CheckpointError(
            f"{folder / NAME} does not state how many steps run {unknown[0]} declared, because an "
            "older version wrote it; ε counts all declared steps, so it cannot be stated. Start "
            "again in another folder."
        )


def _check_epsilon(run: Run, folder: Path, declared: list[Declaration]) -> None:
    """Raise if a run with an ε would count steps of a rule that has none."""
    why = next((one.why_no_epsilon for one in declared if one.why_no_epsilon), None)
    if why is not None and run.settings.rule.soundness != NO_EPSILON:
        raise CheckpointError(
            f"{folder / NAME} has steps of a rule without a valid ε ({why}), so no ε could be "
            "stated for this training. Choose another folder."
        )


def _check(run: Run, path: Path, saved: Checkpoint, *, exact: bool) -> None:
    """Raise if the checkpoint is of another run, or if its steps cannot be repeated."""
    secret, settings = saved.secret, json.loads(json.dumps(run.settings.to_json()))
    same_seed = secret["seed"] == run.settings.seed
    checkpoint.check_settings(
        path, saved.published["settings"], settings, same_seed=same_seed, longer=not exact
    )
    ours = mark(run.data, run.ranks, run.data_digest, secret["key"])
    checkpoint.check_data(path, secret["data"], ours)
    if exact:
        differing = different(secret["conditions"], secret["key"], run.conditions)
        checkpoint.check_conditions(path, differing, same_key=secret["key"] == run.key)


def _ledgers(published: dict[str, Any], journal: Ledger) -> list[Ledger]:
    """Return the ledger of a checkpoint, that of its folder's journal, and what it had reserved.

    The journal also records how far the run came, which a checkpoint does not.
    """
    known = {entry.run for entry in journal.entries}
    reserved = Ledger.from_json(published["reserved"])
    reserved.entries = [entry for entry in reserved.entries if entry.run not in known]
    return [Ledger.from_json(published["ledger"]), journal, reserved]
