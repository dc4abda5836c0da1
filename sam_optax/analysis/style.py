"""The style of all figures, which the commands share: readable without colour vision."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # matplotlib takes a second to import: only where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (dark grey for black, no yellow) and two more. With any two of them,
# simulated protanopia, deuteranopia and tritanopia leave a difference (CIE76) of at least 16. Line
# styles and markers repeat the distinction: 45 positions differ in colour or line, and in colour or
# marker.
COLOURS: tuple[str, ...] = ("#333333", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
COLOURS += ("#56B4E9", "#9933FF", "#773311")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
METHODS = ("sgd", "sam", "asam", "rsam", "fsam", "looksam", "msam", "part", "every")
"""In every figure, each has the colour, line and marker of its position here."""
SEQUENTIAL = "cividis"
"""Lightness increases with the value, for all kinds of colour vision."""


def figure(width: float = 8.0, height: float = 4.0) -> Figure:
    """An empty figure of the given size in inches."""
    from sam_optax.analysis._notebook_figure import NotebookFigure

    return NotebookFigure(figsize=(width, height), layout="constrained")


def positions(names: Iterable[str]) -> list[int]:
    """For each name a position in the palettes: a method's own, or else the first that is free.

    ``"R-SAM"`` and ``"SAM, ρ = 0.05"`` are methods too. The second of a method gets a free one.
    """
    methods = [re.sub("[^a-z]", "", name.lower().partition(",")[0]) for name in names]
    known = {of: METHODS.index(of) for of in methods if of in METHODS}
    free = (i for i in itertools.count() if i not in known.values())
    first = {of: i for i, of in reversed([*enumerate(methods)])}
    return [
        known[of] if of in known and first[of] == i else next(free) for i, of in enumerate(methods)
    ]


def colour(i: int) -> str:
    """The colour of a position."""
    return COLOURS[i % len(COLOURS)]


def line(i: int) -> dict[str, Any]:
    """Colour and style of the line of a position."""
    return {"color": colour(i), "linestyle": LINES[i % len(LINES)], "linewidth": 1.8}


def marker(i: int) -> str:
    """The marker of a position."""
    return MARKERS[i % len(MARKERS)]


def tidy(axes: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    """Removes the frame and draws a light grid in the background."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=axis, alpha=0.25)
    axes.set_axisbelow(True)
