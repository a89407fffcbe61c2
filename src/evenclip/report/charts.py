"""Charts of the HTML page: SVG as text, a few kB each.

The page's styles draw them, so that they follow its light and dark themes. Groups differ both in
colour and in marker or dashes. Every chart has a title and a description for screen readers; its
numbers are in the page's tables or in results.json.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["MOST_GROUPS", "Course", "Dot", "courses", "dots", "legend"]

MOST_GROUPS = 10
"""Maximum number of groups with distinct styles."""

_WIDTH = 720.0
_DASHES = ("", "7 3", "2 2", "7 3 2 3", "10 3", "4 2 1 2", "1 3", "12 3 2 3", "5 5", "3 1")


class Dot(NamedTuple):
    """A mean with its interval; None if unknown."""

    mean: float | None
    low: float | None
    high: float | None


class Course(NamedTuple):
    """Values by epoch, drawn as one panel.

    Attributes:
        title: title of the panel.
        lines: one line per group or other quantity.  # [line][epoch]
    """

    title: str
    lines: Sequence[Sequence[float | None]]


def dots(title: str, describes: str, unit: str, rows: Sequence[tuple[str, Sequence[Dot]]]) -> str:
    """Draw means and intervals: one row per rule, one marker per group."""
    shown = [v for _, row in rows for dot in row for v in dot if v is not None and math.isfinite(v)]
    if not shown:
        return ""
    left, right, top, each = 170.0, 20.0, 8.0, 18.0 + 11.0 * max(len(row) for _, row in rows)
    low, high, ticks = _scale(min(shown), max(shown))
    height = top + each * len(rows) + 40.0

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (_WIDTH - left - right)

    elements = [
        f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{top}" y2="{height - 40:.1f}"/>'
        for t in ticks
    ]
    if low < 0 < high:
        elements.append(
            f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{top}" '
            f'y2="{height - 40:.1f}"/>'
        )
    for i, (name, row) in enumerate(rows):
        middle = top + each * (i + 0.5)
        elements.append(
            f'<text class="name" x="{left - 14:.0f}" '
            f'y="{middle + 4:.1f}">{html.escape(name)}</text>'
        )
        for k, dot in enumerate(row):
            y = middle + 11.0 * (k - (len(row) - 1) / 2)
            if dot.low is not None and dot.high is not None:
                elements.append(
                    f'<line class="g{k}" stroke-width="2" x1="{x(dot.low):.1f}" '
                    f'x2="{x(dot.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
                )
            if dot.mean is not None:
                elements.append(_marker(k, x(dot.mean), y))
    elements += [
        f'<text class="tick" x="{x(t):.1f}" y="{height - 24:.1f}">{_number(t)}</text>'
        for t in ticks
    ]
    elements.append(
        f'<text class="unit" x="{(left + _WIDTH - right) / 2:.0f}" '
        f'y="{height - 6:.1f}">{unit}</text>'
    )
    return _svg(title, describes, height, elements)


def courses(title: str, describes: str, unit: str, panels: Sequence[Course]) -> str:
    """Draw small panels on one scale: one panel per rule, one line per group."""
    known = [p for p in panels if any(v is not None for line in p.lines for v in line)]
    if not known:
        return ""
    values = [v for p in known for line in p.lines for v in line if v is not None]
    low, high, ticks = _scale(min(0.0, *values), max(values))
    across = min(3, len(known))
    left, gap, top, tall = 46.0, 14.0, 26.0, 120.0
    wide = (_WIDTH - left - gap * (across - 1) - 8) / across
    below = tall + top + 32.0
    elements = list[str]()
    for i, panel in enumerate(known):
        x0, y0 = left + (i % across) * (wide + gap), (i // across) * below + top
        elements += _panel(
            panel, _Box(x0, y0, wide, tall), (low, high), ticks, first=i % across == 0
        )
    height = -(-len(known) // across) * below + 14.0
    elements.append(f'<text class="unit" x="{_WIDTH / 2:.0f}" y="{height - 4:.1f}">{unit}</text>')
    return _svg(title, describes, height, elements)


class _Box(NamedTuple):
    """Position of a panel: left and upper edge, width and height."""

    x0: float
    y0: float
    wide: float
    tall: float


def _panel(
    panel: Course, box: _Box, ends: tuple[float, float], ticks: Sequence[float], *, first: bool
) -> Iterator[str]:
    (x0, y0, wide, tall), (low, high) = box, ends
    epochs = max(len(line) for line in panel.lines)

    def x(epoch: int) -> float:
        return x0 + (wide - 6) * (epoch / max(1, epochs - 1))

    def y(value: float) -> float:
        return y0 + tall * (1 - (value - low) / (high - low))

    yield f'<text class="panel" x="{x0:.1f}" y="{y0 - 9:.1f}">{html.escape(panel.title)}</text>'
    for tick in ticks:
        yield (
            f'<line class="grid" x1="{x0:.1f}" x2="{x0 + wide:.1f}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/>'
        )
        if first:
            yield (
                f'<text class="value" x="{x0 - 6:.1f}" y="{y(tick) + 4:.1f}">{_number(tick)}</text>'
            )
    for k, line in enumerate(panel.lines):
        points = [(x(e), y(v)) for e, v in enumerate(line) if v is not None]
        if not points:
            continue
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        yield (
            f'<polyline class="g{k} line" stroke-dasharray="{_DASHES[k % len(_DASHES)]}" '
            f'points="{path}"/>'
        )
        yield _marker(k, *points[-1])
    for epoch in sorted({1, epochs}):
        yield f'<text class="tick" x="{x(epoch - 1):.1f}" y="{y0 + tall + 16:.1f}">{epoch}</text>'


def legend(names: Sequence[str]) -> str:
    """Return the legend of markers and dashes, as HTML."""
    entries = "".join(
        '<li><svg viewBox="0 0 34 14" width="34" height="14" aria-hidden="true"><line '
        f'class="g{k} line" x1="1" x2="33"'
        f' y1="7" y2="7" stroke-dasharray="{_DASHES[k % len(_DASHES)]}"/>{_marker(k, 17, 7)}</svg>'
        f"{html.escape(name)}</li>"
        for k, name in enumerate(names)
    )
    return f'<ul class="legend">{entries}</ul>'


def _svg(title: str, describes: str, height: float, elements: Sequence[str]) -> str:
    label = html.escape(f"{title}. {describes}")
    return (
        f'<svg class="chart" role="img" aria-label="{label}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}">{"".join(elements)}</svg>'
    )


_SHAPES: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
    lambda x, y: f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z"/>',
    lambda x, y: f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>',
    lambda x, y: f'<path d="M{x:.1f} {y - 5.4:.1f}l5.4 5.4l-5.4 5.4l-5.4 -5.4z"/>',
    lambda x, y: f'<path d="M{x:.1f} {y + 5:.1f}l5 -9h-10z"/>',
)


def _marker(k: int, x: float, y: float) -> str:
    """Draw one of five shapes; hollow from the sixth group on."""
    return (
        f'<g class="g{k} mark{" hollow" if k >= len(_SHAPES) else ""}">'
        f"{_SHAPES[k % len(_SHAPES)](x, y)}</g>"
    )


def _scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Return round ends around these values, and the ticks between them."""
    if high - low < 1e-9:
        low, high = low - 1, high + 1
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, last * step, [i * step for i in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")
