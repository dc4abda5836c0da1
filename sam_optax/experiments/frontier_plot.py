# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""The picture of ``compare --frontier``: accuracy against the cost of a step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_optax.experiments.frontier import (
    CONFIDENCE,
    GOAL_COST,
    GOAL_SHARE,
    Point,
    points,
)
from sam_optax.experiments.plots import COLOURS, MARKERS, png, setting, tidy


def frontier(results: Mapping[str, Any]) -> bytes:
    """Test accuracy against step cost, a marker for each method and radius, as PNG."""
    found = [p for p in points(results) if not np.isnan(p.accuracy)]
    names = list(dict.fromkeys(p.name for p in found))
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        mine = [p for p in found if p.name == name]
        axes.errorbar(
            [p.cost for p in mine],
            [100 * p.accuracy for p in mine],
            [0 if np.isnan(p.interval) else 100 * p.interval for p in mine],
            label=name,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="none",
            capsize=3,
            alpha=0.9,
        )
        for p in mine:
            if "rho" in p.hyperparameters:
                axes.annotate(
                    f"{p.hyperparameters['rho']:g}",
                    (p.cost, 100 * p.accuracy),
                    xytext=(6, 3),
                    textcoords="offset points",
                    fontsize="small",
                    color=COLOURS[i % len(COLOURS)],
                )
    axes.axvline(GOAL_COST, color="0.5", linewidth=1, linestyle="--")
    _mark_goal(axes, found)
    axes.set_xlabel("time of a training step, relative to SGD")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(
        f"{setting(results)}\nlabels: radius ρ; bars: {100 * CONFIDENCE:g} % confidence intervals "
        f"over {len(results['seeds'])} seeds",
        fontsize="medium",
    )
    axes.legend(loc="lower right", frameon=False)
    tidy(axes)
    axes.grid(axis="x", alpha=0.3)
    return png(figure)


def _mark_goal(axes: Axes, found: list[Point]) -> None:
    """Draws what there is to reach, if SAM gains anything."""
    base, best = (max(p.accuracy for p in found if p.name == name) for name in ("sgd", "sam"))
    if best <= base:
        return
    goal = 100 * (base + GOAL_SHARE * (best - base))
    axes.axhline(goal, color="0.5", linewidth=1, linestyle="--")
    axes.annotate(
        f"{100 * GOAL_SHARE:g} % of SAM's gain",
        (axes.get_xlim()[1], goal),
        xytext=(-4, -12),
        textcoords="offset points",
        ha="right",
        fontsize="small",
        color="0.35",
    )
    # Radii that are far too large would squeeze all others into a line.
    axes.set_ylim(bottom=min(100 * p.accuracy for p in found if p.share > -0.2) - 2)
