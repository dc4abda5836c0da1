# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""Pictures of a comparison: curves over the epochs, and bars of the final measures."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sam_optax.experiments.table import counted

# Okabe and Ito's palette (grey for black), which colour-blind readers can tell apart. Line
# styles and markers repeat the distinction for print without colour.
COLOURS = ("#666666", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B3A000")
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def curves(results: Mapping[str, Any]) -> bytes:
    """Test accuracy and training loss after each epoch, as PNG; bands are ± one deviation."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, method in enumerate(results["methods"]):
        _curve(left, method, "test_accuracy", 100, i)
        _curve(right, method, "train_loss", 1, i)
    left.set_ylabel("test accuracy (%)")
    right.set_ylabel("training loss (nats per example)")
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.suptitle(_title(results), fontsize="medium")
    return png(figure)


def bars(results: Mapping[str, Any]) -> bytes:
    """Final test accuracy, sharpness and step cost, as PNG; dots are the seeds."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    accuracy, sharpness, cost = figure.subplots(1, 3)
    _bars(accuracy, results, "test_accuracy", 100, ".1f")
    accuracy.set_ylabel("test accuracy (%)")
    _bars(sharpness, results, "sharpness", 1, ".3f")
    rho = results["settings"]["sharpness_rho"]
    sharpness.set_ylabel(f"sharpness L(w + ε) − L(w), ρ = {rho:g} (nats)")
    for i, method in enumerate(results["methods"]):
        cost.bar(method["name"], method["step_cost"], color=_colour(i))
        _value(cost, i, method["step_cost"], f"{method['step_cost']:.2f}")
    cost.set_ylabel("step cost (time relative to SGD)")
    for axes in (accuracy, sharpness, cost):
        tidy(axes)
        axes.tick_params(axis="x", rotation=30 if len(results["methods"]) > 5 else 0)
    figure.suptitle(_title(results), fontsize="medium")
    return png(figure)


def steps(results: Mapping[str, Any]) -> bytes:
    """What a step looks like after each epoch, as PNG: cosine, gradient norms, rise of the loss."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    grid = figure.subplots(2, 2)
    labels = {
        "cosine": "cosine of ascent and sharp gradient",
        "loss_rise": "rise of the batch's loss (nats)",
        "ascent_norm": "norm of the ascent gradient",
        "sharp_norm": "norm of the sharp gradient",
    }
    watched = [
        (i, m)
        for i, m in enumerate(results["methods"])
        if all("cosine" in run["curves"] for run in m["seeds"])
    ]
    for axes, (key, label) in zip(grid.flat, labels.items(), strict=True):
        for i, method in watched:
            _curve(axes, method, key, 1, i)
        axes.set_ylabel(label)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(_title(results), fontsize="medium")
    return png(figure)


def _curve(axes: Axes, method: Mapping[str, Any], key: str, scale: float, i: int) -> None:
    values = scale * np.array([run["curves"][key] for run in method["seeds"]], float)
    finite = np.isfinite(values)
    count = finite.sum(0)
    epochs = np.arange(1, values.shape[1] + 1)[count > 0]
    mean, deviation = (
        np.array([f(column[ok]) for column, ok in zip(values.T, finite.T, strict=True) if ok.any()])
        for f in (np.mean, np.std)
    )
    line, marker = _LINES[i % len(_LINES)], MARKERS[i % len(MARKERS)]
    every = max(1, values.shape[1] // 8)
    axes.plot(
        epochs,
        mean,
        label=method["name"],
        color=_colour(i),
        linestyle=line,
        marker=marker,
        markersize=4,
        markevery=(i * every // 5 % max(1, len(epochs)), every),
    )
    axes.fill_between(epochs, mean - deviation, mean + deviation, color=_colour(i), alpha=0.15)


def _bars(axes: Axes, results: Mapping[str, Any], key: str, scale: float, digits: str) -> None:
    for i, method in enumerate(results["methods"]):
        summary = method["summary"][key]
        if summary["mean"] is None:
            axes.bar(method["name"], 0)
            axes.annotate("diverged", (i, 0), ha="center", va="bottom", rotation=90)
            continue
        deviation = None if summary["std"] is None else scale * summary["std"]
        axes.bar(
            method["name"], scale * summary["mean"], yerr=deviation, capsize=5, color=_colour(i)
        )
        points = [scale * run[key] for run in method["seeds"] if not run["diverged"]]
        spread = np.linspace(-0.2, 0.2, len(points)) if len(points) > 1 else np.zeros(1)
        axes.scatter(i + spread, points, s=14, color="white", edgecolor="black", zorder=3)
        top = max(*points, scale * summary["mean"] + (deviation or 0))
        _value(axes, i, top, f"{scale * summary['mean']:{digits}}")


def _value(axes: Axes, i: int, height: float, text: str) -> None:
    axes.annotate(
        text, (i, height), xytext=(0, 4), textcoords="offset points", ha="center", va="bottom"
    )


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def tidy(axes: Axes) -> None:
    """Leaves out of the axes what carries nothing."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.1)


def _title(results: Mapping[str, Any]) -> str:
    seeds = counted(len(results["seeds"]), "seed")
    return f"{setting(results)}; mean and standard deviation of {seeds}"


def setting(results: Mapping[str, Any]) -> str:
    """What was trained on, in a few words."""
    noise = results["settings"]["label_noise"]
    labels = f"{100 * noise:g} % wrong training labels" if noise else "clean labels"
    return f"{results['dataset']['name']}, {labels}, {results['settings']['model']}"


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as a file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()
