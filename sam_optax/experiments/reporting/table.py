"""What a comparison has found: its table, for the terminal, for notebooks and for the page."""

import dataclasses
import functools
import io
from collections.abc import Iterator, Sequence
from textwrap import TextWrapper
from typing import Any, NamedTuple

from rich import box
from rich.console import ConsoleOptions, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from sam_optax.experiments.named import short
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.results import UNITS
from sam_optax.experiments.types import Json, PyTree

_OVER_SGD = "score minus SGD's, seed by seed; mean ± 95 % confidence interval"
_OVER_SAM = "score minus SAM's, likewise; of several radii, that of the best one"
_OMITTED = "sharpness", "± 95 %", "best epoch", "chosen epoch", "over SAM", "cost", "over SGD"
"""What a terminal that is too narrow does not show, the first ones first."""


class Column(NamedTuple):
    """What is shown for each method."""

    name: str
    cells: Sequence[str]
    meaning: str = ""
    unit: str = ""

    @property
    def heading(self) -> str:
        """The name, with the unit below it."""
        return f"{self.name}\n{self.unit}".strip()


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
    epoch = Column("best epoch", scores(f"best_{key}"), UNITS["best_test_accuracy"], unit)
    if tuned:  # in the place of what is chosen on test examples
        pairs = zip(methods, scores(f"tuned_{key}"), strict=True)
        cells = [f"{method['tune']['epoch']}: {text}" for method, text in pairs]
        epoch = Column("chosen epoch", cells, UNITS["tuned_test_accuracy"], unit)
    what = score.meaning + "; mean ± standard deviation of seeds" * (count > 1)
    how = "what --tune searches is chosen on held-out examples" if tuned else ""
    halves = [score.text({"mean": of[key]["interval"]}) for of in summaries]
    halves = [half if half == "–" else f"± {half}" for half in halves]
    rises = [words.variation(of.get("sharpness", {}), 4, width="") for of in summaries]
    rise = f"{UNITS['sharpness']}, {words.setting(results, 'sharpness_rho'):g}"
    costs = [words.variation({"mean": method.get("step_cost")}) for method in methods]
    found = [
        Column("method", [short(method["method"]) for method in methods]),
        Column("with", [words.trained_with(method) for method in methods], how),
        Column(score.heading, finals, what, unit),
        Column("± 95 %", halves, "confidence interval of the mean, by Student's t", unit),
        epoch,
        Column("over SGD", gains("sgd"), _OVER_SGD, unit),
        Column("over SAM", gains("sam"), _OVER_SAM, unit),
        Column("sharpness", rises, rise),
        Column("cost", costs, UNITS["step_cost"], "× SGD"),
    ]
    return [column for column in found if {*column.cells} - {"–"}]


def legend(columns: Sequence[Column]) -> dict[str, str]:
    """The meaning of the columns, and of what else is in their cells."""
    found = {column.name: column.meaning for column in columns if column.meaning}
    cells = " ".join(cell + "\n" for column in columns for cell in column.cells)
    if "± 0.00\n" in cells or "± 0.0000\n" in cells:
        found["± 0.00"] = "all seeds are equal, to this precision"
    if "diverged" in cells:
        found["diverged"] = "training loss or score not finite; the numbers are of the other seeds"
    return found


@dataclasses.dataclass(frozen=True, repr=False)
class Result(JupyterMixin):
    """What :func:`sam_optax.experiments.compare` returns; shown as a table.

    Columns that would not fit are left out, and named.

    Attributes:
      results: all numbers as plain data, as in ``results.json``.
      params: the trained variables, ``params[method][seed]``, as the network's ``init`` gives them.
    """

    results: Json
    params: dict[str, dict[int, PyTree]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def figures(self) -> dict[str, bytes]:
        """The figures as PNG, by file name; ``IPython.display.Image`` shows one."""
        from sam_optax.experiments.reporting import figures  # slow to import

        return figures.all_figures(self.results)

    def print(self) -> None:
        """Prints the table."""
        Console().print(self, soft_wrap=True)  # paths stay on one line

    def __repr__(self) -> str:
        file = io.StringIO()  # a console would show in a notebook what it prints
        Console(file=file, width=120, force_jupyter=False).print(self)
        return file.getvalue()

    def __rich_console__(self, _: object, options: ConsoleOptions) -> Iterator[RenderableType]:
        wrap = TextWrapper(options.max_width, break_long_words=False, break_on_hyphens=False)
        yield Text("\n" + "\n".join(map(wrap.fill, words.heading(self.results))) + "\n")
        shown, left_out, widths = columns(self.results), list[str](), dict[str, int]()
        for column in shown:
            longest = max(map(len, "\n".join([column.heading, *column.cells]).split("\n")))
            widths[column.name] = min(longest, 17) if column.name == "with" else longest  # wrapped
        for name in (name for name in _OMITTED if name in widths):
            if sum(widths.values()) + 2 * len(widths) - 2 > options.max_width:
                left_out.append(name)
                del widths[name]
        shown, table = [column for column in shown if column.name in widths], ruled()
        for i, column in enumerate(shown):
            justify: Any = "left" if i < 2 else "right"
            table.add_column(column.heading, justify=justify, min_width=widths[column.name])
        for row in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*map(Text, row))
        yield table
        meanings = legend(shown)
        if left_out:
            text = f"{', '.join(left_out)}, for lack of width; see the report of --out"
            meanings["not shown"] = text
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
