"""How a command ends by an exception: a sentence on stderr and an exit status, no traceback.

    2    a user's mistake, in words
    70   a mistake in this package, EX_SOFTWARE of sysexits.h
    71   memory is used up, EX_OSERR
    130  Ctrl-C
    141  the reader of a pipe closed it, as a shell reports SIGPIPE; nothing is printed

With EVENCLIP_TRACEBACK set, a mistake in this package also prints its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress

__all__ = ["status_of"]


def status_of(error: BaseException) -> int | str | None:
    """Print what a user has to know about an exception, and return the exit status."""
    if isinstance(error, SystemExit):
        return error.code
    if isinstance(error, BrokenPipeError):
        with suppress(OSError):  # a stream of a test has no descriptor
            # Python flushes stdout again at its end, which would print this error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    sentence, status = _ending(error)
    if status == 70 and os.environ.get("EVENCLIP_TRACEBACK"):
        traceback.print_exception(error)
    print(f"evenclip: {sentence}", file=sys.stderr)
    return status


def _ending(error: BaseException) -> tuple[str, int]:
    """Return the sentence and the exit status of an exception."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted.", 130
    if isinstance(error, MemoryError):
        return "memory is used up; close other programs, or use a smaller model or batch.", 71
    if isinstance(error, OSError) and error.errno is not None:
        names = " and ".join(str(n) for n in (error.filename, error.filename2) if n is not None)
        return f"{names or 'a file'} cannot be used ({error.strerror}); name another one.", 2
    # A message of this package is a sentence; that of a library, which no code expected, is none.
    is_sentence = str(error).rstrip().endswith((".", "…"))
    if isinstance(error, ImportError | OSError) or (
        is_sentence and isinstance(error, ValueError | TypeError)
    ):
        return str(error), 2
    text = " ".join(str(error).split()).removesuffix(".")
    return (
        f"internal error: {type(error).__name__}{': ' * bool(text)}{text}. This is a mistake in "
        "evenclip; set EVENCLIP_TRACEBACK=1, run the command again, and please report what it "
        "prints.",
        70,
    )
