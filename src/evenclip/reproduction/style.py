"""How our figures look: sizes in millimetres, one look for each rule and each group, the same bytes
at every redraw.

A look differs from the others of its table in lightness, line, marker and hatch as well as in hue,
so that a figure can be read in print without colour and by readers who see fewer colours. Text
stays text in an SVG. Figures are drawn by matplotlib's own defaults and what stands here, whatever
a reader's matplotlibrc says, and without pyplot's state. matplotlib is imported when something is
drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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
"""How matplotlib places axes."""

WIDTH = 140.0
"""Of a page's text, in millimetres."""

DPI = 200
"""Of a PNG."""

SMALLEST = 7.0
"""Of all letters, in points."""

_MM = 1 / 25.4  # in inches

_SETTINGS: Any = {
    "font.family": [
        "DejaVu Sans",
        "sans-serif",
    ],  # the first comes with matplotlib: the same widths everywhere
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
    "svg.fonttype": "none",  # text as text
    "svg.hashsalt": "evenclip",  # else the names inside an SVG are random
}


@dataclass(frozen=True)
class Look:
    """How one thing is drawn wherever it appears.

    Attributes:
        label: its name in a legend.
        colour: as #rrggbb.
        line: of a curve.
        marker: of a point.
        hatch: of an area; none if empty.
    """

    label: str
    colour: str
    line: Line
    marker: str
    hatch: str

    @property
    def stroke(self) -> dict[str, Any]:
        """What `Axes.plot` needs to draw a curve; the marker is left to the caller, who knows how
        many points.
        """
        return {"color": self.colour, "linestyle": self.line, "label": self.label}

    @property
    def fill(self) -> dict[str, Any]:
        """What `Axes.bar` needs to draw an area; a hatch in white shows on every colour here."""
        return {
            "facecolor": self.colour,
            "hatch": self.hatch,
            "edgecolor": "white",
            "linewidth": 0.0,
        }

    @property
    def ink(self) -> str:
        """The colour, darkened until letters in it can be read on white."""
        channels = [int(self.colour[i : i + 2], 16) for i in (1, 3, 5)]
        darker = min(1.0, 45.0 / max(self.lightness, 1.0))
        return "#" + "".join(f"{round(c * darker):02x}" for c in channels)

    @property
    def lightness(self) -> float:
        """L* of CIELAB, 0 (black) to 100 (white): what is left of the colour in grey.

        >>> Look("", "#000000", "-", "o", "").lightness, round(Look("", "#ffffff", "-", "o", "").lightness, 6)
        (0.0, 100.0)
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
"""Name of a rule -> its look; the order is that of tables and legends."""

GROUPS: tuple[Look, ...] = (
    Look("group a", "#2f5d8a", "-", "o", ""),
    Look("group b", "#e08214", (0, (4, 1.5)), "^", "////"),
    Look("group c", "#3d1a5b", (0, (1, 1.2)), "s", "...."),
    Look("group d", "#8fbf6a", (0, (5, 1.4, 1, 1.4)), "D", "\\\\\\\\"),
)
"""By a group's position; a figure that knows the groups' names replaces the labels."""


@contextmanager
def applied() -> Iterator[None]:
    """Draw in our style inside of this, as a context or a decorator; what was set before is set
    again afterwards.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Figures are drawn by matplotlib: pip install 'evenclip[paper]'."
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what a reader's own matplotlibrc says
        matplotlib.rcParams.update(_SETTINGS)
        yield


def figure(
    width_mm: float = WIDTH, height_mm: float = 80.0, *, layout: Layout | None = "constrained"
) -> Figure:
    """An empty figure of this size, which no window and no pyplot knows.

    Args:
        width_mm: of the whole figure, in millimetres.
        height_mm: likewise.
        layout: how matplotlib places axes; None leaves it to the caller.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if width_mm <= 0 or height_mm <= 0:
        raise ValueError(
            f"A figure of {width_mm} by {height_mm} mm has no area; give two positive lengths."
        )
    with applied():
        made = Figure(figsize=(width_mm * _MM, height_mm * _MM), dpi=DPI, layout=layout)
        FigureCanvasAgg(made)
    return made


def save(figure: Figure, folder: Path | str, name: str) -> list[Path]:
    """NAME.svg and NAME.png in the folder, of the figure's size, without a date; a redraw gives the
    same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with applied():
        for _ in range(2):  # the second time from where the first has put the axes
            figure.draw_without_rendering()
        figure.set_layout_engine(
            "none"
        )  # from here on nothing moves: both files and every further save are alike
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    return [svg, png]


def _linear(value: float) -> float:
    """One channel of sRGB as light."""
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)
