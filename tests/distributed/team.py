"""A team of ranks that do one task after the other: starting a process costs seconds, a task milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Failed(NamedTuple):
    """A task that raised on a rank."""

    kind: str
    said: str


class Team:
    """`world` processes that have found each other; call it with a function of `tasks` and its arguments.

    local and sharded among them are those of `Ranks`; backend is that of a process group that is there before them.
    """

    def __init__(self, world: int, timeout: float = 60.0, backend: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.world, self._processes, self._pipes = world, [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = context.Process(target=_work, args=(theirs, place, timeout, backend), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __call__(self, task: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        """What each rank returns; a `Failed` where it raised, None where it died."""
        for pipe in self._pipes:
            pipe.send((task, given, named))
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Any) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            return None

    def close(self) -> None:
        """Let them go."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _work(pipe: Any, place: dict[str, Any], timeout: float, backend: str | None) -> None:
    """A rank: does what comes until nothing does."""
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # it may have readers; it ends with its pipe
    from evenclip.ranks import Ranks

    if backend is not None:  # somebody's own process group, which is taken as it is
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
            found = task(made[options], *given, **named)
        except (Exception, KeyboardInterrupt) as error:
            found = Failed(type(error).__name__, str(error))
        pipe.send(found)
