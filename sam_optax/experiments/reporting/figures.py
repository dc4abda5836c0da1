# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""The figures of a run, as PNG files, drawn only from the contents of ``results.json``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sam_optax.experiments.reporting import sweep, tuning, words
from sam_optax.experiments.reporting.axes import errorbars, legend, png, tidy
from sam_optax.experiments.reporting.frontier import GOAL_COST, GOAL_SHARE, Point, points
from sam_optax.experiments.reporting.palette import Style, style, styles
from sam_optax.experiments.types import Json

CAPTIONS = {
    "curves.png": "After each epoch; bands are ± one standard deviation of the seeds.",
    "bars.png": "After the last epoch, with standard deviations; dots are the seeds.",
    "steps.png": "One training step after each epoch: both gradients, and the rise of its loss.",
    "tune.png": "On held-out examples, with the labels trained on, after the last epoch. Stars are "
    "the choices; crosses are where training breaks down: it diverges, or is at chance.",
    "sweep.png": "After the last epoch, with 95 % intervals; bands are methods with one setting.",
    "frontier.png": "Methods in the upper left corner are good and cheap.",
}
_CURVES = {"test_accuracy": "test accuracy (%)", "train_loss": "training loss (nats per example)"}
_STEPS = {
    "cosine": "cosine of ascent and sharp gradient",
    "loss_rise": "rise of the batch's loss (nats)",
    "ascent_norm": "norm of the ascent gradient",
    "sharp_norm": "norm of the sharp gradient",
}
_RADII = (0.2, 0.5, 1, 2, 5, 10)


def all_figures(results: Json) -> dict[str, bytes]:
    """The figures applicable to a run, by file name."""
    found = {"tune.png": tuning.tune(results)} if words.setting(results, "tune") else {}
    if words.setting(results, "frontier"):
        return found | {"frontier.png": frontier(results)}
    if sweep.options(results):
        found["sweep.png"] = sweep.sweep(results)
    found["curves.png"] = curves(results)
    if len(results["methods"]) > 1:
        found["bars.png"] = bars(results)
    if any("cosine" in method["seeds"][0]["curves"] for method in results["methods"]):
        found["steps.png"] = steps(results)
    return found


def curves(results: Json) -> bytes:
    """Test accuracy and training loss after each epoch; bands are ± one deviation."""
    return over_epochs(results["methods"], _CURVES, (10, 4.2), _title(results))


def steps(results: Json) -> bytes:
    """Diagnostics of a step after each epoch: cosine, gradient norms, rise of the loss."""
    return over_epochs(results["methods"], _STEPS, (10, 6.4), _title(results))


def bars(results: Json) -> bytes:
    """Final test accuracy, sharpness and step cost; dots are the seeds."""
    rho = words.setting(results, "sharpness_rho")
    names = [method["name"] for method in results["methods"]]
    many = len(names) > 8
    figure = Figure(figsize=(10, 10.5 if many else 3.8), layout="constrained")
    grid = figure.subplots(*((3, 1) if many else (1, 3)))
    measures = {
        "test_accuracy": ("test accuracy (%)", ".1f"),
        "sharpness": (f"sharpness L(w + ε) − L(w), ρ = {rho:g} (nats)", ".3f"),
        "step_cost": ("step cost (time relative to SGD)", ".2f"),
    }
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(names) > 5 else {}
    for axes, (key, (label, digits)) in zip(grid, measures.items(), strict=True):
        axes.set_ylabel(label)
        for i, (method, look) in enumerate(_styled(results["methods"])):
            _bar(axes, i, look, method, key, digits)
        axes.set_xticks(range(len(names)), names, **turned)
        tidy(axes)
        axes.margins(x=0.02 if many else 0.05, y=0.15)
    return png(figure, _title(results))


def frontier(results: Json) -> bytes:
    """Test accuracy against step cost, and against the radius."""
    found = [p for p in points(results) if not math.isnan(p.accuracy)]
    swept = not words.setting(results, "tune")  # else tune.png shows the radii
    figure = Figure(figsize=(11 if swept else 9, 5), layout="constrained")
    cost, *radii = figure.subplots(1, 1 + swept, sharey=True, squeeze=False)[0]
    for name in dict.fromkeys(p.method for p in found):
        mine = [p for p in found if p.method == name]
        look = {"color": style(name).color, "marker": style(name).marker}
        best = max(mine, key=lambda p: p.accuracy)
        _over_cost(cost, [p for p in mine if p is not best], **look, alpha=0.35, markersize=5)
        _over_cost(cost, [best], **look, label=name, markersize=9)
    _goal(cost, found)
    cost.set(xlabel="time of a training step, relative to SGD", ylabel="test accuracy (%)")
    which = "its best radius, paler at the others" if swept else "the radius that --tune chose"
    cost.set_title(f"each method at {which}", fontsize="medium")
    for radius in radii:
        sweep.over(radius, results, "rho")
        radius.set_title("how much the radius matters", fontsize="medium")
        label = "radius ρ, in units of the weights (m_asam: relative to them)"
        radius.set(xlabel=label, xscale="log")
        radius.set_xticks(_RADII, [f"{rho:g}" for rho in _RADII])
        radius.minorticks_off()
    for axes in (cost, *radii):
        tidy(axes, "both")
    legend(figure, cost)
    seeds = words.counted(len(results["seeds"]), "seed")
    return png(figure, f"{words.task(results)}; mean of {seeds} with 95 % confidence intervals")


