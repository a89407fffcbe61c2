"""How a command ends by an exception: a sentence on stderr and an exit status, no traceback.

    1    failed runs, or a pipe whose reader is gone, such as `head`; nothing is printed for that
    2    a user's mistake, in words
    70   a mistake in this package, EX_SOFTWARE of sysexits.h
    71   memory is used up, EX_OSERR
    130  Ctrl-C

With EVENCLIP_TRACEBACK set, a mistake in this package also prints its traceback.
"""

from __future__ import annotations

import os
import traceback

from evenclip import terminal

__all__ = ["status_of"]


def status_of(error: BaseException) -> int:
    """Print what a user has to know about an exception, and return the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if isinstance(error, BrokenPipeError):
        return 1
    sentence, status = _ending(error)
    if status == 70 and os.environ.get("EVENCLIP_TRACEBACK"):
        traceback.print_exception(error)
    terminal.say(f"evenclip: {terminal.in_line(sentence)}", error=True)
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
