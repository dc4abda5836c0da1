"""Accuracy over hyperparameters with several values."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.axes import errorbars, png, tidy
from sam_optax.experiments.reporting.palette import style
from sam_optax.experiments.types import Json

Rows = list[Json]


def varied(results: Json) -> dict[str, dict[str, list[Any]]]:
    """The values of each hyperparameter that has several, by method; empty for other methods."""
    methods: dict[str, dict[str, list[Any]]] = {}
    for row in results["methods"]:
        values = methods.setdefault(row["method"], {})
        for option, value in row["hyperparameters"].items():
            values.setdefault(option, []).append(value)
    return {
        method: {option: found for option, found in values.items() if len(set(found)) > 1}
        for method, values in methods.items()
    }


def options(results: Json) -> list[str]:
    """The hyperparameters for the axis of a figure: those with several numbers in one method."""
    found = [
        option
        for values in varied(results).values()
        for option, several in values.items()
        if len({value for value in several if _is_number(value)}) > 1
    ]
    return list(dict.fromkeys(found))


def sweep(results: Json) -> bytes:
    """Test accuracy over each hyperparameter with several values, in panels."""
    names = options(results)
    figure = Figure(figsize=(1 + 5.5 * len(names), 5), layout="constrained")
    for axes, option in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        over(axes, results, option)
        low, high = axes.get_ylim()
        axes.set(ylabel="test accuracy (%)", ylim=(max(low, 0), min(high, 100)))
        axes.legend(fontsize="small", frameon=False)
    seeds = words.counted(len(results["seeds"]), "seed")
    return png(figure, f"{words.task(results)}; mean of {seeds} with 95 % confidence intervals")


def over(axes: Axes, results: Json, option: str) -> None:
    """Draws a line per method and setting of other hyperparameters; bands if none vary."""
    ticks = set()
    for method, several in varied(results).items():
        rows = [
            row
            for row in results["methods"]
            if row["method"] == method and row["summary"]["test_accuracy"]["mean"] is not None
        ]
        if not several and rows:
            _band(axes, rows[0])
        lines: dict[str, Rows] = {}
        for row in rows:
            values = row["hyperparameters"]
            if option in several and _is_number(values[option]):
                rest = [
                    f"{words.symbol(o)} {words.plain(values[o])}" for o in several if o != option
                ]
                lines.setdefault(", ".join([method, *rest]), []).append(row)
        for i, (label, line) in enumerate(lines.items()):
            line.sort(key=lambda row: row["hyperparameters"][option])
            x = [row["hyperparameters"][option] for row in line]
            ticks.update(x)
            accuracies = [row["summary"]["test_accuracy"] for row in line]
            mean, half = ([of[key] for of in accuracies] for key in ("mean", "interval"))
            errorbars(axes, x, mean, half, label=label, **style(method, i)._asdict())
    if ticks and min(ticks) > 0 and max(ticks) >= 8 * min(ticks):
        axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [words.plain(x) for x in sorted(ticks)])
    axes.minorticks_off()
    axes.set_xlabel(f"{words.symbol(option)} ({option})" if option in words.SYMBOLS else option)
    tidy(axes)


def _band(axes: Axes, row: Json) -> None:
    accuracy, color = row["summary"]["test_accuracy"], style(row["method"]).color
    mean, half = 100 * accuracy["mean"], 100 * (accuracy["interval"] or 0)
    axes.axhline(mean, color=color, linewidth=1, label=row["method"])
    axes.axhspan(mean - half, mean + half, color=color, alpha=0.15, linewidth=0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
