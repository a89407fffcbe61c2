"""The secret key of a run, from which its batches, noise and dropout are derived.

Without a seed it comes from the operating system. From a seed, it is a digest of the seed and of
all that can change a released sum in its last bit: settings, data, model, loss, rule, optimiser,
scheduler, the package's code, torch, and the device, threads and switches of every rank. So two
runs that differ in any of them have different noise and different batches; two models that shared
their noise would show the difference of their sums without it. Where no digest can be taken, a seed
is refused. All ranks of a run have one key: with two keys, they would draw two batches, and a
record in both would count twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evenclip.data import Dataset, MapDataset, Streamed
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.words import KEY_BYTES, derive
from evenclip.training.code import sources
from evenclip.training.config import TrainConfig
from evenclip.training.contents import NoDigest, contents
from evenclip.training.interventions import check_interventions
from evenclip.training.libraries import library_of_class
from evenclip.training.machine import machine
from evenclip.training.patches import patches
from evenclip.training.processes import Processes

__all__ = [
    "check_one_key", "computed_with", "conditions", "different", "fresh_key", "keyed", "run_id",
    "secret_key",
]  # fmt: skip

# What ranks may differ in.
_OWN = frozenset(("device", "threads", "switches"))


def fresh_key(ranks: Processes) -> bytes:
    """Return a key from the operating system, the same on all ranks."""
    key: bytes = ranks.first(os.urandom(KEY_BYTES))
    return key


def secret_key(seed: int, conditions: Mapping[str, str]) -> bytes:
    """Return the key that a seed has under these conditions."""
    words = json.dumps([seed, sorted(conditions.items())]).encode()
    return hashlib.blake2b(words, digest_size=KEY_BYTES).digest()


def run_id(key: bytes) -> str:
    """Return the name of a run in ledgers, which says nothing about its key."""
    return derive(key, "run").hex()[:32]


def conditions(
    settings: Settings,
    config: TrainConfig,
    model: nn.Module,
    data: Dataset | Streamed,
    data_digest: str,
    device: torch.device,
    ranks: Processes,
) -> dict[str, str]:
    """Return the digests of all that can change a released sum in its last bit, by name.

    They are the same on every rank. Collective.

    Args:
        settings: constants of the run.
        config: its settings, as given.
        model: the model before the first step.
        data: the training data of this process.
        data_digest: digest of the data of all processes.
        device: device of the model.
        ranks: the processes that train together.

    Raises:
        ValueError: a digest cannot be taken, or ranks compute different things; the message says
            what to do.
    """
    _refuse_unread(data)
    check_interventions()
    objects = {
        "model": model,
        "loss": config.loss,
        "rule": settings.rule,
        "optimizer": config.optimizer,
        "scheduler": config.scheduler,
        "patch of torch": patches(),
    }
    own = {
        "settings": _digest(settings.to_json()),
        "data": data_digest,
        **{name: _contents(name, value) for name, value in objects.items()},
        **computed_with(config),
        "ranks": f"{ranks.world} {ranks.local} {ranks.sharded}",
        **machine(device),
    }
    return _of_all(ranks.each(own))


def computed_with(config: TrainConfig) -> dict[str, str]:
    """Return what all ranks must compute with, with a seed or without, by name."""
    return {
        # The number of readers changes no row.
        "performance": repr(replace(config.performance, readers=0)),
        "independence": str(config.independence),
        "evenclip": sources(),
        "torch": torch.__version__,
    }


def check_one_key(key: bytes, ranks: Processes) -> None:
    """Raise unless all ranks have this key. Collective."""
    if ranks.world > 1 and len(set(ranks.each(run_id(key)))) > 1:
        raise RuntimeError(
            "The ranks have different keys, so they would draw different batches, and a record "
            "in two of them would count twice; start all ranks again with the same arguments."
        )


def _of_all(ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the conditions of a run, given those of each rank; raise if they differ."""
    first = ranks[0]
    for r, other in enumerate(ranks):
        differing = [name for name in first if other[name] != first[name] and name not in _OWN]
        if differing:
            raise ValueError(
                f"Rank {r} has another {', '.join(differing)} than rank 0, and all ranks train one "
                "model; give every rank the same code and the same values."
            )
    together = {name: _digest([other[name] for other in ranks]) for name in _OWN}
    return first | together


def _refuse_unread(data: Dataset | Streamed) -> None:
    """Raise for data whose digest may not be that of the rows that training gets."""
    if isinstance(data, MapDataset):
        raise ValueError(
            "With a seed, the noise is a function of all records, and data that are read item by "
            "item are never read as a whole; leave seed out, or give the data as arrays, as a "
            "Dataset or by evenclip.data.parquet."
        )
    columns = tree_leaves((data.x, data.y, data.group)) if isinstance(data, Dataset) else []
    unknown = {type(column) for column in columns} - {type(None), Tensor, nn.Parameter}
    if library_of_class(type(data)) != "evenclip":
        unknown |= {type(data)}
    if unknown:
        name = sorted(kind.__name__ for kind in unknown)[0]
        raise ValueError(
            f"With a seed, the noise is a function of all records, and the class {name} of your "
            "own may change them when they are read; leave seed out, or give the records as they "
            "are trained on, as arrays or as a Dataset."
        )


def keyed(key: bytes, conditions: Mapping[str, str]) -> dict[str, str]:
    """Return the conditions under a key, for the secret half of a checkpoint."""
    return {name: derive(key, f"{name} {value}").hex() for name, value in conditions.items()}


def different(theirs: Mapping[str, str], key: bytes, conditions: Mapping[str, str]) -> list[str]:
    """Return the names of the conditions that are not those of a checkpoint with this key."""
    ours = keyed(key, conditions)
    return [name for name in ours if name in theirs and theirs[name] != ours[name]]


def _contents(name: str, value: Any) -> str:
    """Return the digest of a model, a function or a rule; raise if there is none."""
    try:
        return contents(value)
    except NoDigest as why:
        raise ValueError(
            f"With a seed, the noise is a function of the {name}'s code and values, and {why}; "
            f"leave seed out, or give a {name} of Python functions and plain values."
        ) from why


def _digest(plain: Any) -> str:
    """Return the digest of plain values."""
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode()).hexdigest()
