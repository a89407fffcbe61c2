"""The output folder of `evenclip paper`.

    tables/NAME.json, NAME.md       the record of a table, and the table
    observed/RUN.json               the measurements of an observed run
    figures/NAME.svg, NAME.png      the figures
    index.html                      one page with all tables and figures

Every other file is drawn from the JSON files, so it can be redrawn without training. The JSON files
are sealed (`evenclip.files.seal`), so a damaged one is never drawn.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evenclip import files
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.files import kinds
from evenclip.reproduction import (
    directions,
    figures,
    markdown,
    steps,
    style,
    validity,
    variants,
)
from evenclip.reproduction.drawings import DRAWINGS
from evenclip.reproduction.figures import CLOSER, FIGURES, PaperFigure
from evenclip.reproduction.observed import ObservedRun
from evenclip.reproduction.tables import REFERENCE, TABLES
from evenclip.rules import DPSGD

__all__ = ["MADE", "Artifacts"]

MADE = {made.NAME: made for made in (directions, variants, steps)}
"""Name -> module, for the tables that `evenclip.reproduction.tables` does not make."""


class Artifacts:
    """The output folder.

    Attributes:
        root: the folder itself.
        tables: folder of records and tables.
        figures: folder of figures.
        observed: folder of measurements.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.tables, self.figures, self.observed = (
            self.root / name for name in ("tables", "figures", "observed")
        )

    def keep(self, record: Mapping[str, Any]) -> Path:
        """Write a record and its table; return the path of the table."""
        name = record["table"]
        files.make_folder(self.tables, kinds.RECORD)
        files.write(self.tables / f"{name}.json", files.sealed(record), kinds.RECORD)
        return self.draw_table(name)

    def record(self, name: str) -> dict[str, Any] | None:
        """Return the record of a table; None if it does not exist."""
        path = self.tables / f"{name}.json"
        return files.read_sealed(path, kinds.RECORD) if path.is_file() else None

    def reference_lr(self, dataset: str) -> list[float]:
        """Return the learning rates of the non-private runs in the matched table, by seed.

        The list is empty if the table does not exist.
        """
        record = self.record(f"{dataset}-matched")
        return [] if record is None else [float(lr) for lr in record["rules"][REFERENCE]["lr"]]

    def seen(self, figure: PaperFigure) -> dict[str, list[dict[str, Any]]] | None:
        """Return rule -> measurements of its runs, by seed; None if a rule has no run.

        Only seeds that were observed for every rule are included.
        """
        closer = figure.kind in CLOSER
        methods = PUBLISHED[figure.dataset].methods
        rules = [DPSGD.name] if closer else [method.name for method in methods]
        runs: dict[str, list[dict[str, Any]]] = {rule: [] for rule in rules}
        for seed in range(SETTINGS[figure.dataset].figure_seeds):
            observed = [
                ObservedRun(figure.dataset, rule, figure.match, seed, eigenvalues=closer)
                for rule in rules
            ]
            paths = [self.observed / f"{run.name}.json" for run in observed]
            if all(path.is_file() for path in paths):
                for rule, path in zip(rules, paths, strict=True):
                    runs[rule].append(files.read_sealed(path, kinds.OBSERVED))
        return runs if runs[rules[0]] else None

    def draw_table(self, name: str) -> Path:
        """Draw a table from its record."""
        record = self.record(name)
        assert record is not None
        text = MADE[name].draw(record) if name in MADE else markdown.draw(record)
        return _write(self.tables / f"{name}.md", text)

    def draw_validity(self) -> Path | None:
        """Draw the table of where the risk's expansion holds; None if no run was observed."""
        observed = {
            (figure.dataset, figure.match): runs
            for figure in FIGURES.values()
            if figure.kind == "risk" and (runs := self.seen(figure)) is not None
        }
        if not observed:
            return None
        return _write(self.tables / f"{validity.NAME}.md", validity.draw(observed))

    def draw_figure(self, name: str, *, published_scale: bool = False) -> list[Path]:
        """Draw a figure; return its paths, or no path if the run of one rule is missing.

        Raises:
            ValueError: if there is no figure of that name.
        """
        if name in DRAWINGS:
            return style.save(DRAWINGS[name](), self.figures, name)
        if name not in FIGURES:
            raise ValueError(
                f"There is no figure {name!r}; choose among {', '.join([*DRAWINGS, *FIGURES])}."
            )
        runs = self.seen(FIGURES[name])
        if runs is None:
            return []
        figure = figures.draw(FIGURES[name], runs, published_scale=published_scale)
        suffix = "-published-scale" if published_scale else ""
        return style.save(figure, self.figures, name + suffix)

    def redraw(self) -> Iterator[Path]:
        """Redraw every table and figure whose records exist, and the page."""
        for name in (*MADE, *TABLES):
            if self.record(name) is not None:
                yield self.draw_table(name)
        table = self.draw_validity()
        if table is not None:
            yield table
        for name in (*DRAWINGS, *FIGURES):
            yield from self.draw_figure(name)
        yield self.index()

    def index(self) -> Path:
        """Write the page with all tables and figures."""
        names = (*TABLES, *MADE, validity.NAME)
        made = [name for name in names if (self.tables / f"{name}.md").is_file()]
        drawn = [name for name in (*DRAWINGS, *FIGURES) if (self.figures / f"{name}.svg").is_file()]
        links = [
            f'<li><a href="#{name}">{html.escape(_title(name))}</a></li>'
            for name in (*made, *drawn)
        ]
        sections = [
            f'<section id="{name}">{_as_html((self.tables / f"{name}.md").read_text())}</section>'
            for name in made
        ]
        for name in drawn:
            caption = html.escape(self._caption(name))
            sections.append(
                f'<section id="{name}"><figure><img src="figures/{name}.svg" alt="{caption}">'
                f"<figcaption>{caption} (<a "
                f'href="figures/{name}.png">PNG</a>)</figcaption></figure></section>'
            )
        body = (
            "<h1>The paper, beside its printed "
            f"numbers</h1><ul>{''.join(links)}</ul>{''.join(sections)}"
        )
        return _write(self.root / "index.html", _PAGE.format(body=body))

    def _caption(self, name: str) -> str:
        """Return the caption of a figure, marked if its runs are quick or partial."""
        runs = self.seen(FIGURES[name]) if name in FIGURES else None
        mark = "" if runs is None else figures.mark(FIGURES[name], runs)
        return _title(name) + (f" {mark[0].upper()}{mark[1:]}." if mark else "")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>evenclip: the paper, beside its printed numbers</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; }}
