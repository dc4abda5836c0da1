"""Shared by the figures of a run: the styles of the methods, axes, and files."""

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_optax.experiments.types import Json

# Okabe and Ito's palette (grey for black) and two more, which colour-blind readers can tell apart.
# Line styles and markers repeat the distinction for print without colour: 45 methods differ in
# colour or line, and in colour or marker.
_COLOURS: tuple[str, ...] = ("#666666", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
_COLOURS += ("#56B4E9", "#B3A000", "#8C564B")
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


class Style(NamedTuple):
    """The style of a method, as matplotlib arguments."""

    color: str
    linestyle: Any
    marker: str


def style(method: int, setting: int = 0) -> Style:
    """That of a method by position; its other settings keep its colour."""
    line, marker = _LINES[(method + setting) % 5], _MARKERS[(method + setting) % 8]
    return Style(_COLOURS[method % 9], line, marker)


def styles(methods: Sequence[str]) -> list[Style]:
    """The styles by position; a method may occur several times."""
    order = [*dict.fromkeys(methods)]
    return [style(order.index(of), methods[:i].count(of)) for i, of in enumerate(methods)]


def styled(methods: Sequence[Json]) -> list[tuple[Json, Style]]:
    """The methods of a run, as in its results, with their styles."""
    return list(zip(methods, styles([of["method"] for of in methods]), strict=True))


def column(panels: int, height: float, **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels below each other, which is legible on a telephone too."""
    figure = Figure(figsize=(6, 0.8 + panels * height), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False, **shared)[:, 0]


def tidy(axes: Axes, axis: Any = "y", absent: Sequence[str] = ()) -> None:
    """Draws a grid behind the data, no top and right frame lines, and says what is not drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=axis, alpha=0.3)
    axes.set_axisbelow(True)
    if absent:
        text = textwrap.fill(f"not drawn: {', '.join(absent)}", 80)
        axes.set_title(text, fontsize="small", loc="left", color="0.4", parse_math=False)


def legend(figure: Figure, axes: Axes) -> None:
    """Draws one legend below all axes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = int(12 * figure.get_figwidth() / (8 + max(map(len, labels), default=0)))
    place: Any = {"loc": "outside lower center", "ncols": max(1, columns), "frameon": False}
    figure.legend(handles, labels, **place, fontsize="small")


def png(figure: Figure, title: str = "") -> bytes:
    """The figure as a file."""
    if title:
        title = textwrap.fill(title, int(12 * figure.get_figwidth()))
        figure.suptitle(title, fontsize="medium", parse_math=False)  # a dollar sign is one
    file = io.BytesIO()
    with warnings.catch_warnings():  # a missing glyph is drawn as a box
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
