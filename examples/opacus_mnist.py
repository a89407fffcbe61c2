"""Train MNIST with DPSGD-Global-Adapt in an Opacus loop with one changed line, and with `fit`.

    EVENCLIP_DATA=data python examples/opacus_mnist.py --epochs 2 --mode hooks

Needs the four files of MNIST in data/mnist and `pip install 'evenclip[opacus]'`. Both loops have
the same network, initialisation, q, B and number of steps; each draws its own batches and noise.
Prints test accuracy, accuracy of the rare class 8, ε and seconds of both.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenclip
from evenclip.data import Dataset, mnist
from evenclip.models import cnn
from evenclip.opacus import even

B, LR, DELTA = 256, 0.1, 1e-6
# The settings of App. B of the paper.
RULE = evenclip.DPSGDGlobalAdapt(C0=1.0, sigma=0.8, Z0=50.0, tau=0.7, eta_Z=0.1, sigma_count=10.0)


def main() -> None:
    """Train both ways and print one line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mode", default="hooks", choices=["hooks", "functorch", "ew"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=int, help="train on this many records")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "Secure RNG turned off|Full backward hook is firing")

    train, test, _ = mnist(given.seed)
    n = len(train) if given.records is None else given.records
    x, y = floats(train.x[:n]), train.y[:n]
    print(f"{n:,} training records, {given.epochs} epochs, {RULE}")
    report("Opacus, " + given.mode, *with_opacus(x, y, given.epochs, given.mode, given.seed), test)
    report("evenclip.fit", *with_fit(x, y, given.epochs, given.seed), test)


def with_opacus(
    x: torch.Tensor, y: torch.Tensor, epochs: int, mode: str, seed: int
) -> tuple[nn.Module, float, float, float]:
    """Train with Opacus; return network, Z, ε and seconds."""
    model = network = cnn(seed=seed)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=B),
        noise_multiplier=RULE.sigma,
        max_grad_norm=RULE.C0,
        grad_sample_mode=mode,
    )
    optimizer = even(optimizer, RULE, engine, loader)  # the one changed line
    criterion = nn.CrossEntropyLoss()
    start = time.perf_counter()
    for _ in range(epochs):
        for xb, yb in loader:
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    return network, float(optimizer.rule_state), engine.get_epsilon(DELTA), seconds


def with_fit(
    x: torch.Tensor, y: torch.Tensor, epochs: int, seed: int
) -> tuple[nn.Module, float, float, float]:
    """Train with `fit` at the q of Opacus's loader; return network, Z, ε and seconds."""
    batches = -(-len(x) // B)
    start = time.perf_counter()
    result = evenclip.fit(
        cnn(seed=seed),
        (x, y),
        rule=RULE,
        q=1 / batches,
        epochs=epochs,
        batch_size=B,
        lr=LR,
        delta=DELTA,
        seed=seed,
    )
    return (
        result.model,
        float(result.state),
        result.epsilon() or float("nan"),
        time.perf_counter() - start,
    )


def report(
    name: str, model: nn.Module, Z: float, epsilon: float, seconds: float, test: Dataset
) -> None:
    """Print the accuracy and cost of one run."""
    with torch.no_grad():
        predicted = [model(floats(chunk)).argmax(dim=1) for chunk in test.x.split(1000)]
    right = torch.cat(predicted) == test.y
    accuracy, rare = 100 * right.float().mean(), 100 * right[test.y == 8].float().mean()
    print(
        f"{name:16} accuracy {accuracy:.2f} %, of 8: {rare:.2f} %, Z {Z:.2f}, ε {epsilon:.3f}, "
        f"{seconds:.0f} s"
    )


def floats(x: torch.Tensor) -> torch.Tensor:
    """Convert bytes to float32 in [0, 1]."""
    return x.float() / 255


if __name__ == "__main__":
    main()
