"""Sphinx: how the pages of this folder become a site (`make docs`).

The pages are plain Markdown, so that they can be read on any Git host too. Links from them to files
outside of this folder (`../results/paper/tables/adult.md`) stay as they are in the source; here
they become downloads.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

HERE = Path(__file__).parent
OPTIONAL = ("sklearn", "opacus")  # pages of parts that may not be there
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)\)")

project = "evenclip"
author = "The evenclip authors"
copyright = "The evenclip authors"
try:
    release = metadata.version("evenclip")
except metadata.PackageNotFoundError:  # a checkout that was never installed
    release = ""

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "evenclip"
html_static_path = ["_static"]
html_show_sourcelink = False

default_role = "code"  # docstrings have `names` in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True

_log = logging.getLogger(__name__)


def _downloads(app: Sphinx, name: str, source: list[str]) -> None:
    """Links that lead out of this folder, as downloads; one that leads nowhere is a warning, which
    stops the build.
    """
    del app

    def replaced(found: re.Match[str]) -> str:
        text, path = found.groups()
        target = HERE / path
        if target.is_dir():
            target = next(
                (
                    target / index
                    for index in ("index.html", "README.md")
                    if (target / index).exists()
                ),
                target,
            )
        if not target.exists():
            _log.warning("%s links to %s, which is not there", name, path)
        if not target.is_file():
            return text
        shown = text.strip("`")
        return f"{{download}}`{shown} <../{target.resolve().relative_to(HERE.parent)}>`"

    source[0] = OUTSIDE.sub(replaced, source[0])


def _present(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages of parts that are not there are taken from the list of pages."""
    del app
    if name == "index":
        missing = [page for page in OPTIONAL if not (HERE / f"{page}.md").exists()]
        source[0] = "\n".join(line for line in source[0].split("\n") if line not in missing)


def _as_restructured(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Docstrings are Markdown in places: |γ| is no substitution, and an indented block is code or a
    formula.
    """
    del app, what, name, obj, options
    found: list[str] = []
    margin, blank, code = (
        0,
        False,
        False,
    )  # of the last line with text; whether an empty one followed; inside of a block
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            if blank and margin == 0 and indent >= 4:
                found += [".. code-block:: text", ""]
                code = True
            code, margin = code and indent >= 4, indent
        blank = not line.strip()
        found.append(line if code else line.replace("|", r"\|"))
    lines[:] = found


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("source-read", _downloads)
    app.connect("source-read", _present)
    app.connect(
        "autodoc-process-docstring", _as_restructured, priority=400
    )  # before napoleon takes it apart
