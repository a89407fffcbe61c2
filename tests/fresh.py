"""Run code in a new process that has imported torch already: that import takes most of a start.

The server from which processes are forked starts with the first use. It imports torch and nothing
else of what tests look for in `sys.modules`.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

import torch

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch"])


def fresh(code: str, *arguments: str) -> str:
    """Run code in a new process, in which a warning is an error; return what it prints.

    Args:
        code: the program.
        arguments: `sys.argv[1:]` of the program.

    Raises:
        AssertionError: the program ended with an exception, which is the message.
    """
    ours, theirs = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(theirs, code, arguments, dict(os.environ)))
    process.start()
    theirs.close()
    try:
        printed, failure = ours.recv()
    finally:
        process.join()
        process.close()
    assert failure is None, failure
    return printed


def _run(
    result: Connection, code: str, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    sys.argv[1:], sys.dont_write_bytecode = arguments, True
    os.environ.clear()  # the server's, which are those of its start
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    printed, failure = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "<fresh>", "exec"), {"__name__": "__main__"})
    except BaseException:
        failure = traceback.format_exc()
    result.send((printed.getvalue(), failure))
