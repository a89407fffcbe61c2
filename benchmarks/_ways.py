"""The ways to train that are measured, each as a loop that pauses after every step.

| way | what is timed |
|---|---|
| plain SGD | the loop that everybody writes: shuffled batches, loss.backward(), SGD |
| plain compiled | the same with gather, forward pass and loss through torch.compile, and so the backward pass |
| plain graphed | on a GPU: that, and the update, recorded as one CUDA graph |
| evenclip | `fit`'s own step: Poisson batch, gather, passes, norms, noise, ledger, update, trace |
| evenclip compiled | the same with Performance(compile=True) |
| stack, per run | five rules with five seeds each as one computation; a 25th of its step |
| Opacus ghost, hooks | as its documentation has it, with its own Poisson loader |

The last, smaller batch of an epoch is left out in plain training: it would be compiled anew.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from _cases import CASES, data, floats, grouped
from _measure import Loop
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import evenclip
from evenclip.stack import Stack
from evenclip.train import reeled

__all__ = ["RULES", "SEEDS", "Setup", "loop", "runs_of", "stacked", "ways"]

LR = 0.01
SEEDS = 5
RULES: tuple[evenclip.Rule, ...] = (
    evenclip.DPSGD(),
    evenclip.DPSGDF(),
    evenclip.DPSGDGlobal(Z=2.0),
    evenclip.DPSGDGlobalAdapt(),
    evenclip.NonPrivate(),
)


@dataclass(frozen=True)
class Setup:
    """What is trained, and where.

    Attributes:
        case: name of the model.
        batch: its (expected) size.
        device: cpu or cuda.
        tf32: whether products of float32 may be taken in TF32, on both sides.
    """

    case: str
    batch: int
    device: str = "cpu"
    tf32: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """As it starts."""
        return CASES[self.case].make(seed).to(self.device)

    def data(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Samples and targets, on the device."""
        return data(CASES[self.case], self.batch, self.device, seed)


def ways(device: str, *, stack: bool, stack_compiled: bool) -> list[str]:
    """What can be measured on a device."""
    found = ["plain SGD", "plain compiled", *(["plain graphed"] if device != "cpu" else [])]
    found += ["evenclip", "evenclip compiled"]
    # On a GPU a stack is recorded as one graph either way; compiled is how it is meant to be used there.
    found += ["stack, per run"] if stack and device == "cpu" else []
    found += ["stack compiled, per run"] if stack and (stack_compiled or device != "cpu") else []
    return [*found, "Opacus ghost", "Opacus hooks"]


def runs_of(way: str) -> int:
    """How many runs a step of this way moves."""
    return SEEDS * len(RULES) if way.startswith("stack") else 1


def loop(way: str, setup: Setup) -> Loop:
    """The training loop of one way."""
    performance = evenclip.Performance(compile="compiled" in way, tf32=setup.tf32)
    if way == "plain SGD":
        return plain(setup)
    if way == "plain compiled":
        return plain(setup, compile=True)
    if way == "plain graphed":
        return graphed(setup)
    if way.startswith("evenclip"):
        return alone(setup, performance)
    if way.startswith("stack"):
        return rules_and_seeds(setup, performance)
    if way.startswith("Opacus"):
        return opacus(setup, way.removeprefix("Opacus "))
    raise ValueError(f"There is no way {way!r}.")


# --- plain ---


