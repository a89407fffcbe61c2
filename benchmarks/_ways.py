"""The measured training loops; each yields after every step.

- plain SGD: shuffled batches, loss.backward(), SGD
- plain compiled: the same with gather, forward pass, loss and backward pass compiled
- evenclip: the step of `fit`: Poisson batch, gather, passes, norms, noise, ledger, update, trace
- evenclip compiled: the same with Performance(compile=True)
- Opacus ghost, Opacus hooks: as in its documentation, with its own Poisson loader

Plain training drops the last, smaller batch of an epoch, because it would be compiled again. Only
public names of evenclip are used, so that before_after.py can measure older source trees.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from _cases import CASES, data, floats
from _measure import Loop
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import evenclip

__all__ = ["LR", "WAYS", "Setup", "loop", "steps"]

LR = 0.01
WAYS = (
    "plain SGD",
    "plain compiled",
    "evenclip",
    "evenclip compiled",
    "Opacus ghost",
    "Opacus hooks",
)


@dataclass(frozen=True)
class Setup:
    """Model, batch size and device of a measurement.

    Attributes:
        case: name of the model.
        batch: (expected) batch size.
        device: cpu or cuda.
        tf32: whether float32 products may use TF32, in all loops.
    """

    case: str
    batch: int
    device: str = "cpu"
    tf32: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """Return the initial model."""
        return CASES[self.case].make(seed).to(self.device)

    def data(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return samples and targets on the device."""
        return data(CASES[self.case], self.batch, self.device, seed)


def loop(way: str, setup: Setup) -> Loop:
    """Return the training loop of this name."""
    if way.startswith("plain"):
        return plain(setup, compile="compiled" in way)
    if way.startswith("evenclip"):
        return private(setup, compile="compiled" in way)
    if way.startswith("Opacus"):
        return opacus(setup, way.removeprefix("Opacus "))
    raise ValueError(f"There is no way {way!r}; choose one of {', '.join(WAYS)}.")


# --- plain ---


def _rows(n: int, batch: int, device: str) -> Iterator[Tensor]:
    """Yield shuffled batches forever."""
    while True:
        yield from torch.randperm(n, device=device)[: n // batch * batch].split(batch)


class _Loss:
    """Mean loss of some rows of the data."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        return cross_entropy(self.model(floats(x[rows])), y[rows])


def plain(setup: Setup, *, compile: bool = False) -> Loop:
    """Train without privacy."""
    model, (x, y) = setup.model(), setup.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss = torch.compile(_Loss(model).__call__) if compile else _Loss(model)
    for rows in _rows(len(y), setup.batch, setup.device):
        optimizer.zero_grad()
        loss(x, y, rows).backward()
        optimizer.step()
        yield


# --- evenclip ---


def private(setup: Setup, *, compile: bool = False) -> Loop:
    """Train as `fit` does, yielding after every step."""
    with warnings.catch_warnings():  # `fit` would warn and take the plain step
        warnings.filterwarnings("error", message="The step is not compiled")
        run = evenclip.prepare(
            setup.model(),
            setup.data(),
            rule=evenclip.DPSGDGlobalAdapt(C0=1.0, sigma=1.0),
            epochs=10_000,
            batch_size=setup.batch,
            lr=LR,
            seed=0,
            device=setup.device,
            performance=evenclip.Performance(compile=compile, tf32=setup.tf32),
        )
    return steps(run)


def steps(run: evenclip.Run) -> Loop:
    """Take the steps of a run."""
    with run.listening():
        while True:
            run.update(run.step())
            yield run.settings.ends(run.t)


# --- Opacus ---


def opacus(setup: Setup, mode: str) -> Loop:
    """Train with Opacus as in its documentation, with Poisson batches.

    Its validator replaces layers that it does not support.
    """
    if importlib.util.find_spec("opacus") is None:
        raise ModuleNotFoundError("Opacus is not installed")
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator
    from torch.utils.data import DataLoader, TensorDataset

    x, y = setup.data()
    loader = DataLoader(TensorDataset(x.cpu(), y.cpu()), batch_size=setup.batch)
    model = setup.model()
    if not ModuleValidator.is_valid(model):
        model = ModuleValidator.fix(model).to(setup.device)
    ghost = mode == "ghost"
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        **({"criterion": nn.CrossEntropyLoss()} if ghost else {}),
    )
    model, optimizer, criterion, loader = (
        made if ghost else (made[0], made[1], nn.CrossEntropyLoss(), made[2])
    )
    while True:
        for xb, yb in loader:
            optimizer.zero_grad()
            criterion(model(floats(xb.to(setup.device))), yb.to(setup.device)).backward()
            optimizer.step()
            yield
