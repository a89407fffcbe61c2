"""Read and run the fenced blocks of the documentation's pages.

The blocks of a page run in order, in one namespace and in the current folder. If the first line of
a Python block is a comment with the name of a file, the block is also written to that file.
Commands that start with `evenclip` run with few seeds and epochs. A block that cannot be run in
seconds has the reason in a comment before it,

    <!-- not run: the reason -->

and is only compiled or parsed.
"""

from __future__ import annotations

import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from evenclip.cli import app, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)\s*$", re.M | re.S
)
REASON = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
SHELL = ("sh", "console", "bash")
# Appended options, so that a command takes seconds; the last of two equal options counts.
QUICK = {
    "compare": ["--seeds", "1", "--epochs", "1", "--lr", "0.1", "--workers", "1"],
    "train": ["--epochs", "1"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a shell block, as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            words
            for line in lines
            if (words := shlex.split(line.removeprefix("$ "), comments=True))
        ]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    read = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = REASON.search(before)
        line = before.count("\n") + 2  # of the block's first line
        read.append(Block(page, line, match["language"], match["text"], reason and reason[1]))
    return read


def every_block() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def run_page(page: Path, folder: Path) -> types.ModuleType:
    """Run all blocks of a page in order; return its namespace."""
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module  # dataclasses look up their module
    try:
        for block in blocks(page):
            if block.language == "python":
                run_python(block, folder, module)
            elif block.language in SHELL:
                run_commands(block)
    finally:
        del sys.modules[module.__name__]
    return module


def run_python(block: Block, folder: Path, module: types.ModuleType) -> None:
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    file = re.match(r"# ([\w/]+\.py)\n", block.text)
    if file:
        (folder / file[1]).write_text(block.text, encoding="utf-8")
    if block.reason is None:
        exec(code, module.__dict__)


def run_commands(block: Block) -> None:
    for words in block.commands:
        if words[0] == "evenclip":
            parse(words[1:])
            if block.reason is None:
                run_command(words[1:])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words
        elif words[0].endswith("python") and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words


def parse(words: list[str]) -> None:
    """Raise for a command that `evenclip` does not accept."""
    command, context = typer.main.get_command(app), None
    while True:
        context = command.make_context(command.name or "evenclip", list(words), parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return
        _, command, words = command.resolve_command(context, rest)


def run_command(words: list[str]) -> None:
    quick = QUICK.get(words[0], [])
    if words[0] == "compare" and "--rules" not in words:
        quick = [*quick, "--rules", "dpsgd-global-adapt"]
    with pytest.raises(SystemExit) as end:
        main([*words, *quick])
    assert not end.value.code, f"evenclip {shlex.join(words)} ended with status {end.value.code}"
