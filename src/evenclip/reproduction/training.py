"""Settings for training the runs of the paper's tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evenclip.sweep import Executor, ProgressDisplay

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """Settings of `evenclip paper`, the same for every table.

    Attributes:
        seeds: number of seeds.
        device: device to train on.
        tf32: allow a GPU to round the operands of products to 11 bits; the table says so.
        quick: train for one epoch, with a sample of the images; the table is marked.
        data_dir: folder with dataset files; default: $EVENCLIP_DATA.
        store: folder of results; default: the user's cache.
        on: executor of the runs; default: processes on this machine.
        show: progress display; default: none.
    """

    seeds: int = 5
    device: str = "cpu"
    tf32: bool = False
    quick: bool = False
    data_dir: Path | None = None
    store: Path | None = None
    on: Executor | None = None
    show: ProgressDisplay | None = None
