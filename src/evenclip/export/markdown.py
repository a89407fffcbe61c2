r"""Text as Markdown: names of columns, groups and classes are data, and no markup.

    escape("loan_*status* | <b>")  ->  loan\_\*status\* \| \<b\>

The result is the given text in a paragraph, a list, a heading and a cell of a table, also at the
start of a line, by CommonMark and by the tables, links and formulas of GitHub. Backslashes do not
work inside `code`, so a name is never put between backticks.
"""

from __future__ import annotations

import re
import textwrap

__all__ = ["escape", "wrapped"]

# Characters that start or end markup anywhere in a line.
_INLINE = re.compile(r"[\\`*_{}\[\]<>|&~#$^]")
# What is markup at the start of a line: bullets, numbers, underlines of headings and tables.
_BLOCK = re.compile(r"^(?:[-+=:]+|\d+[.)])(?!\S)", re.MULTILINE)
# What GitHub makes a link without brackets.
_LINK = re.compile(r":(?=//)|(?<=www)\.", re.IGNORECASE)
# Controls, line and paragraph separators, and marks that reverse the direction of what follows.
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]+")


def escape(text: object) -> str:
    r"""Return a text as Markdown that shows it as it is, in one line.

    White space and control characters become single spaces.

    >>> print(escape("a|b"), escape("1. x"), escape("- y"), escape("<script>"))
    a\|b 1\. x \- y \<script\>
    """
    return _BLOCK.sub(_marked, _inline(text))


def wrapped(text: object, width: int = 100) -> str:
    """Return a text as Markdown in lines of at most `width` columns, where words are not longer."""
    lines = textwrap.fill(_inline(text), width, break_long_words=False, break_on_hyphens=False)
    return _BLOCK.sub(_marked, lines)


def _inline(text: object) -> str:
    """Return a text in one line, without markup inside of it."""
    line = " ".join(_HIDDEN.sub(" ", str(text)).split())
    return _LINK.sub(r"\\\g<0>", _INLINE.sub(r"\\\g<0>", line))


def _marked(word: re.Match[str]) -> str:
    """Escape the punctuation of a word that could start a block."""
    return re.sub(r"[-+=:.)]", r"\\\g<0>", word[0])
