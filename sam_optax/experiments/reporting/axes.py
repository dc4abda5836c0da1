"""Shared by the figures of a run: error bars, axes, and files."""

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def column(panels: int, height: float, **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels below each other, which is legible on a telephone too."""
    figure = Figure(figsize=(6, 0.8 + panels * height), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False, **shared)[:, 0]


def errorbars(axes: Axes, x: Any, y: Any, half: Sequence[float | None], **look: Any) -> None:
    """Draws shares in percent, with intervals where they are known."""
    look = {"linewidth": 1.2, "elinewidth": 1, "capsize": 3, "fillstyle": "none", **look}
    bars = 100 * np.nan_to_num(np.array(half, float)) if any(half) else None
    axes.errorbar(x, 100 * np.array(y), bars, **look)


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
