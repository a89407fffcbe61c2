"""Map a function over a pool of processes, one thread each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import TypeVar

import torch

from evenclip.sweep.process import cores

__all__ = ["map_processes"]

S = TypeVar("S")
T = TypeVar("T")


def map_processes(
    work: Callable[[S], T], items: Sequence[S], workers: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield (index, work(item)) of every item in order of completion.

    At most `workers` processes run at a time, one per core unless given.
    """
    if not items:
        return
    spawn = multiprocessing.get_context("spawn")  # a process that uses a GPU cannot be forked
    with ProcessPoolExecutor(
        min(workers or cores(), len(items)),
        mp_context=spawn,
        initializer=partial(torch.set_num_threads, 1),
    ) as pool:
        running = {pool.submit(work, item): index for index, item in enumerate(items)}
        for future in as_completed(running):
            yield running[future], future.result()
