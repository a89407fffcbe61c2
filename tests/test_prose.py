"""Lines of prose are at most 100 characters long: in pages, notebooks, docstrings and comments.

Ruff checks the lines of code.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Iterator

import pytest

from pages import ROOT

WIDTH = 100
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(path for folder in ("docs", "examples") for path in sorted((ROOT / folder).glob("*.md"))),
]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def long_lines_of_a_page(text: str) -> Iterator[int]:
    """Yield the numbers of the long lines outside of code blocks, tables, links and comments."""
    in_code = in_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        in_comment = in_comment or line.startswith("<!--")
        is_prose = not (in_code or in_comment or line.startswith(("|", "[", "![")))
        if "-->" in line:
            in_comment = False
        if is_prose and len(line) > WIDTH:
            yield number


def long_lines_of_a_module(source: str) -> Iterator[int]:
    """Yield the numbers of the long lines of docstrings, and of comments on their own line."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = source.splitlines()
    prose = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            prose.add(token.start[0])
    yield from (number for number in sorted(prose) if len(lines[number - 1]) > WIDTH)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_prose_of_a_page_is_wrapped(page):
    long = list(long_lines_of_a_page(page.read_text(encoding="utf-8")))
    assert not long, f"lines {long} of {page.name} have more than 100 characters; wrap them"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_prose_of_a_notebook_is_wrapped(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert prose
    for text in prose:
        assert not list(long_lines_of_a_page(text)), text


def test_docstrings_and_comments_are_wrapped():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in MODULES
        for number in long_lines_of_a_module(path.read_text(encoding="utf-8"))
    ]
    assert not long, f"more than 100 characters of docstring or comment; wrap or shorten: {long}"


def test_long_lines_are_found():
    """The tests above depend on these two functions."""
    long = "x" * 101
    page = f"{long}\n```text\n{long}\n```\n| {long} |\n<!--\n{long}\n-->\n[a]: {long}\n{long}\n"
    assert list(long_lines_of_a_page(page)) == [1, 10]
    module = f'"""Title.\n\n{long}\n"""\n\n# {long}\nx = "{long}"  # {long}\n'
    assert list(long_lines_of_a_module(module)) == [3, 6]
