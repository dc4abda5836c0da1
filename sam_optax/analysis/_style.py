"""Style of the figures: readable at notebook width and without colour vision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib takes a second to import: only where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (grey for black). Line styles and markers repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"
"""Lightness increases with the value, for all kinds of colour vision."""


def figure(width: float = 8.0, height: float = 4.0) -> Figure:
    """An empty figure of the given size in inches."""
    from sam_optax.analysis._notebook_figure import NotebookFigure

    return NotebookFigure(figsize=(width, height), layout="constrained")


def colour(i: int) -> str:
    """The i-th colour."""
    return COLOURS[i % len(COLOURS)]


def line(i: int) -> dict[str, Any]:
    """Colour and style of the i-th line."""
    return {"color": colour(i), "linestyle": LINES[i % len(LINES)], "linewidth": 1.8}


def tidy(axes: Axes) -> None:
    """Removes the frame and draws a light grid in the background."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
