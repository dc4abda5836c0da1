# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""The table of a run, for the terminal and for the page."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.frontier import GOAL_COST, GOAL_SHARE, points
from sam_optax.experiments.reporting.results import BASES, CONFIDENCE
from sam_optax.experiments.types import Json

_COST = "time of a training step relative to SGD's, median over interleaved epochs"
_ACCURACIES = (  # with the half widths of their intervals
    ("accuracy", "test_accuracy", "± 95 %"),
    ("chosen epoch", "tuned_test_accuracy", "chosen 95 %"),
    ("best epoch", "best_test_accuracy", "best 95 %"),
    ("top-5", "test_top5_accuracy", "top-5 95 %"),
    ("best top-5", "best_test_top5_accuracy", "best top-5 95 %"),
    ("BLEU", "bleu", "BLEU 95 %"),
)
# Only for the page, as a terminal is not wide enough.
_IN_FULL = (
    *("best 95 %", "chosen 95 %", "top-5", "top-5 95 %", "best top-5", "best top-5 95 %"),
    *("BLEU 95 %", "train loss"),
)
_NARROW = ("sharpness", "± 95 %", "best epoch", "chosen epoch")
"""Columns that a narrow terminal omits, in this order."""
_UNITS = {"method": "", "with": "", "train loss": "nats", "sharpness": "nats", "cost": "× SGD"}


class Summary(NamedTuple):
    """One line per method; the first two columns are text, the others numbers."""

    columns: dict[str, str]  # heading -> unit
    rows: list[list[str]]
    legend: dict[str, str]  # heading -> what it is


def summarize(results: Json, without: Sequence[str] = ()) -> Summary:
    """The table of a run, without some columns of a comparison."""
    if words.setting(results, "frontier"):
        return _frontier(results)
    return _comparison(results, without)


def print_results(console: Console, results: Json) -> None:
    """Prints the task, one line per method, and the meaning of the columns."""
    console.print(Text("\n" + "\n".join(words.heading(results)) + "\n"), soft_wrap=True)
    summary = summarize(results, _IN_FULL)
    left_out: list[str] = []
    for name in _NARROW:
        if name in summary.columns and _width(console, _table(summary)) > console.width:
            left_out.append(name)
            summary = summarize(results, [*_IN_FULL, *left_out])
    table, width = _table(summary), _width(console, _table(summary))
    table.width = width if width > console.width else None
    console.print(table, crop=False)
    lines = [f"{name + ':':14} {text}" for name, text in summary.legend.items()]
    if left_out:
        names = ", ".join(left_out)
        lines.append(f"{'not shown:':14} {names}, for lack of width; see the report of --out")
    console.print(Text("\n" + "\n".join(lines)), style="dim", soft_wrap=True)


def _table(summary: Summary) -> Table:
    """Long hyperparameters are wrapped; numbers are not."""
    table = ruled()
    for i, (name, unit) in enumerate(summary.columns.items()):
        heading = f"{name}\n{unit}" if unit else name
        cells = "\n".join([heading, *(row[i] for row in summary.rows)]).split("\n")
        width = min(max(map(len, cells)), 17 if name == "with" else 100)
        table.add_column(heading, justify="left" if i < 2 else "right", min_width=width)
    for row in summary.rows:
        table.add_row(*map(Text, row))
    return table


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=1000)).minimum


def print_settings(console: Console, description: Json) -> None:
    """Prints what would be trained, the source of each value, and the notes."""
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


def _comparison(results: Json, without: Sequence[str]) -> Summary:
    seeds = len(results["seeds"])
    rho, examples = (words.setting(results, f"sharpness_{of}") for of in ("rho", "examples"))
    on = words.counted(examples, "training example") if examples else "the training set"
    text = results["dataset"].get("text")
    accuracy = "share of the test bytes predicted" if text else "on clean test examples"
    legend = {
        "accuracy": f"{accuracy} after the last epoch; mean ± standard deviation of seeds",
        "± 95 %": "confidence interval of the mean, by Student's t",
        "chosen epoch": "the best epoch on held-out examples, and the test accuracy after it",
        "best epoch": "the highest accuracy of any epoch, chosen on the test examples: optimistic",
        "top-5": "after the last epoch; the label is among the five likeliest",
        "over SGD": "accuracy minus SGD's, seed by seed; mean ± 95 % confidence interval",
        "over SAM": "accuracy minus SAM's, likewise; of several radii, that of the best one",
        "BLEU": "of greedy translations of the test pairs, by sacrebleu",
        "train loss": f"mean over the training {'bytes' if text else 'set'}, with the labels "
        "trained on",
        "sharpness": f"L(w + ε) − L(w) on {on}, ε of SAM with ρ {rho:g} for all",
        "cost": _COST,
        "diverged": "training loss not finite; the numbers are of the other seeds",
    }
    if words.setting(results, "tune"):  # an epoch that is not chosen on test examples
        without = [*without, "best epoch", "best 95 %", "best top-5", "best top-5 95 %"]
        legend = {"with": "radius (of sgd weight decay) chosen on held-out examples", **legend}
    cells = [_cells(method, seeds) for method in results["methods"]]
    # A column without known values is left out.
    names = [n for n in cells[0] if n not in without and any(row[n] != "–" for row in cells)]
    shown = [*names, *(["diverged"] if any(m["diverged"] for m in results["methods"]) else [])]
    return Summary(
        {name: _UNITS.get(name, "%") for name in names},
        [[row[name] for name in names] for row in cells],
        {name: text for name, text in legend.items() if name in shown},
    )


def _cells(method: Json, seeds: int) -> dict[str, str]:
    """The row of a method, by heading."""
    summary, none = method["summary"], {"mean": None, "interval": None}
    row = {"method": method["method"], "with": words.trained_with(method)}
    for name, key, half in _ACCURACIES:
        row[name] = words.percent(summary[key]) if key in summary else "–"
        width = summary.get(key, none)["interval"]
        row[half] = "–" if width is None else f"± {100 * width:.2f}"
    if "tune" in method:
        row["chosen epoch"] = f"{method['tune']['epoch']}: {row['chosen epoch']}"
    if 0 < method["diverged"] < seeds:
        row["accuracy"] += f"\n{method['diverged']} of {seeds} diverged"
    for base in BASES:
        gain = method["differences"].get(base, {}).get("test_accuracy", none)
        known = gain["mean"] is not None
        row[f"over {base.upper()}"] = words.percent(gain, "interval", "+") if known else "–"
    row["train loss"] = _fixed(summary["train_loss"]["mean"], 3)
    row["sharpness"] = _fixed(summary["sharpness"]["mean"], 4)
    return row | {"cost": _fixed(method["step_cost"], 2)}


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _frontier(results: Json) -> Summary:
    columns = {"method": "", "with": "", "test accuracy": "%", "gain kept": "%"}
    columns |= {"cost": "× SGD", "goal": ""}
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
        "cost": _COST,
        "goal": f"{100 * GOAL_SHARE:g} % of the gain at {GOAL_COST:g} × the cost of SGD",
    }
    return Summary(columns, rows, legend)
