"""Text as Markdown: for any name, a parser finds the name and no markup."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenclip.export.markdown import escape, wrapped

# Names made of what Markdown, its tables and HTML give a meaning to, and of anything else.
MARKUP = "\\\\`*_{}[]()<>|&~#+-=.!:^$@/\"' \n\t\r0123456789ab\u2028\u202e\x00"
NAMES = st.one_of(st.text(), st.text(alphabet=MARKUP), st.text(alphabet=MARKUP, max_size=5))
EXAMPLES = [
    "| a | b |", "`code`", "*x* **y** _z_ __w__", "[x](javascript:alert(1))", "![x](y)",
    "<script>alert(1)</script>", "<!-- x", "a\n\n# b", "a\n---", "a\n===", "1. x", "- x", "+ x",
    "> x", "```\nx\n```", "&lt;b&gt;", "&#42;x&#42;", "~~x~~", "a\\", "\\", "a  \nb",
    "    indented",
    "[x]: http://y", "<http://x.y>", "http://x.y", "www.x.y", "a | b\n-|-\nc | d", "x^[y]", "$x$",
    "a\n:-", "###### x ######", "* * *", "", " ",
]  # fmt: skip


def plain(text):
    """Return a text in one line, by the categories of its characters."""
    hidden = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff"}
    shown = "".join(
        " " if c in hidden or unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text
    )
    return " ".join(shown.split())


def examples(test):
    """Run a test on all examples, and then on names that hypothesis finds."""
    for name in EXAMPLES:
        test = example(name)(test)
    return given(NAMES)(test)


def parsed(markdown):
    """Return the types of the blocks, and the text of each piece of text, by a parser."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark")
    tokens = parser.enable(["table", "strikethrough"]).parse(markdown)
    texts = []
    for token in tokens:
        if token.type == "inline":
            assert {child.type for child in token.children} <= {"text", "softbreak"}
            texts.append(
                "".join("\n" if c.type == "softbreak" else c.content for c in token.children)
            )
    return [token.type for token in tokens if token.type != "inline"], texts


@examples
def test_a_name_is_text_wherever_it_stands(name):
    shown, cell = plain(name), escape(name)
    kinds, texts = parsed(f"x {cell}\n\n* x {cell}\n\n# x {cell}\n")
    assert [kind for kind in kinds if kind.endswith("open")] == [
        "paragraph_open", "bullet_list_open", "list_item_open", "paragraph_open", "heading_open",
    ]  # fmt: skip
    assert texts == [f"x {shown}".strip()] * 3
    kinds, texts = parsed(f"| {cell} | y |\n|---|---|\n| {cell} | z |\n")
    assert kinds.count("td_open") == kinds.count("th_open") == 2
    assert texts == [shown, "y", shown, "z"]


@examples
def test_a_name_at_the_start_of_a_line_is_a_paragraph(name):
    for markdown in (escape(name), wrapped(name, width=4), wrapped(name)):
        kinds, texts = parsed(markdown)
        assert kinds == (["paragraph_open", "paragraph_close"] if plain(name) else [])
        assert [text.replace("\n", " ") for text in texts] == [plain(name)] * bool(plain(name))


@examples
def test_by_rules_too(name):
    """Every character with a meaning has a backslash, also where no parser is installed."""
    for markdown in (escape(name), wrapped(name, width=10)):
        bare = re.sub(r"\\[!-/:-@\[-`{-~]", "x", markdown)
        assert not re.search(r"[\\`*_{}\[\]<>|&~#$^]", bare)
        assert not re.search(r"^([-+=:]+|[0-9]+[.)])(\s|$)", bare, re.MULTILINE)
        assert not re.search(r"(?<!\\)://", markdown)
    assert "\n" not in escape(name)
    assert plain(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", escape(name))) == plain(name)


@pytest.mark.parametrize("text", ["A plain sentence, with (brackets): 0.5 %, x - y = 1.", "ε ≤ 3"])
def test_plain_text_stays_as_it_is(text):
    assert escape(text) == text == wrapped(text)


def test_lines_are_wrapped():
    assert wrapped("word " * 40, width=30).splitlines() == ["word word word word word word"] * 6 + [
        "word word word word"
    ]
