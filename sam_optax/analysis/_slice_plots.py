"""Figures of slices of the loss landscape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from sam_optax.analysis import style
from sam_optax.analysis._landscape import LossLine, LossPlane

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_lines(
    lines: Mapping[str, LossLine],
    *,
    xlabel: str = "distance α, relative to the weights",
    ylabel: str = "loss (nats)",
) -> Figure:
    """Plots the loss along a line for several networks in one frame.

    Args:
      lines: a :class:`LossLine` per name. The name of a method, such as "SAM" or "ASAM, ρ = 1",
        has this method's colour, and line, of all figures.
      xlabel: label of α; the default is for filter-normalized directions. For the gradient
        direction α is ρ in units of the weights; between checkpoints it is the fraction of the way.
      ylabel: label of the loss, with its unit.

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> alphas = jnp.linspace(-1, 1, 21)
      >>> line = analysis.loss_line(jnp.square, jnp.zeros(()), jnp.ones(()), alphas)
      >>> figure = analysis.plot_lines({"a parabola": line})
    """
    figure = style.figure(7.0, 4.0)
    axes = figure.subplots()
    for i, (name, line) in zip(style.positions(lines), lines.items(), strict=True):
        axes.plot(line.positions, line.values, label=name, **style.line(i))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    style.tidy(axes)
    if len(lines) > 1:
        axes.legend(frameon=False)
    return figure


def plot_planes(
    planes: Mapping[str, LossPlane],
    *,
    xlabel: str = "α, relative to the weights",
    ylabel: str = "β, relative to the weights",
    unit: str = "loss (nats)",
    levels: int = 14,
    ceiling: float | None = None,
) -> Figure:
    """Plots the loss on a plane for several networks, three per row, with a common colour scale.

    Contours are spaced as the squares of whole numbers above the lowest loss.

    Args:
      planes: a :class:`LossPlane` per name.
      xlabel: label of α.
      ylabel: label of β.
      unit: label of the loss, with its unit.
      levels: number of contours.
      ceiling: losses above it are drawn as this value. Default: the largest loss.

    Returns:
      A matplotlib figure. A cross marks the weights w.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> alphas = jnp.linspace(-1, 1, 11)
      >>> plane = analysis.loss_plane(
      ...     lambda w: jnp.sum(w**2), jnp.ones(2), jnp.array([1.0, 0]), jnp.array([0, 1.0]),
      ...     alphas, alphas)
      >>> figure = analysis.plot_planes({"a bowl": plane})
    """
    from matplotlib.colors import BoundaryNorm

    values = np.concatenate([np.ravel(plane.values) for plane in planes.values()])
    finite = values[np.isfinite(values)]
    scale = finite if finite.size else np.zeros(1)
    low, high = float(scale.min()), float(scale.max() if ceiling is None else ceiling)
    # Rounding merges the levels of a narrower range, such as that of equal losses.
    width = max(high - low, 4 * levels**2 * np.spacing(abs(low)), 1e-12)
    # Levels are denser near the lowest loss, where the contours of a bowl are far apart.
    edges = low + width * np.linspace(0, 1, levels + 1) ** 2
    norm = BoundaryNorm(edges, 256)
    columns = min(len(planes), 3)
    rows = -(-len(planes) // columns)
    figure = style.figure(2.8 * columns + 1.2, 2.9 * rows + 0.4)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(planes) :]:
        axes.remove()
    for axes, (name, plane) in zip(grid.flat, planes.items(), strict=False):
        drawn = np.nan_to_num(np.asarray(plane.values, np.float64).T, nan=edges[-1])
        # What equals a large lowest level would be left out.
        drawn = np.clip(drawn, np.nextafter(low, np.inf), edges[-1])
        area = plane.first, plane.second, drawn, edges
        filled = axes.contourf(*area, cmap=style.SEQUENTIAL, norm=norm)
        axes.contour(*area, colors="white", linewidths=0.4, alpha=0.6)
        axes.plot(0, 0, marker="+", color="white", markersize=11, markeredgewidth=2)
        axes.set_title(name, fontsize="medium")
        axes.label_outer()
        spans = np.ptp(plane.first), np.ptp(plane.second)
        if max(spans) < 3 * min(spans):
            axes.set_aspect("equal", adjustable="box")
    figure.supxlabel(xlabel, fontsize="medium")
    figure.supylabel(ylabel, fontsize="medium")
    bar = figure.colorbar(filled, ax=list(figure.axes), shrink=0.9, spacing="uniform")
    bar.set_label(unit)
    # Where no loss is finite, the scale is arbitrary: without numbers.
    ticks = edges[:: max(1, levels // 6)] if finite.size else []
    bar.set_ticks(list(ticks), labels=[f"{tick:.3g}" for tick in ticks])
    bar.minorticks_off()
    return figure
