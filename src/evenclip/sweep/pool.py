"""Map a function over processes, one thread each.

    driver -> process    pickle of (function, item)
    process -> driver    pickle of (whether it returned, value or error)

Python's own pool of processes imports the user's script again, with the current folder in the path;
these processes do neither (`sweep.process`).
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from evenclip.sweep.process import check_handles, close, cores, death, end, start

__all__ = ["main", "map_processes"]

S = TypeVar("S")
T = TypeVar("T")

_Outcome = tuple[int, bool, Any]  # index of the item; whether it returned; value or error


def map_processes(
    work: Callable[[S], T], items: Sequence[S], workers: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield (index, work(item)) of every item in order of completion.

    At most `workers` processes run at a time, one per core unless given.

    Raises:
        Exception: what `work` raised.
        RuntimeError: a process was killed.
    """
    size = min(workers or cores(), len(items))
    check_handles(size)
    waiting, outcomes = deque(enumerate(items)), queue.SimpleQueue[_Outcome]()
    processes = [start("evenclip.sweep.pool") for _ in range(size)]
    threads = [
        threading.Thread(target=_feed, args=(process, work, waiting, outcomes), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in items:
            index, returned, value = outcomes.get()
            if not returned:
                raise value
            yield index, value
    finally:
        waiting.clear()
        for process, thread in zip(processes, threads, strict=True):
            process.kill()  # it is idle, or its result is not needed
            if thread.is_alive():
                thread.join()
            end(process, at_once=True)
            close(process)


def _feed(
    process: subprocess.Popen[bytes],
    work: Callable[[S], T],
    waiting: deque[tuple[int, S]],
    outcomes: queue.SimpleQueue[_Outcome],
) -> None:
    """Give a process one item after the other."""
    assert process.stdin is not None
    assert process.stdout is not None
    while True:
        try:
            index, item = waiting.popleft()
        except IndexError:
            return
        try:
            pickle.dump((work, item), process.stdin)
            process.stdin.flush()
            returned, value = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            returned, value = False, RuntimeError(f"A run failed: {death(process.wait())}.")
        except Exception as error:
            returned, value = False, error
        outcomes.put((index, returned, value))


def main() -> None:
    """Compute items until the input ends."""
    import torch

    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the results
    while True:
        try:
            work, item = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)
        except Exception as error:
            out.write(_failed(error))
        else:
            out.write(_outcome(work, item))
        out.flush()


def _outcome(work: Callable[[S], T], item: S) -> bytes:
    """Return the pickle of what a function returned or raised."""
    try:
        return pickle.dumps((True, work(item)))
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> bytes:
    """Return the pickle of an error, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        content = pickle.dumps((False, error))
        pickle.loads(content)
    except Exception:
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return content
