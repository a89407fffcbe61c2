"""How the runs of the paper's tables are trained: what all tables take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evenclip.sweep import Executor, Show

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """Settings of a command that change no table but for its marks.

    Attributes:
        seeds: number of seeds.
        device: where to train.
        tf32: whether a GPU may round the operands of products to 11 bits; the table says so.
        quick: one epoch, and of images a sample; the table is marked.
        data_dir: folder with the files of datasets; EVENCLIP_DATA unless given.
        store: folder of results; the user's cache unless given.
        on: what carries out the runs; processes of this machine unless given.
        show: what is told about progress.
    """

    seeds: int = 5
    device: str = "cpu"
    tf32: bool = False
    quick: bool = False
    data_dir: Path | None = None
    store: Path | None = None
    on: Executor | None = None
    show: Show | None = None
