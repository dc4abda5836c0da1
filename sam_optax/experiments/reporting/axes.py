"""Shared by the figures of a run: error bars, axes, and files."""

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def errorbars(
    axes: Axes, x: Sequence[float], y: Sequence[float], half: Sequence[float | None], **look: Any
) -> None:
    """Draws shares in percent, with intervals where they are known."""
    look = {"linestyle": "none", "linewidth": 1.2, "elinewidth": 1, "capsize": 3, **look}
    axes.errorbar(x, 100 * np.array(y), 100 * np.nan_to_num(np.array(half, float)), **look)


def tidy(axes: Axes, axis: Any = "y") -> None:
    """Draws a grid behind the data and removes the top and right frame lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=axis, alpha=0.3)
    axes.set_axisbelow(True)


def legend(figure: Figure, axes: Axes) -> None:
    """Draws one legend below all axes."""
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)


def png(figure: Figure, title: str = "") -> bytes:
    """The figure as a file."""
    if title:
        figure.suptitle(title, fontsize="medium", parse_math=False)  # a dollar sign is one
    file = io.BytesIO()
    with warnings.catch_warnings():  # a missing glyph is drawn as a box
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
