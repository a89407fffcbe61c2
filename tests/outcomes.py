"""The three outcomes that damaged input may have, for the tests in `tests/faults`.

SAME: the answer is the one of the undamaged input. NOTED: the answer differs, and a note names what
is damaged. REFUSED: a sentence says what is wrong. Anything else is an assertion error: a changed
answer in silence, or an exception that is no sentence.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from evenclip.cli import main

SAME, NOTED, REFUSED = "same", "noted", "refused"
MISTAKES = (ValueError, TypeError, OSError)  # what the command line prints as a sentence


class Answer(NamedTuple):
    """What a command or call gave: a value and notes, or a refusal."""

    value: Any
    notes: str
    refusal: str | None


def called(attempt: Callable[[], Any]) -> Answer:
    """Return the value of a call with its warnings, or its refusal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = attempt()
        except MISTAKES as error:
            return Answer(None, "", str(error))
    return Answer(value, "\n".join(str(warning.message) for warning in caught), None)


def commanded(*arguments: Any) -> Answer:
    """Return what a command prints, with what it says on stderr, or its refusal."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
        warnings.simplefilter("error")
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code or 0
    if status:
        return Answer(None, "", err.getvalue().removeprefix("evenclip: ").rstrip("\n"))
    return Answer(out.getvalue(), err.getvalue(), None)


def outcome(clean: Any, answer: Answer, *names: str, same: Callable[[Any, Any], bool]) -> str:
    """Return SAME, NOTED or REFUSED.

    Args:
        clean: the answer to the undamaged input.
        answer: the answer to the damaged one.
        *names: what a note or a refusal must name, one of them; none if any will do.
        same: whether two answers are equal.

    Raises:
        AssertionError: the answer changed in silence, or the refusal is no sentence.
    """
    if answer.refusal is not None:
        check_sentence(answer.refusal)
        assert not names or any(name in answer.refusal for name in names), answer.refusal
        return REFUSED
    if same(clean, answer.value):
        return SAME
    assert answer.notes, f"SILENT the answer changed without a note: {str(answer.value)[:200]}"
    assert not names or any(name in answer.notes for name in names), f"SILENT {answer.notes}"
    return NOTED


def check_sentence(text: str) -> None:
    """Raise unless a message is one sentence for a user."""
    assert text, "an empty message"
    assert text.endswith("."), text
    assert "\n" not in text, text
    assert "Traceback" not in text, text
    for crude in (
        "[Errno",
        "unhashable",
        "object is not",
        "has no attribute",
        "unexpected keyword",
    ):
        assert crude not in text, text