body {{ max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }}
h2 {{ font-size: 1.2rem; margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13px; margin: .4rem 0 1.2rem; }}
th, td {{ padding: .2rem .6rem; text-align: right; white-space: nowrap; }}
th {{ border-bottom: 1px solid #888; }}
th:first-child, td:first-child {{ text-align: left; }}
tr:nth-child(even) td {{ background: #f5f5f5; }}
figure {{ margin: 2.5rem 0; }}
img {{ max-width: 100%; height: auto; }}
figcaption {{ color: #555; font-size: 13px; }}
ul {{ columns: 2; }}
</style></head><body>{body}</body></html>
"""


def _title(name: str) -> str:
    """Return the title of a table or the caption of a figure."""
    if name in TABLES:
        return TABLES[name].title
    if name in MADE:
        return str(MADE[name].TITLE)
    return FIGURES[name].caption if name in FIGURES else f"Drawing: {name}."


def _as_html(text: str) -> str:
    """Convert a table's Markdown to HTML: headings, paragraphs, tables and bold text."""
    parts, rows = list[str](), list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([_inline(cell.strip()) for cell in line.strip().strip("|").split("|")])
            continue
        if rows:
            head, _, *body = rows
            lines = "".join(
                f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body
            )
            header = "".join(f"<th>{cell}</th>" for cell in head)
            parts.append(f'<div class="wide"><table><tr>{header}</tr>{lines}</table></div>')
            rows = []
        if line.startswith("## "):
            parts.append(f"<h2>{_inline(line[3:])}</h2>")
        elif line:
            parts.append(f"<p>{_inline(line)}</p>")
    return "".join(parts)


def _inline(text: str) -> str:
    """Escape text for HTML and convert bold parts."""
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))


def _write(path: Path, text: str) -> Path:
    """Write a table or a page, and create its folder."""
    files.make_folder(path.parent, kinds.DRAWING)
    return files.write(path, text, kinds.DRAWING)
