"""A team of ranks that run one task after the other, because starting a process takes seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

# Imported once, by the server that ranks are forked from.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "evenclip",
    "evenclip.distributed.ranks",
    "evenclip.distributed.sharded",
]


class Failed(NamedTuple):
    """An error that a task raised on a rank."""

    kind: str
    message: str


class Team:
    """`world` connected processes; call it with a function of `tasks` and its
    arguments.

    `local` and `sharded` among them are those of `Ranks`; `backend` is that of a process group that
    exists already.
    """

    def __init__(self, world: int, timeout: float = 60.0, backend: str | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # The store is ours and the system chooses its port: a port that is chosen first and bound
        # later may be taken.
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.world, self._processes, self._pipes = world, [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port}
            place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
            process = context.Process(
                target=_work, args=(theirs, place, timeout, backend), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __call__(self, task: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        """Return the result of each rank: `Failed` if it raised, None if it died."""
        self.send(task, *given, **named)
        return [self.answer(rank) for rank in range(self.world)]

    def send(self, task: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Start a task on every rank."""
        for pipe in self._pipes:
            pipe.send((task, given, named))

    def answer(self, rank: int) -> Any:
        """Return the result of one rank."""
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return None

    def close(self) -> None:
        """End every rank."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def _work(pipe: Any, place: dict[str, Any], timeout: float, backend: str | None) -> None:
    """Run tasks on a rank until the pipe ends."""
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = (
        False  # it may have readers; it ends with its pipe
    )
    from evenclip.distributed.ranks import Ranks

    if backend is not None:  # an existing process group, which `Ranks` uses
        torch.distributed.init_process_group(backend)
    made: dict[tuple[Any, ...], Ranks] = {}
    while True:
        try:
            task, given, named = pipe.recv()
        except EOFError:
            return
        try:
            options = tuple(named.pop(name, False) for name in ("local", "sharded"))
            if options not in made:
                made[options] = Ranks(local=options[0], sharded=options[1], timeout=timeout)
            outcome = task(made[options], *given, **named)
        except (Exception, KeyboardInterrupt) as error:
            outcome = Failed(type(error).__name__, str(error))
        pipe.send(outcome)
