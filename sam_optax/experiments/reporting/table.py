# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""The table of a run, for the terminal, for notebooks and for the page."""

from collections.abc import Iterator, Sequence
from textwrap import TextWrapper
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.results import UNITS
from sam_optax.experiments.types import Json

_CHOSEN = "the epoch that --tune chose on held-out examples, and the score after it"
_OVER_SGD = "score minus SGD's, seed by seed; mean ± 95 % confidence interval"
_OVER_SAM = "score minus SAM's, likewise; of several radii, that of the best one"


class Column(NamedTuple):
    """What is shown for each method; terminals that are too narrow omit the last ``place`` first.

    Those at place 0 are always there.
    """

    heading: str
    cells: Sequence[str]
    meaning: str = ""
    unit: str = ""
    place: int = 0

    @property
    def header(self) -> str:
        """The heading, with the unit below it."""
        return f"{self.heading}\n{self.unit}".strip()

    @property
    def width(self) -> int:
        """The least number of characters of a line: only hyperparameters are wrapped."""
        longest = max(len(line) for of in (self.header, *self.cells) for line in of.split("\n"))
        return min(longest, 17) if self.heading == "with" else longest


def columns(results: Json) -> list[Column]:
    """The columns of which something is known; the first two are text, the others numbers."""
    methods, score, count = results["methods"], words.Score.of(results), len(results["seeds"])
    key, unit, tuned = score.key, score.unit, words.setting(results, "tune")
    summaries = [method["summary"] for method in methods]

    def scores(of: str) -> list[str]:
        return [score.text(summary[of], unknown="diverged") for summary in summaries]

    def gains(base: str) -> list[str]:
        found = [method["differences"].get(base, {}).get(key, {}) for method in methods]
        return [score.text(of, width="interval", sign="+") for of in found]

    finals = scores(key)
    for i, method in enumerate(methods):
        if 0 < method["diverged"] < count:
            finals[i] += f"\n{method['diverged']} of {count} diverged"
    epoch = Column("best epoch", scores(f"best_{key}"), UNITS["best_test_accuracy"], unit, 5)
    if tuned:  # in the place of what is chosen on test examples
        pairs = zip(methods, scores(f"tuned_{key}"), strict=True)
        cells = [f"{method['tune']['epoch']}: {text}" for method, text in pairs]
        epoch = Column("chosen epoch", cells, _CHOSEN, unit, 4)
    what = score.meaning + "; mean ± standard deviation of seeds" * (count > 1)
    how = "radius and weight decay chosen on held-out examples" if tuned else ""
    halves = [score.text({"mean": of[key]["interval"]}) for of in summaries]
    halves = [half if half == "–" else f"± {half}" for half in halves]
    rises = [words.variation(of.get("sharpness", {}), 4, width="") for of in summaries]
    rise = f"{UNITS['sharpness']}, {words.setting(results, 'sharpness_rho'):g}"
    costs = [words.variation({"mean": method["step_cost"]}) for method in methods]
    found = [
        Column("method", [words.short(method["method"]) for method in methods]),
        Column("with", [words.trained_with(method) for method in methods], how),
        Column(score.heading, finals, what, unit),
        Column("± 95 %", halves, "confidence interval of the mean, by Student's t", unit, 6),
        epoch,
        Column("over SGD", gains("sgd"), _OVER_SGD, unit, 1),
        Column("over SAM", gains("sam"), _OVER_SAM, unit, 3),
        Column("sharpness", rises, rise, place=7),
        Column("cost", costs, UNITS["step_cost"], "× SGD", 2),
    ]
    return [column for column in found if {*column.cells} - {"–"}]


def legend(columns: Sequence[Column]) -> dict[str, str]:
    """The meaning of the columns, and of what else is in their cells."""
    found = {column.heading: column.meaning for column in columns if column.meaning}
    cells = " ".join(cell + "\n" for column in columns for cell in column.cells)
    if "± 0.00\n" in cells or "± 0.0000\n" in cells:
        found["± 0.00"] = "all seeds are equal, to this precision"
    if "diverged" in cells:
        found["diverged"] = "training loss not finite; the numbers are of the other seeds"
    return found


def rendered(results: Json, width: int) -> Iterator[RenderableType]:
    """What was trained, one line per method, and the meaning of the columns.

    Columns that would not fit are left out, and named.
    """
    wrap = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    yield Text("\n" + "\n".join(map(wrap.fill, words.heading(results))) + "\n")
    shown, left_out, table = columns(results), list[str](), ruled()
    while sum(column.width + 2 for column in shown) - 2 > width:
        last = max(shown, key=lambda column: column.place)
        if not last.place:
            break
        shown.remove(last)
        left_out.append(last.heading)
    for i, column in enumerate(shown):
        justify: Any = "left" if i < 2 else "right"
        table.add_column(column.header, justify=justify, min_width=column.width)
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*map(Text, row))
    yield table
    meanings = legend(shown)
    if left_out:
        meanings["not shown"] = f"{', '.join(left_out)}, for lack of width; see the report of --out"
    wrap.subsequent_indent = " " * 14
    lines = [wrap.fill(f"{name + ':':13} {text}") for name, text in meanings.items()]
    yield Text("\n" + "\n".join(lines), style="dim")


def print_settings(console: Console, description: Json) -> None:
    """Prints what would be trained, the source of each value, and the notes."""
    table = ruled("setting", "value", "from")
    for method, name, value, source in words.settings(description):
        texts = f"{method and method + ': '}{name}", words.plain(value), source
        table.add_row(*map(Text, texts))
    console.print(table)
    for note in description["notes"]:
        console.print(Text(note), soft_wrap=True)


def ruled(*columns: Any) -> Table:
    """An empty table, with a rule below its headings and no frame."""
    look: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    return Table(*columns, **look, padding=(0, 1, 0, 0))
