"""evenclip: differentially private training that shows what privacy costs each group.

>>> import torch
>>> import evenclip
>>> x = torch.linspace(-1, 1, 4000).reshape(2000, 2)
>>> y = (x[:, 0] > 0).long()
>>> rule = evenclip.DPSGDGlobalAdapt(C0=1.0, sigma=1.0)
>>> result = evenclip.fit(torch.nn.Linear(2, 2), (x, y), rule=rule, batch_size=50, epochs=2)
>>> print(f"ε = {result.epsilon():.2f} at δ = {result.settings.delta:g}")
ε = 1.28 at δ = 0.0001

Names are imported on first use. So importing the package is fast, and training needs only torch and
numpy.
"""

from __future__ import annotations

# As in `typing`, which `python -m evenclip` would import from the current folder.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from evenclip.comparison.compare import compare
    from evenclip.comparison.result import Comparison
    from evenclip.distributed import Ranks
    from evenclip.gradients import ModelError, per_sample_gradients, per_sample_norms
    from evenclip.mechanism.calibration import calibrate
    from evenclip.rules import DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, NonPrivate, Rule
    from evenclip.training.config import Performance, TrainConfig
    from evenclip.training.fit import fit, prepare
    from evenclip.training.result import Result
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
    "training.fit": ("fit", "prepare"),
    "training.result": ("Result",),
    "training.run": ("Run",),
    "training.step": ("Step",),
}


_MODULES = ("audit", "data", "export", "models", "sklearn")


def __getattr__(name: str) -> Any:
    # Here, because importlib imports `warnings`: before `evenclip.__main__` has left the current
    # folder, a file warnings.py there would be executed.
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"evenclip.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"evenclip.{home}"), name)
    raise AttributeError(f"module 'evenclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
