"""Carry out each recipe of CONTRIBUTING.md exactly as written, in a copy of the repository.

The blocks of a section are taken in order: a Python block is written to the file that its first
line names, a diff is applied, a command runs. `make test` becomes a call of pytest, because make
would install another environment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT, SHELL, Block, blocks

PAGE = ROOT / "CONTRIBUTING.md"
FILE = re.compile(r"# ([\w/]+\.py)\n")
HUNK = re.compile(r"^@@.*\n", re.MULTILINE)
# The command line with one worker, because the start of a second takes seconds.
COMMAND = "import os; os.sched_getaffinity = lambda _: {0}; from evenclip.cli import main; main()"
COPIED = ("src", "tests", "pyproject.toml", "Makefile")


def recipes() -> dict[str, list[Block]]:
    """The sections of the page that end in a command, with their blocks."""
    headings = [
        (number, line.removeprefix("## "))
        for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), start=1)
        if line.startswith("## ")
    ]
    found = dict[str, list[Block]]()
    for block in blocks(PAGE):
        section = [name for number, name in headings if number < block.line][-1]
        found.setdefault(section, []).append(block)
    return found


@pytest.fixture
def copy(tmp_path):
    """A copy of what the recipes need of the repository."""
    ignored = shutil.ignore_patterns("evidence", "browser", "reproduction.json")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def carry_out(block: Block, folder: Path) -> None:
    """Write the block's file, apply its diff, or run its commands."""
    if block.language == "python":
        name = FILE.match(block.text)
        assert name is not None, f"{PAGE.name}:{block.line} names no file in its first line"
        (folder / name[1]).write_text(block.text, encoding="utf-8")
    elif block.language == "diff":
        apply(block.text, folder)
    else:
        assert block.language in SHELL, block.language
        for words in block.commands:
            run(words, folder)


def apply(diff: str, folder: Path) -> None:
    """Apply a diff without line numbers: the lines around each change must occur exactly once."""
    head, *hunks = HUNK.split(diff)
    path = folder / head.removeprefix("--- ").strip()
    text = path.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
        assert {sign for sign, _ in lines} <= set(" +-\n"), hunk
        old = "".join(line or sign for sign, line in lines if sign != "+")
        new = "".join(line or sign for sign, line in lines if sign != "-")
        assert text.count(old) == 1, (
            f"{PAGE.name}: the diff of {path.name} no longer fits; the file has these lines "
            f"{text.count(old)} times, so change the lines on the page:\n{old}"
        )
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def run(words: list[str], folder: Path) -> None:
    """Run a command with the copied package."""
    if words[:2] == ["make", "test"]:
        assert re.search(
            r"^test:.*\n\t.*-m pytest.*\$\(ARGS\)", (folder / "Makefile").read_text(), re.M
        )
        arguments = shlex.split(words[2].removeprefix("ARGS="))
        words = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *arguments]
    elif words[0] == "evenclip":
        words = [sys.executable, "-c", COMMAND, *words[1:]]
    environment = {
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "EVENCLIP_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{shlex.join(words)} failed:\n{done.stdout}"


def changed(folder: Path) -> list[str]:
    """The Python files of the copy that the repository has not, or has with another content."""
    return [
        str(path)
        for path in sorted(folder.rglob("*.py"))
        if not (original := ROOT / path.relative_to(folder)).is_file()
        or original.read_bytes() != path.read_bytes()
    ]


@pytest.mark.parametrize("recipe", recipes())
def test_a_recipe_works_as_it_is_written(recipe, copy):
    for block in recipes()[recipe]:
        carry_out(block, copy)
    assert changed(copy)
    for style in (["check", "-q"], ["format", "--check", "-q"]):
        run([sys.executable, "-m", "ruff", *style, *changed(copy)], copy)


def test_the_page_has_the_recipes_and_each_ends_in_its_proof():
    assert list(recipes()) == ["Add a rule", "Add a layer formula", "Add a dataset"]
    for steps in recipes().values():
        assert steps[-1].commands[-1][:2] == ["make", "test"]
        assert {block.language for block in steps} <= {"python", "diff", *SHELL}


def test_a_mistake_in_a_recipe_is_found(tmp_path):
    """A diff that does not fit is an error, and so is a command that fails."""
    (tmp_path / "file.py").write_text("a = 1\nb = 2\n")
    apply("--- file.py\n@@\n a = 1\n-b = 2\n+b = 3\n+c = 4\n", tmp_path)
    assert (tmp_path / "file.py").read_text() == "a = 1\nb = 3\nc = 4\n"
    with pytest.raises(AssertionError, match=r"the file has these lines 0 times, so change"):
        apply("--- file.py\n@@\n-b = 2\n", tmp_path)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run([sys.executable, "-c", "1 / 0"], tmp_path)
