# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""The table of a run, for the terminal, for notebooks and for the page."""

import re
from collections.abc import Iterator, Sequence
from textwrap import TextWrapper
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.results import BASES
from sam_optax.experiments.reporting.schema import OF_METRIC, UNITS
from sam_optax.experiments.types import Json

_SCORES = {  # heading: before the key, heading of the interval
    "score": ("", "± 95 %"),
    "chosen epoch": ("tuned_", "chosen 95 %"),
    "best epoch": ("best_", "best 95 %"),
}
_TOP5 = {"top-5": ("test_top5_accuracy", "top-5 95 %")}
_TOP5 |= {"best top-5": ("best_test_top5_accuracy", "best top-5 95 %")}
_NUMBERS = {"train loss": ("train_loss", 3), "sharpness": ("sharpness", 4)}
_UNITS = {"method": "", "with": "", "train loss": "", "sharpness": "", "cost": "× SGD"}
_LEGEND = {name: UNITS[key] for name, (key, _) in {**_TOP5, **_NUMBERS}.items()} | {
    "chosen epoch": "the epoch that --tune chose on held-out examples, and the score after it",
    "best epoch": UNITS["best_test_accuracy"],
    "± 95 %": "confidence interval of the mean, by Student's t",
    "over SGD": "score minus SGD's, seed by seed; mean ± 95 % confidence interval",
    "over SAM": "score minus SAM's, likewise; of several radii, that of the best one",
    "cost": UNITS["step_cost"],
}
_ON_TEST = ["best epoch", "best 95 %", "best top-5", "best top-5 95 %"]
"""Chosen on test examples, which --tune avoids."""
_IN_FULL = ["chosen 95 %", "top-5", "top-5 95 %", "train loss", *_ON_TEST[1:]]
"""Only on the page, as a terminal is not wide enough."""
_NARROW = ("sharpness", "± 95 %", "best epoch", "chosen epoch", "over SAM", "cost", "over SGD")
"""Columns that a narrow terminal omits, in this order."""


class ResultsTable(JupyterMixin):
    """What was trained, one line per method, and the meaning of the columns, from ``results``.

    rich prints and exports it, notebooks display it; it omits columns that would not fit.
    """

    def __init__(self, results: Json) -> None:
        self._results = results

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        wrap = TextWrapper(options.max_width, break_long_words=False, break_on_hyphens=False)
        yield Text("\n" + "\n".join(map(wrap.fill, words.heading(self._results))) + "\n")
        (table, legend), left_out = summarize(self._results, _IN_FULL), []
        for name in _NARROW:
            shown = [str(column.header).split("\n")[0] for column in table.columns]
            wide = console.measure(table, options=options.update(max_width=1000)).minimum
            if name in shown and wide > options.max_width:
                left_out.append(name)
                table, legend = summarize(self._results, [*_IN_FULL, *left_out])
        yield table
        if left_out:
            text = f"{', '.join(left_out)}, for lack of width; see the report of --out"
            legend["not shown"] = text
        lines = [f"{name + ':':13} {text}" for name, text in legend.items()]
        wrap.subsequent_indent = " " * 14
        yield Text("\n" + "\n".join(map(wrap.fill, lines)), style="dim")


def summarize(results: Json, without: Sequence[str] = ()) -> tuple[Table, dict[str, str]]:
    """A line per method, without some columns and those without known values, and a legend.

    The first two columns are text, the others numbers.
    """
    methods, score = results["methods"], words.Score.of(results)
    if words.setting(results, "tune"):
        without = [*without, *_ON_TEST]
    found = [_cells(method, results) for method in methods]
    names = [n for n in found[0] if n not in without and any(row[n] != "–" for row in found)]
    rows = [[row[name] for name in names] for row in found]
    legend = {score.heading: UNITS[score.key] if score.is_accuracy else OF_METRIC}
    legend |= {name: _LEGEND[name] for name in names if name in _LEGEND}
    if len(results["seeds"]) > 1:
        legend[score.heading] += "; mean ± standard deviation of seeds"
    if "sharpness" in legend:
        legend["sharpness"] += f", {words.setting(results, 'sharpness_rho'):g}"
    if words.setting(results, "tune"):
        legend["with"] = "radius and weight decay chosen on held-out examples"
    if any(re.search(r"± 0\.0+( |$)", cell) for row in rows for cell in row):
        legend["± 0.00"] = "all seeds are equal, to this precision"
    if any(method["diverged"] for method in methods):
        legend["diverged"] = "training loss not finite; the numbers are of the other seeds"
    table = ruled()
    for i, (name, cells) in enumerate(zip(names, zip(*rows, strict=True), strict=True)):
        unit = _UNITS.get(name, score.unit)
        heading = f"{name}\n{unit}" if unit else name
        longest = max(map(len, "\n".join([heading, *cells]).split("\n")))
        width = min(longest, 17) if name == "with" else longest  # numbers are not wrapped
        table.add_column(heading, justify="left" if i < 2 else "right", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table, legend


def _cells(method: Json, results: Json) -> dict[str, str]:
    """The row of a method, by heading."""
    summary, none, seeds = method["summary"], {"mean": None, "interval": None}, method["seeds"]
    row, score = {"method": method["method"]}, words.Score.of(results)
    row["with"] = words.trained_with(method)
    scores = {
        score.heading if of == "score" else of: (before + score.key, interval)
        for of, (before, interval) in _SCORES.items()
    }
    for name, (key, interval) in {**scores, **(_TOP5 if score.is_accuracy else {})}.items():
        row[name] = score.text(summary[key]) if key in summary else "–"
        width = summary.get(key, none)["interval"]
        digits = 2 if score.unit else 4
        row[interval] = "–" if width is None else f"± {score.factor * width:.{digits}f}"
    if "tune" in method:
        row["chosen epoch"] = f"{method['tune']['epoch']}: {row['chosen epoch']}"
    if 0 < method["diverged"] < len(seeds):
        row[score.heading] += f"\n{method['diverged']} of {len(seeds)} diverged"
    for base in BASES:
        gain = method["differences"].get(base, {}).get(score.key, none)
        known = gain["mean"] is not None
        row[f"over {base.upper()}"] = score.text(gain, "interval", "+") if known else "–"
    for name, (key, digits) in _NUMBERS.items():
        row[name] = _fixed(summary.get(key, none)["mean"], digits)
    return row | {"cost": _fixed(method["step_cost"], 2)}


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def print_results(console: Console, results: Json) -> None:
    """Prints the task, one line per method, and the meaning of the columns."""
    console.print(ResultsTable(results), soft_wrap=True)  # paths are kept on one line


def print_settings(console: Console, description: Json) -> None:
    """Prints what would be trained, the source of each value, and the notes."""
    table = ruled("setting", "value", "from")
    for method, name, value, source in words.settings(description):
        texts = f"{method and method + ': '}{name}", words.plain(value), source
        table.add_row(*map(Text, texts))
    console.print(table)
    for note in description["notes"]:
        console.print(Text(note), soft_wrap=True)


def ruled(*columns: str) -> Table:
    """An empty table, with a rule below its headings and no frame."""
    look: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    return Table(*columns, **look, padding=(0, 1, 0, 0))
