r"""Text for terminals: every character can be written, and no text controls the terminal.

A terminal may have no ε (ASCII, Latin-1): symbols then have a spelling, and other characters are
written as an escape such as `\xe9`. Names in data, files and messages may hold characters that
move the cursor, clear the screen or reverse the direction of writing: these are always written as
an escape.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

__all__ = ["escaped", "finish", "in_line", "prepare", "say", "say_data", "say_json"]

# Controls but the end of a line and tabs; marks of direction; what is invisible; half characters.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_UNSAFE, _BREAK = re.compile(f"[{_HIDDEN}]"), re.compile("[ \t]*[\n\r\v\f]+[ \t]*|\t")
_SPELLINGS = {
    "α": "alpha", "γ": "gamma", "δ": "delta", "ε": "epsilon", "η": "eta", "θ": "theta",
    "λ": "lambda", "μ": "mu", "σ": "sigma", "Δ": "Delta", "Σ": "sum", "∞": "infinity",
    "±": "+-", "–": "-", "—": "-", "−": "-", "…": "...", "×": "x", "·": "*", "†": "(+)",
    "²": "^2", "≤": "<=", "≥": ">=", "≈": "~", "√": "sqrt", "‖": "||", "→": "->", "÷": "/",
    "‘": "'", "’": "'", "“": '"', "”": '"', "•": "-", "\u00a0": " ", "\u202f": " ",
}  # fmt: skip
_ERRORS = "evenclip.spelled"


def escaped(text: object) -> str:
    r"""Return a text whose lines control no terminal.

    >>> print(escaped("a\x1b[31mb"), escaped("2\n\u202e3") == "2\n\\u202e3")
    a\x1b[31mb True
    """
    return _UNSAFE.sub(_escape, str(text))


def in_line(text: object) -> str:
    r"""Return a text in one line, which controls no terminal.

    >>> print(in_line("women\nε 0.1"), in_line("a\x1bb"))
    women ε 0.1 a\x1bb
    """
    return escaped(_BREAK.sub(" ", str(text)))


def _escape(match: re.Match[str]) -> str:
    return _as_escape(match[0])


def _as_escape(character: str) -> str:
    """Return a character as Python writes it in a string."""
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def say(text: object = "", *, error: bool = False) -> None:
    """Print a text for people, escaped, to stdout or stderr."""
    _write(sys.stderr if error else sys.stdout, escaped(text) + "\n")


def say_json(text: str) -> None:
    """Print JSON; what is unsafe, or what the stream cannot take, becomes an escape of JSON."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = re.sub("[^\x00-\x7f]", _json_escape, text)
    _write(sys.stdout, _UNSAFE.sub(_json_escape, text) + "\n")


def _json_escape(match: re.Match[str]) -> str:
    character = match[0]
    return json.dumps(character)[1:-1] if character > "\x7f" else f"\\u{ord(character):04x}"


def say_data(text: str) -> None:
    """Print data: escaped on a terminal, and otherwise as they are, in UTF-8."""
    stream = sys.stdout
    if stream is None or stream.isatty() or not hasattr(stream, "buffer"):
        _write(stream, escaped(text) if stream is not None and stream.isatty() else text)
        return
    with _explained(stream):
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "surrogateescape"))
        stream.buffer.flush()


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        with _explained(stream):
            stream.write(text)
            stream.flush()


@contextmanager
def _explained(stream: TextIO) -> Iterator[None]:
    """Turn an error of writing into a sentence. A reader that has closed the pipe is no mistake."""
    try:
        yield
    except BrokenPipeError:
        _drop(stream)
        raise
    except OSError as error:
        _drop(stream)
        raise OSError(
            f"The output cannot be written ({error.strerror}); make room, or send it elsewhere."
        ) from error


def prepare() -> None:
    """Let stdout and stderr take every character, also those of libraries; note warnings."""
    codecs.register_error(_ERRORS, _spelled)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=_ERRORS)
    if warnings.formatwarning.__module__ != __name__:
        warnings.formatwarning = _as_notes(warnings.formatwarning)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Spell the characters that a stream cannot take."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(
        _SPELLINGS.get(character) or _as_escape(character) for character in wrong
    ), error.end


def _as_notes(form: Callable[..., str]) -> Callable[..., str]:
    """Return a function that formats our warnings as notes, and others without controls."""

    def formatted(message: Any, category: type[Warning], *given: Any, **named: Any) -> str:
        if category is UserWarning:
            return f"note: {in_line(message)}\n"
        return escaped(form(message, category, *given, **named))

    return formatted


def _open_closed_streams() -> None:
    """Open what was closed when the process started, so that no file gets its number."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def finish() -> int:
    """Write what is left to stdout; return the exit status: 1 if its reader, such as `head`, left.

    Raises:
        OSError: the output cannot be written, as on a full disk.
    """
    try:
        if sys.stdout is not None:
            with _explained(sys.stdout):
                sys.stdout.flush()
    except BrokenPipeError:
        return 1
    return 0


def _drop(stream: TextIO) -> None:
    """Send a stream nowhere, so that Python does not fail when it flushes it at the end."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
