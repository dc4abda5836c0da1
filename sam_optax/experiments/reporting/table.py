"""The table of a run, for the terminal, for notebooks and for the page."""

from collections.abc import Iterator, Sequence
from textwrap import TextWrapper
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from sam_optax.experiments.named import short
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.schema import UNITS
from sam_optax.experiments.types import Json

PAGE = 9
"""The place of what only the page has room for."""
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


def columns(results: Json) -> list[Column]:
    """The columns of which something is known; the first two are text, the others numbers."""
    methods, score, count = results["methods"], words.Score.of(results), len(results["seeds"])
    key, unit, tuned = score.key, score.unit, words.setting(results, "tune")
    summaries = [method["summary"] for method in methods]

    def scores(of: str) -> list[str]:
        return [score.text(summary[of]) if of in summary else "–" for summary in summaries]

    def gains(base: str) -> list[str]:
        found = [m["differences"].get(base, {}).get(key, {"mean": None}) for m in methods]
        return ["–" if of["mean"] is None else score.text(of, "interval", "+") for of in found]

    finals, chosen = scores(key), scores(f"tuned_{key}")
    for i, m in enumerate(methods):
        if 0 < m["diverged"] < count:
            finals[i] += f"\n{m['diverged']} of {count} diverged"
        if "tune" in m:
            chosen[i] = f"{m['tune']['epoch']}: {chosen[i]}"
    best = [] if tuned else scores(f"best_{key}")  # chosen on test examples, which --tune avoids
    halves = [_number(of[key], "interval", score.digits, score.factor, "± ") for of in summaries]
    losses = [_number(of.get("train_loss"), digits=3) for of in summaries]
    rises = [_number(of.get("sharpness"), digits=4) for of in summaries]
    what = score.meaning + "; mean ± standard deviation of seeds" * (count > 1)
    how = "radius and weight decay chosen on held-out examples" if tuned else ""
    rise = f"{UNITS['sharpness']}, {words.setting(results, 'sharpness_rho'):g}"
    found = [
        Column("method", [short(m["method"]) for m in methods]),
        Column("with", [words.trained_with(m) for m in methods], how),
        Column(score.heading, finals, what, unit),
        Column("± 95 %", halves, "confidence interval of the mean, by Student's t", unit, 6),
        Column("chosen epoch", chosen, _CHOSEN, unit, 4),
        Column("best epoch", best, UNITS["best_test_accuracy"], unit, 5),
        Column("over SGD", gains("sgd"), _OVER_SGD, unit, 1),
        Column("over SAM", gains("sam"), _OVER_SAM, unit, 3),
        Column("train loss", losses, UNITS["train_loss"], place=PAGE),
        Column("sharpness", rises, rise, place=7),
        Column("cost", [_number(m, "step_cost") for m in methods], UNITS["step_cost"], "× SGD", 2),
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


class ResultsTable(JupyterMixin):
    """What was trained, one line per method, and the meaning of the columns, from ``results``.

    rich prints and exports it, notebooks display it; it omits columns that would not fit.
    """

    def __init__(self, results: Json) -> None:
        self.results = results

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        wrap = TextWrapper(options.max_width, break_long_words=False, break_on_hyphens=False)
        yield Text("\n" + "\n".join(map(wrap.fill, words.heading(self.results))) + "\n")
        shown = [column for column in columns(self.results) if column.place < PAGE]
        wide, left_out = options.update(max_width=1000), list[str]()
        while console.measure(_table(shown), options=wide).minimum > options.max_width:
            last = max(shown, key=lambda column: column.place)
            if not last.place:
                break
            shown.remove(last)
            left_out.append(last.heading)
        yield _table(shown)
        meanings = legend(shown)
        if left_out:
            text = f"{', '.join(left_out)}, for lack of width; see the report of --out"
            meanings["not shown"] = text
        lines = [f"{name + ':':13} {text}" for name, text in meanings.items()]
        wrap.subsequent_indent = " " * 14
        yield Text("\n" + "\n".join(map(wrap.fill, lines)), style="dim")


def _table(columns: Sequence[Column]) -> Table:
    table = ruled()
    for i, (heading, cells, _, unit, _) in enumerate(columns):
        heading = f"{heading}\n{unit}" if unit else heading
        longest = max(map(len, "\n".join([heading, *cells]).split("\n")))
        width = min(longest, 17) if i == 1 else longest  # numbers are not wrapped
        table.add_column(heading, justify="left" if i < 2 else "right", min_width=width)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _number(
    of: Json | None, key: str = "mean", digits: int = 2, factor: float = 1, sign: str = ""
) -> str:
    value = None if of is None else of[key]
    return "–" if value is None else f"{sign}{factor * value:.{digits}f}"


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
