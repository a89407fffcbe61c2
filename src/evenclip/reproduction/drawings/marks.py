"""Colours, arrows and labels that the drawings share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenclip.reproduction import style
from evenclip.reproduction.drawings.plane import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "ARROW",
    "BOX",
    "CLIPPED",
    "GREY",
    "INK",
    "PALE",
    "PLAIN",
    "SHORTENED",
    "SMALL",
    "TURNED",
    "WIDE_ARROW",
    "draw_arrow",
    "frame",
    "signed",
    "write",
]

PALE, GREY, INK = "#cccccc", "#666666", "#1a1a1a"
PLAIN, CLIPPED = "#a9cbe8", "#d98b4a"  # g_B, ḡ_B
SHORTENED, TURNED = "#0b2e6b", "#4a1203"  # ρ g_B, ḡ_B/ρ
BOX: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
SMALL: dict[str, Any] = {"fontsize": style.SMALLEST}
ARROW: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0}
WIDE_ARROW = "simple,tail_width={0},head_width={1},head_length={1}"


def draw_arrow(axes: Axes, end: Array, **look: Any) -> None:
    """Draw an arrow from the origin to `end`."""
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(FancyArrowPatch((0, 0), (float(end[0]), float(end[1])), **ARROW | look))


def frame(axes: Axes, across: tuple[float, float], up: tuple[float, float]) -> None:
    """Set the limits, equal scales and a frame without ticks."""
    axes.set(xlim=across, ylim=up, aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=PALE)


def write(
    axes: Axes, text: str, at: Array | tuple[float, float], offset: tuple[float, float], **look: Any
) -> None:
    """Write text at `offset`, in points, from the data point `at`."""
    axes.annotate(text, (float(at[0]), float(at[1])), offset, textcoords="offset points", **look)


def signed(value: float, decimals: int = 2) -> str:
    """Format a rounded number with a minus sign instead of a hyphen; −0 is written as 0.

    >>> signed(-0.196), signed(1.3, 1), signed(-0.001)
    ('−0.20', '1.3', '0.00')
    """
    rounded = round(value, decimals) + 0.0
    return f"{rounded:.{decimals}f}".replace("-", "−")
