# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""The figures of a run, as PNG files, drawn only from the contents of ``results.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sam_optax.experiments.reporting import sweeps, words
from sam_optax.experiments.reporting.axes import Style, column, legend, png, styled, tidy
from sam_optax.experiments.types import Json

CAPTIONS = {
    "curves.png": "After each epoch; bands are ± one standard deviation of several seeds.",
    "bars.png": "After the last epoch, with standard deviations; small dots are the seeds.",
    "steps.png": "One training step after each epoch: both gradients, and the rise of its loss. "
    "SGD takes one gradient, so that it is not here.",
    "tune.png": "On held-out examples, with the labels trained on, after the last epoch. Stars are "
    "the choices; crosses are where training breaks down: it diverges, or is at chance.",
    "sweep.png": "After the last epoch, with 95 % intervals; bands are methods with one setting. "
    "Points of equal settings are shifted sideways, so that none hides another.",
    "cost.png": "Each method at its best setting here, with 95 % intervals. Left is cheap.",
}
_STEPS = {
    "cosine": "cosine of both gradients",
    "loss_rise": "rise of the loss (nats)",
    "ascent_norm": "norm, ascent gradient",
    "sharp_norm": "norm, sharp gradient",
}


def all_figures(results: Json) -> dict[str, bytes]:
    """The figures applicable to a run, by file name."""
    methods = results["methods"]
    found = {"tune.png": sweeps.tune(results)} if words.setting(results, "tune") else {}
    if sweeps.options(results):
        found["sweep.png"] = sweeps.sweep(results)
    title, score = words.title(results, "standard deviation"), words.Score.of(results)
    curves = {score.key: score.label, "train_loss": "training loss"}
    found["curves.png"] = over_epochs(methods, curves, (6, 6.8), title, score)
    if len(methods) > 1:
        found["bars.png"] = bars(results)
        if any(method["step_cost"] for method in methods):
            found["cost.png"] = sweeps.cost(results)
    if any("cosine" in method["seeds"][0]["curves"] for method in methods):
        found["steps.png"] = over_epochs(methods, _STEPS, (6, 10.8), title, score)
    return found


def bars(results: Json) -> bytes:
    """Final score, sharpness and step cost, one below the other; dots are the seeds."""
    score = words.Score.of(results)
    methods, rho = results["methods"], words.setting(results, "sharpness_rho")
    figure, panels = column(3, 0.9 + 0.27 * len(methods))
    panels[0].set_xlabel(score.label)
    panels[1].set_xlabel(f"sharpness L(w + ε) − L(w), ρ = {rho:g} (nats)")
    panels[2].set_xlabel("step cost (time relative to SGD)")
    for axes, key in zip(panels, (score.key, "sharpness", "step_cost"), strict=True):
        for i, (method, look) in enumerate(styled(methods)):
            # The step cost is a single number, not one per seed.
            runs = [run[key] for run in method["seeds"] if key in run and not run["diverged"]]
            known = [x for x in runs or [method.get(key)] if x is not None]
            values = np.array(known, float) * _factor(key, score)
            text, end = "diverged" if method["diverged"] else "not measured", 0.0
            if len(values):
                spread = values.std(ddof=1) if len(values) > 1 else 0.0
                text, end = f"{values.mean():.4g}", max(values.mean() + spread, *values)
                look_of: Any = {"color": look.color, "height": 0.7, "capsize": 4}
                axes.barh(i, values.mean(), xerr=spread or None, **look_of)
            heights = i + np.linspace(-0.25, 0.25, 2 + len(values))[1:-1]  # none hides another
            axes.plot(values, heights, "o", markersize=3, color="white", markeredgecolor="black")
            beside: Any = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(text, (end, i), fontsize="small", **beside)
        axes.margins(x=0.12)
        axes.set_yticks(range(len(methods)), [method["name"] for method in methods])
        axes.invert_yaxis()
        tidy(axes, "x")
    return png(figure, words.title(results, "standard deviation"))


def over_epochs(
    methods: Sequence[Json],
    labels: Mapping[str, str],
    size: tuple[float, float],
    title: str,
    score: words.Score,
) -> bytes:
    """Curves of the seeds of each method, by key, in a grid as wide as its size allows."""
    figure, columns = Figure(figsize=size, layout="constrained"), int(size[0] // 5)
    grid = figure.subplots(-(-len(labels) // columns), columns, squeeze=False).ravel()
    for axes in grid[len(labels) :]:
        axes.remove()
    for axes, (key, label) in zip(grid, labels.items(), strict=False):
        absent = []
        for i, (method, look) in enumerate(styled(methods)):
            curves = [run["curves"].get(key, []) for run in method["seeds"]]
            if not np.isfinite(np.array(curves, float)).any():
                absent.append(f"{method['name']} ({'not known' if curves[0] else 'has none'})")
            _curve(axes, method["name"], np.array(curves, float) * _factor(key, score), look, i)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        tidy(axes, absent=absent)
        axes.margins(y=0.1)
    legend(figure, grid[0])
    return png(figure, title)


def _curve(axes: Axes, name: str, values: np.ndarray, look: Style, i: int) -> None:
    finite = np.ma.masked_invalid(values)
    epochs = np.flatnonzero(finite.count(0))
    mean = finite.mean(0)[epochs]
    every = max(1, len(epochs) // 8)
    where = (i * every // 5 % max(1, len(epochs)), every)  # markers of equal curves alternate
    axes.plot(epochs + 1, mean, label=name, markersize=4, markevery=where, **look._asdict())
    if len(values) > 1:
        std = finite.std(0, ddof=1).filled(0)[epochs]
        axes.fill_between(epochs + 1, mean - std, mean + std, color=look.color, alpha=0.15)


def _factor(key: str, score: words.Score) -> float:
    return score.factor if key == score.key else 1
