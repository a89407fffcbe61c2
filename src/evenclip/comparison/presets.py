"""The settings of the paper's experiments: each number once, with where it is from.

Esipova et al. 2023, "Disparate Impact in Differential Privacy from Gradient Misalignment". Its
text, its algorithm boxes and the code its authors released do not always agree. Where they differ,
we run what reproduces the printed table, and say so here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenclip.comparison.protocol import Method, Protocol
from evenclip.rules import DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, FairLens, NonPrivate

__all__ = ["PUBLISHED", "SETTINGS", "Choice", "Experiment"]

TEXT, APPENDIX, CODE = "Sec. 6.1", "App. B.2", "the released code"


@dataclass(frozen=True)
class Choice:
    """A number, and where it is from.

    Attributes:
        value: what we run.
        source: who says so.
        others: what others say: (value, who).
        why: why not theirs.
    """

    value: float
    source: str
    others: tuple[tuple[float, str], ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Experiment:
    """The experiment on one dataset.

    Attributes:
        model: description; see `evenclip.sweep.describe`.
        numbers: name -> its choice; lr is that of the non-private run, DPSGD, DPSGD-F and FairLens.
        fairlens: whether FairLens is in the table: the authors had it for two groups, two classes
            and no images.
        every: steps between two measurements of risk.
        title: name in sentences.
        figure_seeds: number of seeds of the figures.
        eigenvalues: whether DPSGD is also observed with its eigenvalues, for two more figures.
        quick_rows: number of records per split of a quick run; None: all.
        options: options of the dataset.
    """

    model: dict[str, Any]
    numbers: dict[str, Choice]
    fairlens: bool
    every: int
    title: str
    figure_seeds: int = 1
    eigenvalues: bool = False
    quick_rows: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.numbers[name].value

    def protocol(self) -> Protocol:
        """As `compare` takes it."""
        C0, sigma, lr, count = self["C0"], self["sigma"], self["lr"], self["sigma_count"]
        methods = [Method(NonPrivate(), lr), Method(DPSGD(C0=C0, sigma=sigma), lr)]
        if self.fairlens:
            methods.append(
                Method(
                    FairLens(C0=C0, sigma=sigma, gamma1=self["gamma1"], gamma2=self["gamma2"]), lr
                )
            )
        methods += [
            Method(DPSGDF(C0=C0, sigma=sigma, sigma_count=count * sigma), lr),
            Method(DPSGDGlobal(C0=C0, sigma=sigma, Z=self["Z"]), self["lr_global"]),
            Method(
                DPSGDGlobalAdapt(
                    C0=C0,
                    sigma=sigma,
                    Z0=self["Z0"],
                    tau=self["tau"],
                    eta_Z=self["eta_Z"],
                    sigma_count=count,
                ),
                self["lr_adapt"],
            ),
        ]
        return Protocol(
            "published",
            tuple(methods),
            self.model,
            int(self["epochs"]),
            int(self["batch_size"]),
            int(self["batches"]),
            self["delta"],
        )


_COMMON = {
    "batch_size": Choice(
        256, APPENDIX, why="also what every sum is divided by: the boxes divide by the random |B|"
    ),
    "delta": Choice(1e-6, TEXT),
    "sigma_count": Choice(10.0, APPENDIX, why="of DPSGD-F times σ, as its released code has it"),
    "eta_Z": Choice(0.1, APPENDIX),
}
_FAIRLENS = {"gamma1": Choice(1.0, APPENDIX), "gamma2": Choice(1.0, APPENDIX)}

SETTINGS: dict[str, Experiment] = {
    "adult": Experiment(
        {"name": "mlp", "options": {"hidden": [256, 256]}},
        {
            **_COMMON,
            **_FAIRLENS,
            "epochs": Choice(20, TEXT),
            "sigma": Choice(1.0, TEXT),
            "C0": Choice(0.5, TEXT),
            "lr": Choice(0.01, APPENDIX),
            "Z": Choice(50.0, APPENDIX),
            "Z0": Choice(50.0, APPENDIX),
            "tau": Choice(1.0, APPENDIX),
            "lr_global": Choice(0.2, CODE, ((1.0, APPENDIX),), "the printed row is that of 0.2"),
            "lr_adapt": Choice(0.2, APPENDIX),
            "batches": Choice(
                92, "the printed ε", ((93, "three splits in ten"),), "n depends on the seed, ε not"
            ),
        },
        fairlens=True,
        every=50,
        title="Adult",
        figure_seeds=5,
        eigenvalues=True,
    ),
    "dutch": Experiment(
        {"name": "sigmoid-then-softmax", "options": {}},
        {
            **_COMMON,
            **_FAIRLENS,
            "epochs": Choice(20, TEXT),
            "sigma": Choice(1.0, TEXT),
            "C0": Choice(0.1, TEXT),
            "lr": Choice(0.8, APPENDIX),
            "Z": Choice(1.0, APPENDIX),
            "Z0": Choice(50.0, APPENDIX),
            "tau": Choice(1.0, APPENDIX),
            "lr_global": Choice(2.0, APPENDIX),
            "lr_adapt": Choice(2.0, "the printed row", ((1.0, APPENDIX),), "2 comes nearer to it"),
            "batches": Choice(189, "the number of records"),
        },
        fairlens=True,
        every=100,
        title="Dutch",
        figure_seeds=5,
    ),
    "mnist": Experiment(
        {"name": "cnn", "options": {}},
        {
            **_COMMON,
            "epochs": Choice(60, TEXT),
            "sigma": Choice(0.8, TEXT),
            "C0": Choice(1.0, TEXT),
            "lr": Choice(0.01, APPENDIX),
            "Z": Choice(100.0, APPENDIX),
            "Z0": Choice(50.0, APPENDIX),
            "tau": Choice(0.7, APPENDIX),
            "lr_global": Choice(0.2, APPENDIX),
            "lr_adapt": Choice(0.1, APPENDIX),
            "batches": Choice(214, "the number of records"),
        },
        fairlens=False,
        every=200,
        title="MNIST",
        quick_rows=2560,
    ),
    "celeba": Experiment(
        {"name": "cnn", "options": {}},
        {
            **_COMMON,
            "epochs": Choice(30, TEXT),
            "sigma": Choice(0.8, TEXT),
            "C0": Choice(1.0, TEXT),
            "lr": Choice(0.01, APPENDIX),
            "Z": Choice(100.0, APPENDIX),
            "Z0": Choice(100.0, APPENDIX),
            "tau": Choice(0.7, APPENDIX),
            "lr_global": Choice(0.1, APPENDIX),
            "lr_adapt": Choice(0.1, APPENDIX),
            "batches": Choice(636, "the number of records"),
        },
        fairlens=False,
        every=200,
        title="CelebA",
        quick_rows=640,
        options={"allow_partial": True},
    ),
}
"""Dataset by dataset."""

PUBLISHED: dict[str, Protocol] = {name: dataset.protocol() for name, dataset in SETTINGS.items()}
"""The same as `compare` takes them."""
