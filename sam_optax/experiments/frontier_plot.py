# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""The picture of ``compare --frontier``: accuracy against the cost of a step and the radius."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from sam_optax.experiments.frontier import (
    CONFIDENCE,
    GOAL_COST,
    GOAL_SHARE,
    Point,
    points,
)
from sam_optax.experiments.plots import COLOURS, MARKERS, png, setting, tidy
from sam_optax.experiments.table import counted


def frontier(results: Mapping[str, Any]) -> bytes:
    """Test accuracy against step cost, and against the radius, as PNG."""
    found = [p for p in points(results) if not np.isnan(p.accuracy)]
    names = list(dict.fromkeys(p.name for p in found))
    figure = Figure(figsize=(11, 5), layout="constrained")
    cost, radius = figure.subplots(1, 2, sharey=True)
    for i, name in enumerate(names):
        mine = [p for p in found if p.name == name]
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        best = max(mine, key=lambda p: p.accuracy)
        rest = [p for p in mine if p is not best]
        _points(cost, [p.cost for p in rest], rest, {**style, "alpha": 0.35, "markersize": 5})
        _points(cost, [best.cost], [best], {**style, "label": name, "markersize": 9})
        if "rho" in best.hyperparameters:
            mine.sort(key=lambda p: p.hyperparameters["rho"])
            _points(radius, [p.hyperparameters["rho"] for p in mine], mine, style, line="-")
    _limit(cost, found)
    cost.set_xlabel("time of a training step, relative to SGD")
    cost.set_ylabel("test accuracy (%)")
    cost.set_title("each method at its best radius, paler at the others", fontsize="medium")
    radius.set_xscale("log")
    radius.set_xticks([0.2, 0.5, 1, 2, 5, 10])
    radius.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    radius.xaxis.set_minor_formatter(NullFormatter())
    radius.set_xlabel("radius ρ, in units of the weights (m_asam: relative to them)")
    radius.set_title("how much the radius matters", fontsize="medium")
    for axes in (cost, radius):
        tidy(axes)
        axes.margins(y=0)
        axes.grid(axis="x", alpha=0.3)
    seeds = counted(len(results["seeds"]), "seed")
    figure.suptitle(
        f"{setting(results)}; mean of {seeds} with {100 * CONFIDENCE:g} % confidence intervals",
        fontsize="medium",
    )
    figure.legend(
        *cost.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(names),
        frameon=False,
    )
    return png(figure)


def _points(
    axes: Axes, x: list[float], found: list[Point], style: Mapping[str, Any], line: str = "none"
) -> None:
    axes.errorbar(
        x,
        [100 * p.accuracy for p in found],
        [0 if np.isnan(p.interval) else 100 * p.interval for p in found],
        linestyle=line,
        linewidth=1.2,
        elinewidth=1,
        capsize=3,
        **style,
    )


def _limit(axes: Axes, found: list[Point]) -> None:
    """Draws what there is to reach, and leaves out radii that are far too large."""
    base, best = (max(p.accuracy for p in found if p.name == name) for name in ("sgd", "sam"))
    lowest = min([p.accuracy for p in found if p.share > -0.1], default=min(base, best))
    top = max(p.accuracy + np.nan_to_num(p.interval) for p in found if p.accuracy >= base)
    axes.set_ylim(100 * lowest - 2, min(100.0, 100 * top + 1))
    axes.axvline(GOAL_COST, color="0.5", linewidth=1, linestyle="--")
    axes.annotate(
        f"{GOAL_COST:g} × SGD",
        (GOAL_COST, axes.get_ylim()[0]),
        xytext=(4, 5),
        textcoords="offset points",
        fontsize="small",
        color="0.35",
    )
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
