# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""Held-out accuracy over the values that ``--tune`` has tried."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.axes import png, tidy
from sam_optax.experiments.reporting.palette import styles
from sam_optax.experiments.types import Json

_LABELS = {False: "radius ρ, or what scales it", True: "weight decay"}


def tune(results: Json) -> bytes:
    """The figure as a file."""
    return png(draw(results), words.task(results))


def draw(results: Json) -> Figure:
    """A line for each method with its choice, in a panel for radii and one for weight decays."""
    methods = results["methods"]
    looks = zip(methods, styles([m["method"] for m in methods]), strict=True)
    lines: dict[bool, list[Any]] = {}
    for method, look in looks:
        lines.setdefault("weight_decay" in method["tune"]["chosen"], []).append((method, look))
    panels = sorted(lines)
    figure = Figure(figsize=(2 + 5 * len(panels), 4.6), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, decay in zip(grid, panels, strict=True):
        for method, look in lines[decay]:
            trials, chosen = method["tune"]["trials"], method["tune"]["chosen"]
            x = np.array([next(iter(of["values"].values())) for of in trials])
            last = [[curve[-1] for curve in of["held_out"]] for of in trials]
            y = 100 * np.nan_to_num(np.array(last, float)).mean(axis=1)  # skipped: not trained on
            best = x == next(iter(chosen.values()))
            broken = np.array([of["broken_down"] for of in trials])
            axes.plot(x, y, label=method["name"], markersize=4, **look._asdict())
            axes.plot(x[best], y[best], "*", markersize=15, color=look.color, zorder=3)
            axes.plot(x[broken], y[broken], "x", markersize=9, color="black", zorder=4)
        axes.set(xlabel=_LABELS[decay], xscale="log" if x.min() > 0 else "linear")
        if x.min() > 0:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
        axes.legend(fontsize="small", frameon=False)
        tidy(axes)
    grid[0].set_ylabel("held-out accuracy (%)")
    return figure
