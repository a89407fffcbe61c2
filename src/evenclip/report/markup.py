"""Text as HTML."""

from __future__ import annotations

import html
import re

__all__ = ["text", "unbroken", "wide"]


def text(value: object) -> str:
    """Escape a value for HTML."""
    return html.escape(str(value))


def unbroken(sentence: str) -> str:
    """Escape a sentence, and prevent line breaks within names of rules."""
    return re.sub(
        r"DPSGD(-[A-Za-z]+)+", lambda name: f'<span class="nb">{name[0]}</span>', text(sentence)
    )


def wide(label: str, table: str) -> str:
    """Return a table in a region that scrolls if the page is too narrow."""
    return f'<div class="wide" role="region" aria-label="{text(label)}" tabindex="0">{table}</div>'
