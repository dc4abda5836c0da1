"""Shared by the figures: the looks of the methods, axes, and files."""

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_optax.analysis import style
from sam_optax.experiments.types import Json, Record


def look(method: int, setting: int = 0) -> Record:
    """That of a method by position, for matplotlib; its other settings keep its colour."""
    line = style.line(method + setting)
    return {**line, "color": style.colour(method), "marker": style.marker(method + setting)}


def by_method(rows: Sequence[Json]) -> list[tuple[int, list[Json]]]:
    """The settings of each method, with its position, for the best known the same everywhere."""
    found: dict[str, list[Json]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return list(zip(style.positions(found), found.values(), strict=True))


def column(panels: int, height: float, **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels below each other, which is legible on a telephone too."""
    figure = Figure(figsize=(6, 0.8 + panels * height), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False, **shared)[:, 0]


def tidy(axes: Axes, axis: Any = "y", absent: Sequence[str] = ()) -> None:
    """Draws a grid behind the data, no top and right frame lines, and says what is not drawn."""
    style.tidy(axes, axis)
    if absent:
        text = textwrap.fill(f"not drawn: {', '.join(absent)}", 80)
        axes.set_title(text, fontsize="small", loc="left", color="0.4")


def legend(figure: Figure, axes: Axes) -> None:
    """Draws one legend below all axes."""
    place: Any = {"loc": "outside lower center", "ncols": 2, "frameon": False}
    figure.legend(*axes.get_legend_handles_labels(), **place, fontsize="small")


def png(figure: Figure, title: str) -> bytes:
    """The figure as a file."""
    figure.suptitle(textwrap.fill(title, int(12 * figure.get_figwidth())), fontsize="medium")
    file = io.BytesIO()
    with warnings.catch_warnings():  # a missing glyph is drawn as a box
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
