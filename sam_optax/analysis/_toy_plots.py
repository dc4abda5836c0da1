"""Figures 1 and 3 of the ASAM paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sam_optax
from sam_optax._internal import hyperparameters as hp
from sam_optax.analysis import style
from sam_optax.analysis._sharpness import adaptive_sharpness, sharpness
from sam_optax.analysis._toy import PAPER_STARTS, toy_loss, toy_trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BEFORE, _AFTER = (1.0, 1.0), (3.0, 1 / 3)
"""w and w' = A w with A = diag(3, 1/3), the points of figure 1."""


def plot_regions(rho: float = 0.3) -> Figure:
    """Plots maximization regions before and after a rescaling: figure 1 of the ASAM paper.

    The panels show :func:`toy_loss` around w = (1, 1) and w' = (3, 1/3), which have the same loss,
    with the sphere of sharpness, the cuboid of adaptive sharpness with p = ∞ and the ellipsoid with
    p = 2. Crosses mark the maxima that :func:`sharpness` and :func:`adaptive_sharpness` find. The
    red contour is the largest loss in the region around w; for adaptive sharpness, the region
    around w' touches it too.

    Args:
      rho: radius ρ in (0, 1). Default 0.3; the paper does not give its value.

    Returns:
      A matplotlib figure of three panels.

    Raises:
      ValueError: ``rho`` out of range.

    Example:
      >>> from sam_optax import analysis
      >>> figure = analysis.plot_regions()

    References:
      Kwon et al., `ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
      Deep Neural Networks <https://arxiv.org/abs/2102.11600>`_, 2021.
    """
    from matplotlib.lines import Line2D

    hp.check("rho", rho, lower=1e-6, upper=1, schedule=False)
    figure = style.figure(10.0, 3.1)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    circle = np.linspace(0, 2 * np.pi, 200)
    unit_circle = np.stack([np.cos(circle), np.sin(circle)])
    unit_square = np.array([[1, -1, -1, 1, 1], [1, 1, -1, -1, 1]])
    kinds: Sequence[tuple[str, Any, Any, Any]] = (
        (r"sphere: $\|\varepsilon\|_2 \leq \rho$", unit_circle, lambda w: 1.0, sharpness),
        (
            r"cuboid: $\|T_w^{-1}\varepsilon\|_\infty \leq \rho$",
            unit_square,
            np.abs,
            lambda *args: adaptive_sharpness(*args, p=np.inf),
        ),
        (
            r"ellipsoid: $\|T_w^{-1}\varepsilon\|_2 \leq \rho$",
            unit_circle,
            np.abs,
            adaptive_sharpness,
        ),
    )
    for axes, (title, boundary, scale, measure) in zip(panels, kinds, strict=True):
        largest = None
        for w, marker, fill in ((_BEFORE, "o", style.colour(1)), (_AFTER, "^", style.colour(3))):
            point = np.array(w)
            region = point[:, None] + rho * np.reshape(scale(point), (-1, 1)) * boundary
            axes.fill(*region, color=fill, alpha=0.25, linewidth=0)
            axes.plot(*region, color=fill, linewidth=1.2)
            found = measure(toy_loss, jnp.asarray(w, jnp.float32), rho)
            axes.plot(*point, marker=marker, color=fill, markersize=7)
            axes.plot(*(point + np.asarray(found.eps)), marker="x", color="black", markersize=7)
            largest = float(found.loss + found.value) if largest is None else largest
        _product_contour(axes, float(toy_loss(jnp.array(_BEFORE))) + 0.04, style.colour(1), "--")
        assert largest is not None
        _product_contour(axes, largest + 0.04, style.colour(4), "-")
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("weight w₁")
        axes.set_xlim(0, 4.2)
        axes.set_ylim(0, 2.1)
        axes.set_aspect("equal")
        style.tidy(axes)
    panels[0].set_ylabel("weight w₂")
    handles = [
        Line2D([], [], color=style.colour(1), marker="o", label="w = (1, 1)"),
        Line2D([], [], color=style.colour(3), marker="^", label="w′ = (3, ⅓)"),
        Line2D([], [], color="black", marker="x", linestyle="", label="largest loss of a region"),
        Line2D([], [], color=style.colour(1), linestyle="--", label="loss of w and w′"),
        Line2D([], [], color=style.colour(4), label="largest loss around w"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def plot_trajectories(
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    *,
    learning_rate: float = 0.01,
    steps: int = 1000,
) -> Figure:
    """Plots trajectories in the toy valley from the paper's two starts: figure 3 of the ASAM paper.

    Args:
      methods: a perturbation per name. Default: SAM with ρ = 0.05, as in the paper, and ASAM with ρ
        = 0.5 and η = 0.
      learning_rate: see :func:`toy_trajectory`.
      steps: see :func:`toy_trajectory`.

    Returns:
      A matplotlib figure of two panels, one per start.

    Raises:
      ValueError: an argument out of range.

    Example:
      >>> from sam_optax import analysis
      >>> figure = analysis.plot_trajectories(steps=50)

    References:
      Kwon et al., `ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
      Deep Neural Networks <https://arxiv.org/abs/2102.11600>`_, 2021, section 5.1.
    """
    from matplotlib.lines import Line2D

    if methods is None:
        methods = {
            "SAM, ρ = 0.05": sam_optax.sam(0.05),
            "ASAM, ρ = 0.5": sam_optax.asam(0.5, eta=0.0),
        }
    figure = style.figure(9.5, 4.4)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    grid = np.linspace(0, 0.4, 201), np.linspace(-0.06, 0.26, 161)
    points = jnp.stack(jnp.meshgrid(*grid), axis=-1).reshape(-1, 2)
    losses = np.asarray(jax.vmap(toy_loss)(points)).reshape(len(grid[1]), len(grid[0]))
    for axes, start in zip(panels, PAPER_STARTS, strict=True):
        filled = axes.contourf(*grid, losses, 12, cmap="Greys", alpha=0.5)
        _product_contour(axes, 0.04, "black", ":")
        for i, (name, method) in zip(style.positions(methods), methods.items(), strict=True):
            path = toy_trajectory(method, start, learning_rate=learning_rate, steps=steps)
            axes.plot(*path.T, label=name, **style.line(i))
            axes.plot(*path[-1], marker=style.marker(i), color=style.colour(i), markersize=9)
            if float(jnp.max(jnp.abs(path - path[0]))) < 1e-3:
                note = f"{name}: does not move"
                axes.annotate(
                    note, start, (0, -10), textcoords="offset points", ha="center", va="top"
                )
        axes.plot(*start, marker="o", color="black", markersize=4.5, zorder=5)
        axes.set_title(f"from w = ({start[0]:g}, {start[1]:g})", fontsize="medium")
        axes.set_xlabel("weight w₁")
        axes.set_xlim(0.1, 0.4)
        axes.set_ylim(-0.06, 0.26)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("weight w₂")
    figure.colorbar(filled, ax=list(panels), shrink=0.9).set_label("loss |w₁ ReLU(w₂) − 0.04|")
    handles, _ = panels[0].get_legend_handles_labels()
    handles += [
        Line2D([], [], color="black", marker="o", linestyle="", markersize=5, label="start"),
        Line2D([], [], color="black", linestyle=":", label="minimizers w₁w₂ = 0.04"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _product_contour(axes: Axes, product: float, colour: str, style: str) -> None:
    """Draws the curve w₁w₂ = product."""
    first = np.linspace(0.01, 5, 2000)
    axes.plot(first, product / first, color=colour, linestyle=style, linewidth=1.6)
