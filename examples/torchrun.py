"""Train Adult's network in several processes.

    torchrun --nproc-per-node 2 examples/torchrun.py --epochs 2
    torchrun --nproc-per-node 4 examples/torchrun.py --epochs 2 --checkpoint adult.run

Every process runs this script. With the same --seed, the same number of processes gives the same
model. With --sharded, each process keeps a shard of the parameters. Run again with the same
--checkpoint to continue an interrupted training, with new noise. Only rank 0 prints.
"""

from __future__ import annotations

import argparse
import time

import torch

import evenclip
from evenclip.data import adult
from evenclip.models import mlp


def main() -> None:
    """Train and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="default: from the operating system")
    parser.add_argument("--checkpoint", help="folder; training continues from a checkpoint in it")
    parser.add_argument("--sharded", action="store_true")
    given = parser.parse_args()

    ranks = evenclip.Ranks(sharded=given.sharded)
    train, test, _ = adult()
    start = time.perf_counter()
    result = evenclip.fit(
        mlp(seed=0),
        train,
        rule=evenclip.DPSGDGlobalAdapt(C0=0.5, sigma=1.0),
        epochs=given.epochs,
        lr=0.5,
        seed=given.seed,
        checkpoint=given.checkpoint,
        resume=given.checkpoint is not None,
        device=ranks.device,
        ranks=ranks,
    )
    if ranks.leads:
        seconds = time.perf_counter() - start
        with torch.no_grad():
            right = result.model.cpu()(test.x).argmax(dim=1) == test.y
        print(
            f"{ranks.world} ranks, {len(train):,} records, {result.ledger.steps} steps in "
            f"{seconds:.1f} s"
        )
        print(
            f"accuracy {100 * right.float().mean():.2f} %, Z {float(result.state):.3f}, ε "
            f"{result.epsilon():.3f}"
        )


if __name__ == "__main__":
    main()
