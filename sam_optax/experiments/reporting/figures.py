"""The figures of a run, drawn from the contents of ``results.json``."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sam_optax.experiments.named import short
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.axes import by_method, column, legend, look, png, tidy
from sam_optax.experiments.types import Json

CAPTIONS = {
    "tune.png": "On held-out examples, with the labels trained on, after the last epoch. Stars are "
    "the choices; crosses are where training breaks down: it diverges, or is at chance.",
    "sweep.png": "After the last epoch, with 95 % intervals; bands are methods with one value, at "
    "their best. Points of equal settings are shifted sideways, so that none hides another.",
    "curves.png": "After each epoch; bands are ± one standard deviation of several seeds.",
    "cost.png": "Each method at its best setting here, with 95 % intervals. Left is cheap.",
}


@matplotlib.rc_context({"text.parse_math": False})  # a dollar sign of a name is one
def all_figures(results: Json) -> dict[str, bytes]:
    """The figures applicable to a run, by file name."""
    methods, found = results["methods"], dict[str, bytes]()
    if any(method.get("tune", {}).get("chosen") for method in methods):
        found["tune.png"] = tune(results)
    if swept(results):
        found["sweep.png"] = sweep(results)
    found["curves.png"] = over_epochs(results)
    if len(methods) > 1 and any(method.get("step_cost") for method in methods):
        found["cost.png"] = cost(results)
    return found


def over_epochs(results: Json) -> bytes:
    """Score and training loss: the mean of the seeds of each method, and their deviation."""
    score, methods = words.Score.of(results), by_method(results["methods"])
    looks = [(row, look(i, j)) for i, rows in methods for j, row in enumerate(rows)]
    figure, panels = column(2, 2.8)
    measures = (score.key, score.label, score.factor), ("train_loss", "training loss", 1)
    for axes, (key, label, factor) in zip(panels, measures, strict=True):
        absent = []
        for method, how in looks:
            curves = np.array([run["curves"][key] for run in method["seeds"]], float)
            curves = factor * np.ma.masked_invalid(curves)
            if not curves.count():
                absent.append(f"{method['name']} (not known)")
            epochs, mean = 1 + np.arange(curves.shape[1]), curves.mean(0)
            more = {"label": method["name"], "markersize": 4, "markevery": len(epochs) // 8 or 1}
            axes.plot(epochs, mean, **more, **how)
            if len(curves) > 1:
                std = curves.std(0, ddof=1).filled(0)
                axes.fill_between(epochs, mean - std, mean + std, color=how["color"], alpha=0.15)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        tidy(axes, absent=absent)
        axes.margins(y=0.1)
    legend(figure, panels[0])
    return png(figure, words.title(results, "standard deviation"))


def cost(results: Json) -> bytes:
    """The score against step cost, each method at its best setting."""
    figure, (axes,) = column(1, 4.2)
    score, absent = words.Score.of(results), []
    for i, rows in by_method(results["methods"]):
        best = max(rows, key=score.rank)
        if best.get("step_cost") is None or math.isinf(score.rank(best)):
            absent.append(f"{best['name']} ({'diverged' if best['diverged'] else 'not timed'})")
        else:
            how = {**look(i), "linestyle": "none", "markersize": 9}
            _points(axes, [best["step_cost"]], [best], score, short(best["method"]), how)
    axes.set(xlabel="time of a training step, relative to SGD", ylabel=score.label)
    tidy(axes, "both", absent)
    legend(figure, axes)
    return png(figure, words.title(results))


def swept(results: Json) -> list[str]:
    """The hyperparameters for the axis of a figure: those with several numbers in one method."""
    methods = [rows for _, rows in by_method(results["methods"])]
    found = [o for rows in methods for o in rows[0]["hyperparameters"] if len(_values(rows, o)) > 1]
    return [*dict.fromkeys(found)]


def sweep(results: Json) -> bytes:
    """The score over each hyperparameter with several values, in panels."""
    options = swept(results)
    figure, panels = column(len(options), 4)
    for axes, option in zip(panels, options, strict=True):
        _panel(axes, option, by_method(results["methods"]), words.Score.of(results))
    return png(figure, words.title(results))


def tune(results: Json) -> bytes:
    """What ``--tune`` has tried, a panel for each method for which it has chosen anything.

    The score is drawn over the first option with several values.
    """
    methods = [(i, row) for i, rows in by_method(results["methods"]) for row in rows]
    methods = [(i, row) for i, row in methods if row["tune"]["chosen"]]
    figure, panels = column(len(methods), 2.4, sharey=True)
    for axes, (i, row) in zip(panels, methods, strict=True):
        score, search, trials = words.Score.of(results), row["tune"], list[Json]()
        for of in search["trials"]:
            last = [curve[-1] or 0 for curve in of["held_out"]]  # None of a seed that diverged
            summary = {score.key: {"mean": float(np.mean(last)), "interval": None}}
            marks = "*" * (of["values"] == search["chosen"]) + "x" * of["broken_down"]
            trial = {"method": "", "hyperparameters": of["values"], "summary": summary}
            trials.append({**trial, "marks": marks})
        options = [o for o in search["chosen"] if len(_values(trials, o)) > 1]
        _panel(axes, (options or [*search["chosen"]])[0], [(i, trials)], score)
        axes.set_ylabel(score.label.replace("test", "held-out"))
        axes.set_title(row["name"], fontsize="medium", loc="left")
    return png(figure, words.task(results))


def _panel(
    axes: Axes, option: str, methods: Sequence[tuple[int, Sequence[Json]]], score: words.Score
) -> None:
    """Draws the score over a hyperparameter: a line for each setting of what else varies.

    A method with one value of it has a band, of its best setting. Rows may have ``marks``, which
    are drawn on their points.
    """
    absent, ticks = list[str](), set[float]()
    for i, rows in methods:
        known = [row for row in rows if math.isfinite(score.rank(row))]
        absent += [f"{row['name']} (diverged)" for row in rows if row not in known]
        values = _values(known, option)
        if len(values) > 1:
            numbers = [row for row in known if row["hyperparameters"][option] in values]
            ticks |= values
            absent += [f"{row['name']} (not a number)" for row in known if row not in numbers]
            for j, (label, line) in enumerate(_lines(numbers, option).items()):
                x = np.array([row["hyperparameters"][option] for row in line])
                x = x * 1.015 ** len(axes.containers)  # none hides another
                _points(axes, x, line, score, label, look(i, j))
        elif known:
            best, how = max(known, key=score.rank), {**look(i), "marker": None}
            mean, half = score.shown(best)
            axes.axhline(mean, label=short(best["method"]), **how)
            axes.axhspan(mean - half, mean + half, color=how["color"], alpha=0.15, linewidth=0)
    if ticks and min(ticks) > 0 and max(ticks) >= 8 * min(ticks):
        axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), map(words.plain, sorted(ticks)), fontsize="small")
    axes.minorticks_off()
    axes.set(xlabel=words.symbol(option), ylabel=score.label)
    axes.legend(*axes.get_legend_handles_labels(), fontsize="small", frameon=False)
    tidy(axes, absent=absent)


def _lines(rows: Sequence[Json], option: str) -> dict[str, list[Json]]:
    """The rows, in the order of an option, by the values of what else varies.

    Such as p, but not rho_min where rho_max determines it.
    """
    values = [row["hyperparameters"] for row in rows]
    pairs = {name: {(of[option], str(of[name])) for of in values} for name in values[0]}
    others = [name for name in pairs if len(pairs[name]) > len(pairs[option])]
    found: dict[str, list[Json]] = {}
    for row in sorted(rows, key=lambda row: row["hyperparameters"][option]):
        own = row["hyperparameters"]
        texts = [f"{words.symbol(name)} {words.plain(own[name])}" for name in others]
        label = ", ".join(filter(None, [short(row["method"]), *texts]))
        found.setdefault(label, []).append(row)
    return found


def _points(
    axes: Axes, x: Any, rows: Sequence[Json], score: words.Score, label: str, how: Json
) -> None:
    """Draws mean scores, with intervals where they are known, and the marks of the rows."""
    y, half = np.transpose([score.shown(row) for row in rows])
    shown: Any = {**how, "linewidth": 1.2, "elinewidth": 1, "capsize": 3, "fillstyle": "none"}
    axes.errorbar(x, y, half if half.any() else None, label=label, **shown)
    for row, *at in zip(rows, x, y, strict=True):
        for mark in row.get("marks", ""):
            colour = "black" if mark == "x" else how["color"]
            axes.plot(*at, mark, markersize=14, color=colour, zorder=3)


def _values(rows: Sequence[Json], option: str) -> set[float]:
    """The numbers of a hyperparameter."""
    found = {row["hyperparameters"].get(option) for row in rows}
    return {x for x in found if isinstance(x, int | float) and not isinstance(x, bool)}
