"""The figures of a run, as PNG files, drawn only from the contents of ``results.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sam_optax.experiments.named import short
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.axes import (
    Style,
    column,
    legend,
    placed,
    png,
    style,
    styled,
    tidy,
)
from sam_optax.experiments.types import Json

CAPTIONS = {
    "tune.png": "On held-out examples, with the labels trained on, after the last epoch. Stars are "
    "the choices; crosses are where training breaks down: it diverges, or is at chance.",
    "sweep.png": "After the last epoch, with 95 % intervals; bands are methods with one setting. "
    "Points of equal settings are shifted sideways, so that none hides another.",
    "curves.png": "After each epoch; bands are ± one standard deviation of several seeds.",
    "cost.png": "Each method at its best setting here, with 95 % intervals. Left is cheap.",
}


def all_figures(results: Json) -> dict[str, bytes]:
    """The figures applicable to a run, by file name."""
    methods, found = results["methods"], dict[str, bytes]()
    if words.setting(results, "tune"):
        found["tune.png"] = tune(results)
    if swept(results):
        found["sweep.png"] = sweep(results)
    found["curves.png"] = over_epochs(results)
    if len(methods) > 1 and any(method["step_cost"] for method in methods):
        found["cost.png"] = cost(results)
    return found


def over_epochs(results: Json) -> bytes:
    """Score and training loss: the mean of the seeds of each method, and their deviation."""
    score = words.Score.of(results)
    labels = {score.key: score.label, "train_loss": "training loss"}
    figure, panels = column(len(labels), 2.8)
    for axes, (key, label) in zip(panels, labels.items(), strict=True):
        absent = []
        for i, (method, look) in enumerate(styled(results["methods"])):
            curves = [run["curves"][key] for run in method["seeds"]]
            finite = np.ma.masked_invalid(np.array(curves, float))
            finite *= score.factor if key == score.key else 1
            if not finite.count():
                absent.append(f"{method['name']} (not known)")
            epochs, mean = 1 + np.arange(finite.shape[1]), finite.mean(0)
            every = max(1, len(epochs) // 8)
            where = (i * every // 5 % every, every)  # markers of equal curves alternate
            more: Any = {"label": method["name"], "markersize": 4, "markevery": where}
            axes.plot(epochs, mean, **more, **look._asdict())
            if len(curves) > 1:
                std = finite.std(0, ddof=1).filled(0)
                axes.fill_between(epochs, mean - std, mean + std, color=look.color, alpha=0.15)
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
    for i, rows in _by_method(results["methods"]).items():
        best = max(rows, key=score.rank)
        x = best["step_cost"]
        if x is None or best["summary"][score.key]["mean"] is None:
            absent.append(f"{best['name']} ({'diverged' if best['diverged'] else 'not timed'})")
        else:
            look = style(i)._replace(linestyle="none")
            _points(axes, [x], [best], score, look, label=short(best["method"]), markersize=9)
    axes.set(xlabel="time of a training step, relative to SGD", ylabel=score.label)
    tidy(axes, "both", absent)
    if axes.containers:
        legend(figure, axes)
    return png(figure, words.title(results))


def swept(results: Json) -> list[str]:
    """The hyperparameters for the axis of a figure: those with several numbers in one method."""
    found = []
    for rows in _by_method(results["methods"]).values():
        given = [row["hyperparameters"] for row in rows]
        found += [o for o in given[0] if len({of[o] for of in given if _is_number(of[o])}) > 1]
    return [*dict.fromkeys(found)]


def sweep(results: Json) -> bytes:
    """The score over each hyperparameter with several values, in panels."""
    options, score = swept(results), words.Score.of(results)
    figure, panels = column(len(options), 4)
    for axes, option in zip(panels, options, strict=True):
        _panel(axes, option, _by_method(results["methods"]), score, score.label)
    return png(figure, words.title(results))


def tune(results: Json) -> bytes:
    """What ``--tune`` has tried, a panel for each method."""
    methods, score = results["methods"], words.Score.of(results)
    place = placed(row["method"] for row in methods)
    figure, panels = column(len(methods), 2.4, sharey=True)
    for axes, row in zip(panels, methods, strict=True):
        landscape(axes, row["tune"], place[row["method"]], score)
        axes.set_title(row["name"], fontsize="medium", loc="left", parse_math=False)
    return png(figure, words.task(results))


def landscape(axes: Axes, search: Json, method: int, score: words.Score) -> None:
    """Draws the held-out score of a search of ``--tune``, in the style of a method by position.

    It is drawn over the first option with several values, a line for each setting of others.
    """
    trials, chosen, rows = search["trials"], search["chosen"], []
    several = (o for o in chosen if len({of["values"][o] for of in trials}) > 1)
    option = next(several, next(iter(chosen)))
    for of in trials:
        last = [curve[-1] or 0 for curve in of["held_out"]]  # None of a seed that diverged
        summary = {score.key: {"mean": float(np.mean(last)), "interval": None}}
        marks = "*" * (of["values"] == chosen) + "x" * of["broken_down"]
        row = {"method": "", "hyperparameters": of["values"], "summary": summary}
        rows.append({**row, "marks": marks})
    _panel(axes, option, {method: rows}, score, score.label.replace("test", "held-out"))


def _panel(
    axes: Axes, option: str, methods: Mapping[int, Sequence[Json]], score: words.Score, label: str
) -> None:
    """Draws the score of methods, by position, over a hyperparameter."""
    absent = [text for i, rows in methods.items() for text in _over(axes, option, rows, i, score)]
    values = {row["hyperparameters"].get(option) for rows in methods.values() for row in rows}
    ticks = sorted(x for x in values if _is_number(x))
    if ticks and ticks[0] > 0 and ticks[-1] >= 8 * ticks[0]:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [words.plain(x) for x in ticks], fontsize="small")
    axes.minorticks_off()
    symbol = f"{words.symbol(option)} ({option})" if option in words.SYMBOLS else ""
    axes.set(xlabel=symbol or words.named(option), ylabel=label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", frameon=False)
    tidy(axes, absent=absent)


def _over(
    axes: Axes, option: str, rows: Sequence[Json], method: int, score: words.Score
) -> list[str]:
    """Draws a line for each setting of what else varies, or a band if there is one row.

    Rows may have ``marks``, which are drawn on their points. Returns what is not drawn, and why.
    """
    at = [str(row["hyperparameters"].get(option)) for row in rows]
    others = []  # such as p, but not rho_min where rho_max determines it
    for name in rows[0]["hyperparameters"]:
        pairs = {*zip(at, (str(row["hyperparameters"][name]) for row in rows), strict=True)}
        others += [name] if len(pairs) > len({*at}) else []
    lines: dict[str, list[Json]] = {}
    absent = []
    for row in rows:
        values, summary = row["hyperparameters"], row["summary"][score.key]
        if summary["mean"] is None:
            absent.append(f"{row['name']} (diverged)")
        elif len(rows) == 1 and "marks" not in row:
            mean, half = (score.factor * (summary[key] or 0) for key in ("mean", "interval"))
            colour, line, _ = style(method)
            axes.axhline(mean, color=colour, linestyle=line, label=short(row["method"]))
            axes.axhspan(mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
        elif _is_number(values.get(option)):
            texts = [f"{words.symbol(o)} {words.plain(values[o])}" for o in others]
            label = ", ".join(filter(None, [short(row["method"]), *texts]))
            lines.setdefault(label, []).append(row)
        else:
            absent.append(f"{row['name']} (not a number on this axis)")
    for i, (label, drawn) in enumerate(lines.items()):
        drawn.sort(key=lambda row: row["hyperparameters"][option])
        x = np.array([row["hyperparameters"][option] for row in drawn])
        x = x * 1.015 ** len(axes.containers)  # none hides another
        _points(axes, x, drawn, score, style(method, i), label=label)
    return absent


def _points(
    axes: Axes, x: Any, rows: Sequence[Json], score: words.Score, look: Style, **more: Any
) -> None:
    """Draws mean scores, with intervals where they are known, and the marks of the rows."""
    found = [row["summary"][score.key] for row in rows]
    y, half = (score.factor * np.array([of[k] or 0 for of in found]) for k in ("mean", "interval"))
    shown: Any = {"linewidth": 1.2, "elinewidth": 1, "capsize": 3, "fillstyle": "none"}
    axes.errorbar(x, y, half if half.any() else None, **look._asdict(), **shown, **more)
    for row, *at in zip(rows, x, y, strict=True):
        for mark in row.get("marks", ""):
            colour = "black" if mark == "x" else look.color
            axes.plot(*at, mark, markersize=14, color=colour, zorder=3)


def _by_method(rows: Sequence[Json]) -> dict[int, list[Json]]:
    """The settings of each method, by the position of the method's style."""
    found: dict[int, list[Json]] = {}
    place = placed(row["method"] for row in rows)
    for row in rows:
        found.setdefault(place[row["method"]], []).append(row)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
