"""The specification of a run: everything its result depends on, and the hash that names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from evenclip.training.code import sources

if TYPE_CHECKING:
    from evenclip.rules import Rule
    from evenclip.training.config import TrainConfig

__all__ = ["FORMAT", "Spec", "code"]

FORMAT = 1
"""Version of the format of specifications and results."""

# Keys that do not affect the result: a file is identified by its content, with `sha256`.
_PLACES = ("path", "directory")


@dataclass(frozen=True)
class Spec:
    """One run: data, model, rule, settings, seed.

    `evenclip.sweep.describe` makes the descriptions of data, model and rule.

    >>> data = {"name": "toy"}
    >>> spec = Spec(data, {"name": "mlp"}, {"name": "dpsgd"}, 0.1, 1, 32, None, None, seed=0)
    >>> moved = replace(spec, data={**data, "directory": "elsewhere"})
    >>> len(spec.hash), moved.hash == spec.hash
    (24, True)
    """

    data: Mapping[str, Any]
    model: Mapping[str, Any]
    rule: Mapping[str, Any]
    lr: float
    epochs: int
    batch_size: int
    q: float | None
    delta: float | None
    seed: int
    device: str = "cpu"
    tf32: bool = False

    def config(self, rule: Rule) -> TrainConfig:
        """Return the training configuration."""
        from evenclip.training.config import Performance, TrainConfig

        given = {field.name: getattr(self, field.name) for field in fields(self)[3:-1]}
        return TrainConfig(rule=rule, **given, performance=Performance(tf32=self.tf32))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, including paths."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Spec:
        """Return the specification that `to_json` converted."""
        return Spec(**values)

    def at(self, seed: int) -> Spec:
        """Return the same run with another seed."""
        return replace(self, seed=seed)

    @cached_property
    def hash(self) -> str:
        """Name of this run: 96 bits of the SHA-256 of its values without paths, and of the code."""
        plain = json.dumps([FORMAT, code(), _without_places(self.to_json())], sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:24]


@lru_cache(maxsize=1)
def code() -> str:
    """Return the SHA-256 of the package's sources and of its dependencies' versions.

    Results of different code have different names.
    """
    versions = [
        f"{name} {metadata.version(name)}" for name in ("torch", "numpy", "pandas", "scikit-learn")
    ]
    return hashlib.sha256(" ".join([*versions, sources()]).encode()).hexdigest()


def _without_places(plain: dict[str, Any]) -> dict[str, Any]:
    """Remove the paths of data, model and rule.

    At deeper levels such a key may be the name of a column, and stays.
    """
    placeless = {name: _placeless(plain[name]) for name in ("data", "model", "rule")}
    data = placeless["data"]
    if data.get("test"):
        placeless["data"] = {**data, "test": _placeless(data["test"])}
    return {**plain, **placeless}


def _placeless(description: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in description.items() if key not in _PLACES}
