"""A folder with everything that was made of the paper, and the page that shows it.

    tables/NAME.json, NAME.md       what a table was drawn from, and the table
    watched/RUN.json                what was seen of a run
    figures/NAME.svg, NAME.png      the figures
    index.html                      all of it on one page

Everything but the JSON files is drawn from them, so it can be drawn again without training.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evenclip.comparison.presets import PUBLISHED
from evenclip.reproduction import directions, figures, style, tables, variants
from evenclip.reproduction.drawings import DRAWINGS
from evenclip.reproduction.figures import CLOSER, FIGURES, PaperFigure
from evenclip.reproduction.observed import Watch
from evenclip.reproduction.tables import REFERENCE, TABLES
from evenclip.rules import DPSGD

__all__ = ["MADE", "Artifacts"]

MADE = {directions.NAME: directions, variants.NAME: variants}
"""Tables that are made in their own way."""


class Artifacts:
    """The folder."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.tables, self.figures, self.watched = (
            self.root / name for name in ("tables", "figures", "watched")
        )

    def keep(self, record: Mapping[str, Any]) -> Path:
        """A table's record, and the table drawn."""
        name = record["table"]
        _write(self.tables / f"{name}.json", json.dumps(record, indent=1) + "\n")
        return self.draw_table(name)

    def record(self, name: str) -> dict[str, Any] | None:
        """What a table was drawn from, if it was made."""
        path = self.tables / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def reference_lr(self, dataset: str) -> float | None:
        """The learning rate that the matched table chose for the first seed's non-private run, if
        it was made.
        """
        record = self.record(f"{dataset}-matched")
        return None if record is None else float(record["rules"][REFERENCE]["lr"][0])

    def seen(self, figure: PaperFigure) -> dict[str, Any] | None:
        """Rule -> what was seen of it, for all the runs that the figure is of; None if some were
        not watched.
        """
        closer = figure.kind in CLOSER
        wanted = (
            [DPSGD.name]
            if closer
            else [method.name for method in PUBLISHED[figure.dataset].methods]
        )
        found = {}
        for rule in wanted:
            path = (
                self.watched
                / f"{Watch(figure.dataset, rule, figure.match, eigenvalues=closer).name}.json"
            )
            if not path.is_file():
                return None
            found[rule] = json.loads(path.read_text())
        return found

    def draw_table(self, name: str) -> Path:
        """A table from its record."""
        record = self.record(name)
        assert record is not None
        text = MADE[name].draw(record) if name in MADE else tables.draw(record)
        return _write(self.tables / f"{name}.md", text)

    def draw_figure(self, name: str, *, published_scale: bool = False) -> list[Path]:
        """A figure from what was seen; nothing where that is not there.

        Raises:
            ValueError: for a name that is none.
        """
        if name in DRAWINGS:
            return style.save(DRAWINGS[name](), self.figures, name)
        if name not in FIGURES:
            raise ValueError(
                f"There is no figure {name!r}; choose among {', '.join([*DRAWINGS, *FIGURES])}."
            )
        seen = self.seen(FIGURES[name])
        if seen is None:
            return []
        drawn = figures.draw(FIGURES[name], seen, published_scale=published_scale)
        return style.save(
            drawn, self.figures, name + ("-published-scale" if published_scale else "")
        )

    def redraw(self) -> Iterator[Path]:
        """Everything that can be drawn from what is here."""
        for name in (*MADE, *TABLES):
            if self.record(name) is not None:
                yield self.draw_table(name)
        for name in (*DRAWINGS, *FIGURES):
            yield from self.draw_figure(name)
        yield self.index()

    def index(self) -> Path:
        """The page with all of it."""
        made = [name for name in (*TABLES, *MADE) if (self.tables / f"{name}.md").is_file()]
        drawn = [name for name in (*DRAWINGS, *FIGURES) if (self.figures / f"{name}.svg").is_file()]
        links = [
            f'<li><a href="#{name}">{html.escape(_title(name))}</a></li>'
            for name in (*made, *drawn)
        ]
        parts = [
            f'<section id="{name}">{_as_html((self.tables / f"{name}.md").read_text())}</section>'
            for name in made
        ]
        for name in drawn:
            caption = html.escape(self._caption(name))
            parts.append(
                f'<section id="{name}"><figure><img src="figures/{name}.svg" alt="{caption}">'
                f"<figcaption>{caption} (<a "
                f'href="figures/{name}.png">PNG</a>)</figcaption></figure></section>'
            )
        body = (
            "<h1>The paper, beside its printed "
            f"numbers</h1><ul>{''.join(links)}</ul>{''.join(parts)}"
        )
        return _write(self.root / "index.html", _PAGE.format(body=body))

    def _caption(self, name: str) -> str:
        """Of a figure, with what keeps it from being the paper's."""
        seen = self.seen(FIGURES[name]) if name in FIGURES else None
        mark = "" if seen is None else figures.mark(FIGURES[name], seen)
        return _title(name) + (f" {mark[0].upper()}{mark[1:]}." if mark else "")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>evenclip: the paper, beside its printed numbers</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 13px; margin: .4rem 0 1.2rem; }}
th, td {{ padding: .2rem .6rem; text-align: right; white-space: nowrap; }} th {{ border-bottom: 1px solid #888; }}
th:first-child, td:first-child {{ text-align: left; }} tr:nth-child(even) td {{ background: #f5f5f5; }}
figure {{ margin: 2.5rem 0; }} img {{ max-width: 100%; height: auto; }} figcaption {{ color: #555; font-size: 13px; }}
ul {{ columns: 2; }}
</style></head><body>{body}</body></html>
"""


def _title(name: str) -> str:
    if name in TABLES:
        return TABLES[name].title
    if name in MADE:
        return str(MADE[name].TITLE)
    return FIGURES[name].caption if name in FIGURES else f"Drawing: {name}."


def _as_html(text: str) -> str:
    """Our own Markdown: headings, paragraphs, tables, bold."""
    parts, rows = list[str](), list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([_inline(cell.strip()) for cell in line.strip().strip("|").split("|")])
            continue
        if rows:
            head, _, *body = rows
            shown = "".join(
                f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body
            )
            top = "".join(f"<th>{cell}</th>" for cell in head)
            parts.append(f'<div class="wide"><table><tr>{top}</tr>{shown}</table></div>')
            rows = []
        if line.startswith("## "):
            parts.append(f"<h2>{_inline(line[3:])}</h2>")
        elif line:
            parts.append(f"<p>{_inline(line)}</p>")
    return "".join(parts)


def _inline(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))


def _write(path: Path, text: str) -> Path:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.writing-{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
    return path