def _rows(n: int, batch: int, device: str) -> Iterator[Tensor]:
    """Shuffled batches, for ever."""
    while True:
        yield from torch.randperm(n, device=device)[: n // batch * batch].split(batch)


class _Loss:
    """The mean loss of some rows of the data."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        return cross_entropy(self.model(floats(x[rows])), y[rows])


def plain(setup: Setup, *, compile: bool = False) -> Loop:
    """Non-private training."""
    model, (x, y) = setup.model(), setup.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss = torch.compile(_Loss(model).__call__) if compile else _Loss(model)
    for rows in _rows(len(y), setup.batch, setup.device):
        optimizer.zero_grad()
        loss(x, y, rows).backward()
        optimizer.step()
        yield


def graphed(setup: Setup) -> Loop:
    """Non-private training as quick as a GPU does it: one launch a step."""
    model, (x, y) = setup.model(), setup.data()
    parameters, loss = list[Tensor](model.parameters()), torch.compile(_Loss(model).__call__)
    place = torch.arange(setup.batch, device=setup.device)

    def step() -> None:
        gradients = torch.autograd.grad(loss(x, y, place), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-LR)

    apart = torch.cuda.Stream()
    apart.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(apart):
        for _ in range(3):  # compiled, and algorithms chosen, before it is recorded
            step()
    torch.cuda.current_stream().wait_stream(apart)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for rows in _rows(len(y), setup.batch, setup.device):
        place.copy_(rows)
        graph.replay()
        yield


# --- evenclip ---


def alone(setup: Setup, performance: evenclip.Performance) -> Loop:
    """`fit` itself, paused after every step.

    Compiled on a GPU, that is with the batches of an epoch on the device.
    """
    run = evenclip.prepare(
        setup.model(), setup.data(), rule=evenclip.DPSGDGlobalAdapt(C0=1.0, sigma=1.0), epochs=10_000,
        batch_size=setup.batch, lr=LR, seed=0, device=setup.device, performance=performance,
    )  # fmt: skip
    return steps(run, performance)


def steps(run: evenclip.Run, performance: evenclip.Performance) -> Loop:
    """The steps of a run."""
    with _no_excuses(performance.compile) as check:
        stack = reeled(run)
        if stack is None:
            with run.listening():
                check()
                while True:
                    run.update(run.step())
                    yield run.ended
        check()
        yield from _epochs(stack)


def rules_and_seeds(setup: Setup, performance: evenclip.Performance) -> Loop:
    """What a comparison trains: every rule with every seed, a seed having its own start and its own data."""
    parts = [(setup.model(seed), grouped(setup.data(seed)), seed) for seed in range(SEEDS)]
    plain = evenclip.Performance(tf32=performance.tf32)  # the stack has its own step
    runs = [
        evenclip.prepare(
            model, given, rule=rule, epochs=10_000, batch_size=setup.batch, lr=LR, seed=seed, device=setup.device,
            performance=plain,
        )
        for model, given, seed in parts
        for rule in RULES
    ]  # fmt: skip
    return stacked(runs, compile=performance.compile)


def stacked(runs: list[evenclip.Run], *, compile: bool) -> Loop:
    """The steps of a stack."""
    with _no_excuses(compile) as check:
        stack = Stack(runs, compile=compile)
        check()
        yield from _epochs(stack)


def _epochs(stack: Stack) -> Loop:
    with stack.listening():
        while True:
            stack.step()
            yield stack.runs[0].settings.ends(stack.t)


@contextmanager
def _no_excuses(compile: bool) -> Iterator[Any]:
    """What is yielded raises if a step was to be compiled and was not: evenclip goes on without saying so."""
    heard = _Excuses()
    logger = logging.getLogger("evenclip")
    before = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.DEBUG)

    def check() -> None:
        logger.removeHandler(heard)
        logger.setLevel(before)
        if compile and heard.messages:
            raise RuntimeError(heard.messages[0])

    yield check


class _Excuses(logging.Handler):
    """Keeps what the engine says about a step that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if said.startswith(("no program", "not compiled", "not on a reel")):
            self.messages.append(said)


# --- Opacus ---


def opacus(setup: Setup, mode: str) -> Loop:
    """Opacus as its documentation has it, with Poisson batches; layers it has no rule for are replaced by its own."""
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
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, grad_sample_mode=mode, **({"criterion": nn.CrossEntropyLoss()} if ghost else {}),
    )  # fmt: skip
    model, optimizer, criterion, loader = made if ghost else (made[0], made[1], nn.CrossEntropyLoss(), made[2])
    while True:
        for xb, yb in loader:
            optimizer.zero_grad()
            criterion(model(floats(xb.to(setup.device))), yb.to(setup.device)).backward()
            optimizer.step()
            yield