def over_epochs(
    methods: Sequence[Json], labels: Mapping[str, str], size: tuple[float, float], title: str
) -> bytes:
    """Curves of the seeds of each method, by key, in a grid of two columns."""
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(-(-len(labels) // 2), 2).ravel()
    for axes in grid[len(labels) :]:
        axes.remove()
    for axes, (key, label) in zip(grid, labels.items(), strict=False):
        for i, (method, look) in enumerate(_styled(methods)):
            if key in method["seeds"][0]["curves"]:
                _curve(axes, method, key, look, i)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
        axes.margins(y=0.1)
    legend(figure, grid[0])
    return png(figure, title)


def _curve(axes: Axes, method: Json, key: str, look: Style, i: int) -> None:
    values = np.array([run["curves"][key] for run in method["seeds"]], float) * _scale(key)
    finite = np.ma.masked_invalid(values)
    epochs = 1 + np.flatnonzero(finite.count(0))
    mean, deviation = finite.mean(0)[epochs - 1], finite.std(0)[epochs - 1]
    every = max(1, len(epochs) // 8)
    where = (i * every // 5 % max(1, len(epochs)), every)
    axes.plot(epochs, mean, label=method["name"], markersize=4, markevery=where, **look._asdict())
    axes.fill_between(epochs, mean - deviation, mean + deviation, color=look.color, alpha=0.15)


def _bar(axes: Axes, i: int, look: Style, method: Json, key: str, digits: str) -> None:
    """A bar of a measure; the step cost is a single number, not one per seed."""
    summary = method["summary"].get(key, {"mean": method.get(key), "std": None})
    runs = [run.get(key) for run in method["seeds"] if not run["diverged"]]
    dots = [_scale(key) * value for value in runs if value is not None]
    mean, deviation = (_scale(key) * (summary[name] or 0) for name in ("mean", "std"))
    axes.bar(i, mean, yerr=deviation or None, capsize=5, color=look.color)
    spread = np.linspace(-0.2, 0.2, len(dots)) if len(dots) > 1 else np.zeros(len(dots))
    axes.scatter(i + spread, dots, s=14, color="white", edgecolor="black", zorder=3)
    text = "–" if summary["mean"] is None else f"{mean:{digits}}"
    above: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
    axes.annotate(text, (i, max([mean + deviation, *dots])), fontsize="small", **above)


def _scale(key: str) -> int:
    return 100 if key == "test_accuracy" else 1


def _over_cost(axes: Axes, found: list[Point], **look: Any) -> None:
    cost, y, half = ([getattr(p, name) for p in found] for name in ("cost", "accuracy", "interval"))
    errorbars(axes, cost, y, half, **look)


def _goal(axes: Axes, found: list[Point]) -> None:
    """Draws the goal, and leaves out radii that are far too large."""
    base, best = (
        max((p.accuracy for p in found if p.method == name), default=None)
        for name in ("sgd", "sam")
    )
    if base is None or best is None:  # all of their seeds diverged
        return
    lowest = min([p.accuracy for p in found if p.share > -0.1], default=min(base, best))
    top = max(p.accuracy + np.nan_to_num(p.interval) for p in found if p.accuracy >= base)
    axes.set_ylim(100 * lowest - 2, min(100.0, 100 * top + 1))
    axes.axvline(GOAL_COST, color="0.5", linestyle=":", label=f"{GOAL_COST:g} × SGD")
    if best > base:
        goal, label = base + GOAL_SHARE * (best - base), f"{100 * GOAL_SHARE:g} % of SAM's gain"
        axes.axhline(100 * goal, color="0.5", linestyle="--", linewidth=1, label=label)


def _styled(methods: Sequence[Json]) -> list[tuple[Json, Style]]:
    return list(zip(methods, styles([m["method"] for m in methods]), strict=True))


def _title(results: Json) -> str:
    seeds = words.counted(len(results["seeds"]), "seed")
    return f"{words.task(results)}; mean and standard deviation of {seeds}"
