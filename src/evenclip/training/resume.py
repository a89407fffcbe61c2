"""Save a run in a checkpoint, and continue from one: as a branch, or by repeating its steps.

A branch draws new batches and new noise from the operating system, so nothing that the earlier
attempts published shares its noise. Its ledger has the steps before the checkpoint, every step that
the earlier attempts may have taken after it (`evenclip.training.journal`), and its own; so ε is
that of everything that may have been published.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evenclip.mechanism import Ledger
from evenclip.mechanism.entry import row
from evenclip.training import checkpoint
from evenclip.training.checkpoint import Checkpoint, CheckpointError
from evenclip.training.identity import mark
from evenclip.training.journal import check_fingerprint, fingerprint, journaled
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
        "state": run.state.tolist(),
        "state_dtype": str(run.state.dtype).removeprefix("torch."),
        "ledger": run.ledger.to_json(),
        "reserved": [row(entry) for entry in run.reserved],
        "remaining": run.remaining.to_json(),
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
    ledger = Ledger.union(run.ledger, *_ledgers(run, path, published))
    ledger.check_whole()
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
        run.set_key(fresh_key(run.ranks), (run_id(key), secret["drawn"]))
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
    run.ledger = Ledger.union(_earlier(run, folder))
    run.ledger.check_whole()
    if run.ledger.entries and not exact:
        run.conditions = {}
        run.set_key(fresh_key(run.ranks))
    if run.ranks.leads:
        checkpoint.create(folder)
    run.ranks.first(None)  # the folder exists from here on


def is_used(run: Run, folder: Path) -> bool:
    """Return whether a folder has a journal, as the leading rank finds it; it may be damaged."""
    used = fingerprint(folder) is not None if run.ranks.leads else None
    return bool(run.ranks.first(used))


def _earlier(run: Run, folder: Path) -> Ledger:
    """Return what the journal of a folder holds, as the leading rank reads it."""
    ledger: Ledger = run.ranks.first(journaled(folder) if run.ranks.leads else None)
    return ledger


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


def _ledgers(run: Run, path: Path, published: dict[str, Any]) -> list[Ledger]:
    """Return the ledger of a checkpoint, that of its folder's journal, and what it had reserved.

    The journal also records how far the run came, which a checkpoint does not.
    """
    journal = _earlier(run, path.parent)
    known = {entry.run for entry in journal.entries}
    reserved = Ledger.from_json(published["reserved"])
    reserved.entries = [entry for entry in reserved.entries if entry.run not in known]
    return [Ledger.from_json(published["ledger"]), journal, reserved]
