# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""Accuracy over hyperparameters and cost: of several values, of ``--tune`` and ``--frontier``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.axes import Style, column, errorbars, legend, png, styled, tidy
from sam_optax.experiments.reporting.results import GOAL_COST, GOAL_SHARE
from sam_optax.experiments.types import Json

Rows = Sequence[tuple[Json, Style]]
_ACCURACY = "test accuracy (%)"


def options(results: Json) -> list[str]:
    """The hyperparameters for the axis of a figure: those with several numbers in one method."""
    values: dict[tuple[str, str], set[Any]] = {}
    for row in results["methods"]:
        for option, value in row["hyperparameters"].items():
            if _is_number(value):
                values.setdefault((option, row["method"]), set()).add(value)
    return list(dict.fromkeys(option for (option, _), of in values.items() if len(of) > 1))


def sweep(results: Json) -> bytes:
    """Test accuracy over each hyperparameter with several values, in panels."""
    names = options(results)
    figure, panels = column(len(names), 4)
    for axes, option in zip(panels, names, strict=True):
        over(axes, styled(results["methods"]), option)
        axes.set_ylabel(_ACCURACY)
        axes.legend(fontsize="small", frameon=False)
    return png(figure, words.title(results))


def over(axes: Axes, rows: Rows, option: str) -> None:
    """Draws a line per method and setting of other hyperparameters; bands if none vary."""
    lines: dict[str, list[tuple[float, Json]]] = {}
    looks: dict[str, Style] = {}
    absent = []
    for row, look in rows:
        several, rest = _varied([of for of, _ in rows if of["method"] == row["method"]], option)
        values, accuracy = row["hyperparameters"], row["summary"]["test_accuracy"]
        if accuracy["mean"] is None:
            absent.append(f"{row['name']} (diverged)")
        elif not several:
            mean, width = 100 * accuracy["mean"], 100 * (accuracy["interval"] or 0)
            line = {"color": look.color, "linestyle": look.linestyle, "label": row["method"]}
            axes.axhline(mean, **line)
            axes.axhspan(mean - width, mean + width, color=look.color, alpha=0.15, linewidth=0)
        elif option in several and _is_number(values[option]):
            text = [f"{words.symbol(o)} {words.plain(values[o])}" for o in rest]
            label = ", ".join(filter(None, [row["method"], *text]))
            looks.setdefault(label, look.again(len(looks) if text else 0))
            lines.setdefault(label, []).append((values[option], accuracy))
        else:
            absent.append(f"{row['name']} (not a number on this axis)")
    for i, (label, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        x = np.array([value for value, _ in points]) * 1.015**i  # none hides another
        y, half = ([of[key] for _, of in points] for key in ("mean", "interval"))
        errorbars(axes, x, y, half, label=label, **looks[label]._asdict())
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


def frontier(results: Json) -> bytes:
    """Test accuracy against step cost, each method at its best radius, and against the radius."""
    swept = not words.setting(results, "tune")  # else tune.png shows the radii
    figure, panels = column(1 + swept, 4.2)
    rows, cost, absent = styled(results["methods"]), panels[0], []
    best = {row["method"]: row for row, _ in sorted(rows, key=lambda of: _mean(of[0]))}
    looks = {row["method"]: look for row, look in reversed(rows)}  # that of its first radius
    for row in best.values():
        if row["step_cost"] is None or not _mean(row):
            absent.append(f"{row['name']} ({'diverged' if row['diverged'] else 'not timed'})")
            continue
        half = row["summary"]["test_accuracy"]["interval"]
        shown = {**looks[row["method"]]._asdict(), "label": row["method"]}
        shown |= {"linestyle": "none", "markersize": 9}
        errorbars(cost, [row["step_cost"]], [_mean(row)], [half], **shown)
    if {"sgd", "sam"} <= best.keys() and _mean(best["sam"]) > (base := _mean(best["sgd"])) > 0:
        goal = base + GOAL_SHARE * (_mean(best["sam"]) - base)
        label = f"{100 * GOAL_SHARE:g} % of SAM's gain"
        cost.axhline(100 * goal, color="0.5", linestyle="--", label=label)
    cost.axvline(GOAL_COST, color="0.5", linestyle=":", label=f"{GOAL_COST:g} × SGD")
    cost.set(xlabel="time of a training step, relative to SGD", ylabel=_ACCURACY)
    for axes in panels[1:]:
        over(axes, rows, "rho")
        label = "radius ρ, in units of the weights (m_asam: relative to them)"
        axes.set(xlabel=label, ylabel=_ACCURACY)
    tidy(cost, "both", absent)
    legend(figure, cost)
    return png(figure, words.title(results))


def tune(results: Json) -> bytes:
    """What ``--tune`` has tried, a panel for each method."""
    rows = styled(results["methods"])
    figure, panels = column(len(rows), 2.4, sharey=True)
    for axes, (row, look) in zip(panels, rows, strict=True):
        landscape(axes, row["tune"]["trials"], row["tune"]["chosen"], look)
        axes.set_title(row["name"], fontsize="medium", loc="left", parse_math=False)
        axes.set_ylabel("held-out (%)")
    return png(figure, words.task(results))


def landscape(
    axes: Axes, trials: Sequence[Mapping[str, Any]], chosen: Mapping[str, float], look: Style
) -> None:
    """Draws held-out accuracy over a value of the trials, a line for each setting of others.

    Args:
      axes: where to draw.
      trials: each with its ``values`` by option, the ``held_out_accuracy`` of each seed after each
        epoch (``None`` if it was skipped after the seed diverged), and whether it is
        ``broken_down``.
      chosen: the values that were chosen, which get a star.
      look: the style of the method.
    """
    x = next((o for o in chosen if len({of["values"][o] for of in trials}) > 1), next(iter(chosen)))
    rows = []
    for of in trials:
        last = np.array([curve[-1] for curve in of["held_out_accuracy"]], float)
        mean, at = float(np.nan_to_num(last).mean()), of["values"][x]
        summary = {"test_accuracy": {"mean": mean, "interval": None}}
        row = {"name": "", "method": "", "hyperparameters": of["values"], "summary": summary}
        rows.append((row, look))
        for shown, marker, colour in (
            (dict(of["values"]) == dict(chosen), "*", look.color),
            (of["broken_down"], "x", "black"),
        ):
            if shown:
                axes.plot(at, 100 * mean, marker, markersize=14, color=colour, zorder=3)
    over(axes, rows, x)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", frameon=False)


def _mean(row: Json) -> float:
    return row["summary"]["test_accuracy"]["mean"] or 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
