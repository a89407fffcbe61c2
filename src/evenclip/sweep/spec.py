"""The specification of a run: everything its result depends on, as plain values, and the hash that
names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenclip.rules import Rule
    from evenclip.training.config import TrainConfig

__all__ = ["FORMAT", "Spec", "code"]

FORMAT = 1
"""Of specification and result."""

# Where a file lies does not matter to what comes out; what is in it does, and that is `sha256`.
_PLACES = ("path", "directory")


@dataclass(frozen=True)
class Spec:
    """One run: data, model, rule, settings, seed. The three descriptions are those of
    `evenclip.sweep.describe`.

    >>> spec = Spec({"name": "toy"}, {"name": "mlp"}, {"name": "dpsgd"}, 0.1, 1, 32, None, None, seed=0)
    >>> len(spec.hash), replace(spec, data={"name": "toy", "directory": "elsewhere"}).hash == spec.hash
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
        """Everything about the training but the model and the data."""
        from evenclip.training.config import Performance, TrainConfig

        given = {field.name: getattr(self, field.name) for field in fields(self)[3:-1]}
        return TrainConfig(rule=rule, **given, performance=Performance(tf32=self.tf32))

    def to_json(self) -> dict[str, Any]:
        """As plain values, places included."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Spec:
        """What `to_json` made."""
        return Spec(**values)

    def at(self, seed: int) -> Spec:
        """The same run with another seed."""
        return replace(self, seed=seed)

    @property
    def hash(self) -> str:
        """The name of this run: 96 bits of the SHA-256 of everything but places, and of the code
        that runs it.
        """
        plain = json.dumps([FORMAT, code(), _without_places(self.to_json())], sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:24]


@lru_cache(maxsize=1)
def code() -> str:
    """SHA-256 of the package's sources, but for those that only show, and of the versions of what
    it stands on: a result is not that of other code.
    """
    versions = [
        f"{name} {metadata.version(name)}" for name in ("torch", "numpy", "pandas", "scikit-learn")
    ]
    found = hashlib.sha256(" ".join(versions).encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in (
            "cli",
            "report",
            "reproduction",
        ):  # a specification has all their numbers
            found.update(path.read_bytes())
    return found.hexdigest()


def _without_places(plain: dict[str, Any]) -> dict[str, Any]:
    """Data, model and rule without where their files are; deeper down a key of that name is
    somebody's column.
    """
    parts = {name: _placeless(plain[name]) for name in ("data", "model", "rule")}
    if parts["data"].get("test"):
        parts["data"] = {**parts["data"], "test": _placeless(parts["data"]["test"])}
    return {**plain, **parts}


def _placeless(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in _PLACES}
