# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""The table of a run, for the terminal and for the page."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.frontier import CONFIDENCE, GOAL_COST, GOAL_SHARE, points

_COST = "time of a training step, median ratio over interleaved epochs"


class Summary(NamedTuple):
    """A line for each method; the first two columns are text, the others numbers."""

    columns: dict[str, str]  # heading -> unit
    rows: list[list[str]]
    legend: dict[str, str]  # heading -> what it is


def summarize(results: Mapping[str, Any], best: bool = False) -> Summary:
    """The table of a run; on request with the best test accuracy of an epoch."""
    return _frontier(results) if words.setting(results, "frontier") else _comparison(results, best)


def print_results(console: Console, results: Mapping[str, Any]) -> None:
    """Prints what was trained on, a line for each method, and what the columns are."""
    console.print(Text("\n" + "\n".join(words.heading(results)) + "\n"), soft_wrap=True)
    summary = summarize(results)
    table = ruled()
    for i, (name, unit) in enumerate(summary.columns.items()):
        table.add_column(f"{name}\n{unit}" if unit else name, justify="left" if i < 2 else "right")
    for row in summary.rows:
        table.add_row(*map(Text, row))
    console.print(table)
    legend = "\n".join(f"{name + ':':14} {text}" for name, text in summary.legend.items())
    console.print(Text("\n" + legend), style="dim")


def print_settings(console: Console, description: Mapping[str, Any]) -> None:
    """Prints what would be trained, where each value is from, and the notes."""
    table = ruled("setting", "value", "from")
    rows = [("", name, setting) for name, setting in description["settings"].items()]
    for method in description["methods"]:
        prefix, sources = f"{method['name']}: ", method["sources"]
        rows += [(prefix, name, setting) for name, setting in method["settings"].items()]
        rows += [
            (prefix, name, {"value": value, "source": sources[name]})
            for name, value in method["hyperparameters"].items()
        ]
    for prefix, name, setting in rows:
        cells = prefix + words.named(name), words.plain(setting["value"]), setting["source"]
        table.add_row(*(Text(words.printable(cell)) for cell in cells))
    console.print(table)
    for note in description["notes"]:
        console.print(Text(note), soft_wrap=True)


def ruled(*columns: str) -> Table:
    """An empty table, with a rule below its headings and no frame."""
    look: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    return Table(*columns, **look, padding=(0, 1, 0, 0))


def _comparison(results: Mapping[str, Any], best: bool) -> Summary:
    methods, seeds = results["methods"], len(results["seeds"])
    columns = {"method": "", "with": "", "test accuracy": "%"} | ({"best": "%"} if best else {})
    columns |= {"train loss": "nats", "sharpness": "nats", "step cost": "× SGD"}
    rho, examples = (words.setting(results, f"sharpness_{of}") for of in ("rho", "examples"))
    on = words.counted(examples, "training example") if examples else "the training set"
    legend = {"test accuracy": "after the last epoch, on clean labels; mean ± deviation of seeds"}
    if best:
        legend["best"] = "the highest test accuracy after an epoch: chosen on the test examples"
    legend |= {
        "train loss": "mean over the training set, with the labels trained on",
        "sharpness": f"L(w + ε) − L(w) on {on}, ε of SAM with ρ {rho:g} for all",
        "step cost": _COST,
    }
    if any(method["diverged"] for method in methods):
        legend["diverged"] = "training loss not finite; the numbers are of the other seeds"
    rows = []
    for method in methods:
        summary = method["summary"]
        row = [method["name"], words.trained_with(method), words.percent(summary["test_accuracy"])]
        if 0 < method["diverged"] < seeds:
            row[-1] += f"\n{method['diverged']} of {seeds} diverged"
        if best:
            row.append(words.percent(summary["best_test_accuracy"]))
        row += [_fixed(summary["train_loss"]["mean"], 3), _fixed(summary["sharpness"]["mean"], 4)]
        rows.append([*row, _fixed(method["step_cost"], 2)])
    return Summary(columns, rows, legend)


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _frontier(results: Mapping[str, Any]) -> Summary:
    columns = {"method": "", "with": "", "test accuracy": "%", "gain kept": "%"}
    columns |= {"step cost": "× SGD", "goal": ""}
    rows = [
        [
            point.method,
            words.trained_with(method),
            words.variation(100 * point.accuracy, 100 * point.interval),
            "–" if np.isnan(point.share) else f"{100 * point.share:.0f}",
            _fixed(method["step_cost"], 2),
            "reached" if point.share >= GOAL_SHARE and point.cost <= GOAL_COST else "",
        ]
        for point, method in zip(points(results), results["methods"], strict=True)
    ]
    seeds = words.counted(len(results["seeds"]), "seed")
    legend = {
        "test accuracy": f"after the last epoch, on clean labels; mean of {seeds} ± "
        f"{100 * CONFIDENCE:g} % confidence interval",
        "gain kept": "share of the gain over SGD that SAM has at its best radius here",
        "step cost": _COST,
        "goal": f"{100 * GOAL_SHARE:g} % of the gain at {GOAL_COST:g} × the cost of SGD",
    }
    return Summary(columns, rows, legend)
