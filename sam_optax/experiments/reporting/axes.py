"""Shared by the figures of a run: the styles of the methods, error bars, axes, and files."""

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_optax.analysis._style import COLOURS, LINES, MARKERS, positions
from sam_optax.experiments.types import Json


class Style(NamedTuple):
    """The style of a method, as matplotlib arguments."""

    color: str
    linestyle: Any
    marker: str

    def again(self, repeat: int) -> "Style":
        """That of the same method with other radii, which keeps its colour."""
        line, marker = LINES.index(self.linestyle), MARKERS.index(self.marker)
        return Style(self.color, LINES[(line + repeat) % 5], MARKERS[(marker + repeat) % 8])


def styles(methods: Sequence[str]) -> list[Style]:
    """The styles by position; a method may occur several times."""
    names = [*dict.fromkeys(methods)]
    order = dict(zip(names, positions(names), strict=True))
    first = {name: Style(COLOURS[i % 9], LINES[i % 5], MARKERS[i % 8]) for name, i in order.items()}
    return [first[name].again(methods[:i].count(name)) for i, name in enumerate(methods)]


def styled(methods: Sequence[Json]) -> list[tuple[Json, Style]]:
    """The methods of a run, as in its results, with their styles."""
    return list(zip(methods, styles([of["method"] for of in methods]), strict=True))


def column(panels: int, height: float, **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels below each other, which is legible on a telephone too."""
    figure = Figure(figsize=(6, 0.8 + panels * height), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False, **shared)[:, 0]


def errorbars(
    axes: Axes, x: Any, y: Any, half: Sequence[float | None], factor: float, **look: Any
) -> None:
    """Draws points times a factor, with intervals where they are known."""
    look = {"linewidth": 1.2, "elinewidth": 1, "capsize": 3, "fillstyle": "none", **look}
    bars = factor * np.nan_to_num(np.array(half, float)) if any(half) else None
    axes.errorbar(x, factor * np.array(y), bars, **look)


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
