"""Shared by the figures of a run: the styles of the methods, axes, and files."""

import io
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_optax.analysis import style as look
from sam_optax.experiments.types import Json


class Style(NamedTuple):
    """The style of a method, as matplotlib arguments."""

    color: str
    linestyle: Any
    marker: str


def style(method: int, setting: int = 0) -> Style:
    """That of a method by position; its other settings keep its colour."""
    other = method + setting
    return Style(look.colour(method), look.line(other)["linestyle"], look.marker(other))


def placed(methods: Iterable[str]) -> dict[str, int]:
    """The position of each method, which for the best known is the same in every figure."""
    names = [*dict.fromkeys(methods)]
    return dict(zip(names, look.positions(names), strict=True))


def styled(methods: Sequence[Json]) -> list[tuple[Json, Style]]:
    """The methods of a run, as in its results, with their styles; one may occur several times."""
    names = [of["method"] for of in methods]
    place = placed(names)
    looks = (style(place[of], names[:i].count(of)) for i, of in enumerate(names))
    return list(zip(methods, looks, strict=True))


def column(panels: int, height: float, **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels below each other, which is legible on a telephone too."""
    figure = Figure(figsize=(6, 0.8 + panels * height), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False, **shared)[:, 0]


def tidy(axes: Axes, axis: Any = "y", absent: Sequence[str] = ()) -> None:
    """Draws a grid behind the data, no top and right frame lines, and says what is not drawn."""
    look.tidy(axes, axis)
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
