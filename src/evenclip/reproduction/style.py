"""The style of the figures: sizes in millimetres, and one look for each rule and each group.

Looks differ in lightness, line, marker and hatch as well as in hue, so that figures can be read
without colour and by colour-blind readers. Text in an SVG stays text. Figures use matplotlib's
defaults and the settings here; they ignore the user's matplotlibrc and the state of pyplot. A
redraw gives the same bytes. matplotlib is imported on first use.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from evenclip import files
from evenclip.files import kinds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "DPI",
    "GROUPS",
    "RULES",
    "SMALLEST",
    "WIDTH",
    "Layout",
    "Line",
    "Look",
    "applied",
    "figure",
    "save",
]

Line: TypeAlias = str | tuple[float, tuple[float, ...]]
"""A line style of matplotlib: its name, or (offset, lengths of dashes and gaps)."""

Layout: TypeAlias = Literal["constrained", "compressed", "tight"]
"""Layout engine of matplotlib."""

WIDTH = 140.0
"""Width of the text on a page, in millimetres."""

DPI = 200
"""Resolution of a PNG."""

SMALLEST = 7.0
"""Smallest font size, in points."""

_MM = 1 / 25.4  # in inches

_SETTINGS: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first is part of matplotlib
    "font.sans-serif": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 8.0,
    "xtick.labelsize": SMALLEST,
    "ytick.labelsize": SMALLEST,
    "legend.fontsize": SMALLEST,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.0,
    "hatch.linewidth": 0.6,
    "axes.unicode_minus": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "evenclip",  # otherwise ids in an SVG are random
}


@dataclass(frozen=True)
class Look:
    """The look of one rule or group in every figure.

    Attributes:
        label: name in a legend.
        colour: #rrggbb.
        line: line style of a curve.
        marker: marker of a point.
        hatch: hatch of an area; empty for none.
    """

    label: str
    colour: str
    line: Line
    marker: str
    hatch: str

    @property
    def stroke(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a curve, without the marker."""
        return {"color": self.colour, "linestyle": self.line, "label": self.label}

    @property
    def fill(self) -> dict[str, Any]:
        """Arguments of `Axes.bar` for an area; the hatch is white."""
        return {
            "facecolor": self.colour,
            "hatch": self.hatch,
            "edgecolor": "white",
            "linewidth": 0.0,
        }

    @property
    def ink(self) -> str:
        """The colour, darkened until text in it is legible on white."""
        channels = [int(self.colour[i : i + 2], 16) for i in (1, 3, 5)]
        darker = min(1.0, 45.0 / max(self.lightness, 1.0))
        return "#" + "".join(f"{round(c * darker):02x}" for c in channels)

    @property
    def lightness(self) -> float:
        """L* of CIELAB, from 0 (black) to 100 (white).

        >>> round(Look("", "#ffffff", "-", "o", "").lightness, 6)
        100.0
        """
        r, g, b = (_linear(int(self.colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
        Y = 0.2126 * r + 0.7152 * g + 0.0722 * b
        return 116 * Y ** (1 / 3) - 16 if Y > (6 / 29) ** 3 else Y * (29 / 3) ** 3


RULES: dict[str, Look] = {
    "non-private": Look("Non-private", "#000000", "-", "o", ""),
    "dpsgd": Look("DPSGD", "#b5330a", (0, (5, 1.6)), "s", "////"),
    "fairlens": Look("FairLens", "#edbc2f", (0, (1, 1.2)), "D", "...."),
    "dpsgd-f": Look("DPSGD-F", "#178f6c", (0, (5, 1.4, 1, 1.4)), "^", "\\\\\\\\"),
    "dpsgd-global": Look("DPSGD-Global", "#5ea6df", (0, (3, 1.2, 1, 1.2, 1, 1.2)), "v", "xxxx"),
    "dpsgd-global-adapt": Look("DPSGD-Global-Adapt", "#123a8c", (0, (8, 1.6)), "P", "----"),
}
"""Rule -> look, in the order of tables and legends."""

GROUPS: tuple[Look, ...] = (
    Look("group a", "#2f5d8a", "-", "o", ""),
    Look("group b", "#e08214", (0, (4, 1.5)), "^", "////"),
    Look("group c", "#3d1a5b", (0, (1, 1.2)), "s", "...."),
    Look("group d", "#8fbf6a", (0, (5, 1.4, 1, 1.4)), "D", "\\\\\\\\"),
)
"""Looks by position of the group; figures of a dataset replace the labels."""


@contextmanager
def applied() -> Iterator[None]:
    """Apply the style, as a context manager or decorator; restore the previous one on exit."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib, which is not installed; run `pip install 'evenclip[paper]'`."
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update(_SETTINGS)
        yield


def figure(
    width_mm: float = WIDTH, height_mm: float = 80.0, *, layout: Layout | None = "constrained"
) -> Figure:
    """Return an empty figure that is not registered with pyplot.

    Args:
        width_mm: width of the figure in millimetres.
        height_mm: height of the figure in millimetres.
        layout: layout engine of matplotlib; None for none.

    Raises:
        ValueError: if width or height is not positive.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if width_mm <= 0 or height_mm <= 0:
        raise ValueError(
            f"A figure of {width_mm} by {height_mm} mm has no area; give two positive lengths."
        )
    with applied():
        empty = Figure(figsize=(width_mm * _MM, height_mm * _MM), dpi=DPI, layout=layout)
        FigureCanvasAgg(empty)
    return empty


def save(figure: Figure, folder: Path | str, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png into a folder, without dates; return their paths."""
    folder = Path(folder)
    files.make_folder(folder, kinds.DRAWING)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with applied():
        for _ in range(2):  # the second pass starts from the positions of the first
            figure.draw_without_rendering()
        # Fix the positions, so that both files and every later save agree.
        figure.set_layout_engine("none")
        svg_buffer, png_buffer = io.BytesIO(), io.BytesIO()
        figure.savefig(svg_buffer, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png_buffer, format="png", dpi=DPI, metadata={"Software": None})
    for path, drawn in ((svg, svg_buffer), (png, png_buffer)):
        files.write(path, drawn.getvalue(), kinds.DRAWING)
    return [svg, png]


def _linear(value: float) -> float:
    """Return the linear value of an sRGB channel."""
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)
