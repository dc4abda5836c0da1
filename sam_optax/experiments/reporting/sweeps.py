"""Scores over hyperparameters and over cost: of several values, and of ``--tune``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.axes import Style, column, errorbars, legend, png, styled, tidy
from sam_optax.experiments.types import Json

Rows = Sequence[tuple[Json, Style]]


def options(results: Json) -> list[str]:
    """The hyperparameters for the axis of a figure: those with several numbers in one method."""
    values: dict[tuple[str, str], set[Any]] = {}
    for row in results["methods"]:
        for option, value in row["hyperparameters"].items():
            if _is_number(value):
                values.setdefault((option, row["method"]), set()).add(value)
    return list(dict.fromkeys(option for (option, _), of in values.items() if len(of) > 1))


def sweep(results: Json) -> bytes:
    """The score over each hyperparameter with several values, in panels."""
    names, score = options(results), words.Score.of(results)
    figure, panels = column(len(names), 4)
    for axes, option in zip(panels, names, strict=True):
        over(axes, styled(results["methods"]), option, score)
        axes.set_ylabel(score.label)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small", frameon=False)
    return png(figure, words.title(results))


def over(axes: Axes, rows: Rows, option: str, score: words.Score) -> None:
    """Draws a line per method and setting of other hyperparameters; bands if none vary."""
    lines: dict[str, list[tuple[float, Json]]] = {}
    looks: dict[str, Style] = {}
    absent = []
    for row, look in rows:
        several, rest = _varied([of for of, _ in rows if of["method"] == row["method"]], option)
        values, found = row["hyperparameters"], row["summary"][score.key]
        if found["mean"] is None:
            absent.append(f"{row['name']} (diverged)")
        elif not several:
            mean, width = (score.factor * (found[key] or 0) for key in ("mean", "interval"))
            line = {"color": look.color, "linestyle": look.linestyle, "label": row["method"]}
            axes.axhline(mean, **line)
            axes.axhspan(mean - width, mean + width, color=look.color, alpha=0.15, linewidth=0)
        elif option in several and _is_number(values[option]):
            text = [f"{words.symbol(o)} {words.plain(values[o])}" for o in rest]
            label = ", ".join(filter(None, [row["method"], *text]))
            looks.setdefault(label, look.again(len(looks) if text else 0))
            lines.setdefault(label, []).append((values[option], found))
        else:
            absent.append(f"{row['name']} (not a number on this axis)")
    for i, (label, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        x = np.array([value for value, _ in points]) * 1.015**i  # none hides another
        y, half = ([of[key] for _, of in points] for key in ("mean", "interval"))
        errorbars(axes, x, y, half, score.factor, label=label, **looks[label]._asdict())
    _ticks(axes, sorted({x for points in lines.values() for x, _ in points}))
    symbol = f"{words.symbol(option)} ({option})" if option in words.SYMBOLS else ""
    axes.set_xlabel(symbol or words.named(option))
    tidy(axes, absent=absent)


def _varied(rows: Sequence[Json], option: str) -> tuple[list[str], list[str]]:
    """The hyperparameters of several values, and those of them that one does not determine.

    Values that change together, such as both radii of a schedule, are one dimension.
    """
    given = [{o: str(x) for o, x in row["hyperparameters"].items()} for row in rows]
    several = [o for o in given[0] if len({of[o] for of in given}) > 1]
    pairs = {o: len({(of.get(option), of[o]) for of in given}) for o in several}
    return several, [o for o in several if pairs[o] > len({of.get(option) for of in given})]


def _ticks(axes: Axes, values: Sequence[float]) -> None:
    if values and values[0] > 0 and values[-1] >= 8 * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(values, [words.plain(x) for x in values], fontsize="small")
    axes.minorticks_off()


def cost(results: Json) -> bytes:
    """The score against step cost, each method at its best setting."""
    figure, (axes,) = column(1, 4.2)
    rows, score, absent = styled(results["methods"]), words.Score.of(results), []
    best = {row["method"]: row for row, _ in sorted(rows, key=lambda of: score.rank(of[0]))}
    looks = {row["method"]: look for row, look in reversed(rows)}  # that of its first setting
    for row in best.values():
        of = row["summary"][score.key]
        if row["step_cost"] is None or of["mean"] is None:
            absent.append(f"{row['name']} ({'diverged' if row['diverged'] else 'not timed'})")
            continue
        shown = {**looks[row["method"]]._asdict(), "label": row["method"]}
        shown |= {"linestyle": "none", "markersize": 9}
        errorbars(axes, [row["step_cost"]], [of["mean"]], [of["interval"]], score.factor, **shown)
    axes.set(xlabel="time of a training step, relative to SGD", ylabel=score.label)
    tidy(axes, "both", absent)
    if len(absent) < len(best):
        legend(figure, axes)
    return png(figure, words.title(results))


def tune(results: Json) -> bytes:
    """What ``--tune`` has tried, a panel for each method."""
    rows, score = styled(results["methods"]), words.Score.of(results)
    figure, panels = column(len(rows), 2.4, sharey=True)
    for axes, (row, look) in zip(panels, rows, strict=True):
        landscape(axes, row["tune"]["trials"], row["tune"]["chosen"], look, score)
        axes.set_title(row["name"], fontsize="medium", loc="left", parse_math=False)
        axes.set_ylabel(score.label.replace("test", "held-out"))
    return png(figure, words.task(results))


def landscape(
    axes: Axes,
    trials: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, float],
    look: Style,
    score: words.Score,
) -> None:
    """Draws the held-out score over a value of the trials, a line for each setting of others.

    Args:
      axes: where to draw.
      trials: each with its ``values`` by option, the ``held_out`` scores of each seed after each
        epoch (``None`` if it was skipped after the seed diverged), and whether it is
        ``broken_down``.
      chosen: the values that were chosen, which get a star.
      look: the style of the method.
      score: what is shown.
    """
    x = next((o for o in chosen if len({of["values"][o] for of in trials}) > 1), next(iter(chosen)))
    rows = []
    for of in trials:
        last = np.array([curve[-1] for curve in of["held_out"]], float)
        mean, at = float(np.nan_to_num(last).mean()), of["values"][x]
        summary = {score.key: {"mean": mean, "interval": None}}
        row = {"name": "", "method": "", "hyperparameters": of["values"], "summary": summary}
        rows.append((row, look))
        for shown, marker, colour in (
            (dict(of["values"]) == dict(chosen), "*", look.color),
            (of["broken_down"], "x", "black"),
        ):
            if shown:
                axes.plot(at, score.factor * mean, marker, markersize=14, color=colour, zorder=3)
    over(axes, rows, x, score)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", frameon=False)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
