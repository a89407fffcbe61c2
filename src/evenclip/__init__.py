"""evenclip: differentially private training that is fair to every group, with the proof.

    import evenclip result = evenclip.fit(model, (x, y), rule=evenclip.DPSGDGlobalAdapt(C0=1.0,
    sigma=1.0), epochs=20, lr=0.1) result.epsilon()

Names are loaded when they are first used, so that importing the package costs little and the core
runs where only torch and numpy are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenclip.comparison.compare import compare
    from evenclip.comparison.result import Comparison
    from evenclip.distributed import Ranks
    from evenclip.gradients import ModelError, per_sample_gradients, per_sample_norms
    from evenclip.mechanism.calibration import calibrate
    from evenclip.rules import DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, NonPrivate, Rule
    from evenclip.training.config import Performance, TrainConfig
    from evenclip.training.fit import Result, fit, prepare
    from evenclip.training.run import Run
    from evenclip.training.step import Step

__all__ = [
    "DPSGD",
    "DPSGDF",
    "Comparison",
    "DPSGDGlobal",
    "DPSGDGlobalAdapt",
    "ModelError",
    "NonPrivate",
    "Performance",
    "Ranks",
    "Result",
    "Rule",
    "Run",
    "Step",
    "TrainConfig",
    "calibrate",
    "compare",
    "fit",
    "per_sample_gradients",
    "per_sample_norms",
    "prepare",
]

_HOMES = {
    "mechanism.calibration": ("calibrate",),
    "comparison.compare": ("compare",),
    "comparison.result": ("Comparison",),
    "gradients": ("ModelError", "per_sample_gradients", "per_sample_norms"),
    "distributed": ("Ranks",),
    "rules": (
        "DPSGD",
        "DPSGDF",
        "DPSGDGlobal",
        "DPSGDGlobalAdapt",
        "NonPrivate",
        "Constants",
        "Rule",
    ),
    "training.config": ("Performance", "TrainConfig"),
    "training.fit": ("Result", "fit", "prepare"),
    "training.run": ("Run",),
    "training.step": ("Step",),
}


_MODULES = ("audit", "data", "export", "models", "sklearn")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"evenclip.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"evenclip.{home}"), name)
    raise AttributeError(f"module 'evenclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
