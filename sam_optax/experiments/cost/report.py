# ruff: noqa: RUF001 (dashes and multiplication signs, in what is printed)
"""Ratios, tables and the figure of the results, which are plain data as in the JSON file."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from sam_optax.experiments.cost.measure import COLLECTIVES
from sam_optax.experiments.reporting import axes
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.types import Json, Record

LEGEND = """\
÷ by hand: over the hand-written step of the same method, or else of SAM. ÷ base: over the base
optimizer's. Per device, as compiled: temporaries are memory in addition to arguments and results;
collectives are counted, with MiB of their results; the estimate is the compiler's, not a
measurement. Ratios of measured times are medians over rounds of the ratio within a round."""
_TO = {"/hand": "÷ by hand", "/base": "÷ base"}


class Measure(NamedTuple):
    """A column of the table, in ``unit``, which is ``size`` of what was measured."""

    name: str
    unit: str = ""
    size: float = 1
    drawn: bool = False


MEASURES = {
    "gradients": Measure("gradients"),
    "flops": Measure("FLOPs", "G", 1e9, drawn=True),
    "bytes accessed": Measure("accessed", "MiB", 2**20, drawn=True),
    "temporaries": Measure("temporaries", "MiB", 2**20, drawn=True),
    "state": Measure("state", "MiB", 2**20),
    "estimated seconds": Measure("estimate", "µs", 1e-6, drawn=True),
    **{kind: Measure(kind) for kind in COLLECTIVES},
    "sent": Measure("collectives", "MiB", 2**20, drawn=True),
    "compile seconds": Measure("compiling", "s", 1),
    "seconds": Measure("time", "ms", 1e-3, drawn=True),
}


def add_ratios(steps: Mapping[str, Record]) -> None:
    """Adds the ratios to the reference and to the base, ``None`` where that is 0."""
    for step in steps.values():
        for to, other in (("/hand", steps[step["reference"]]), ("/base", steps["base optimizer"])):
            step[to] = {k: step[k] / other[k] if other[k] else None for k in MEASURES if k in step}
            if "rounds" in step:  # the load of the machine drifts
                within = np.array(step["rounds"]) / np.array(other["rounds"])
                step[to]["seconds"] = float(np.median(within))


def print_tables(console: Console, steps: Mapping[str, Json]) -> None:
    """Prints what is not zero everywhere, as many measures side by side as there is room for."""
    shown = [key for key in MEASURES if any(step.get(key) for step in steps.values())]
    side = max(1, (console.width - max(map(len, steps))) // 13)
    for i in range(0, len(shown), side):
        keys = shown[i : i + side]
        table = ruled("step")
        for key in keys:
            name, unit, *_ = MEASURES[key]
            heading = f"{name}\n{unit}" if unit else name.replace("-", "-\n")
            table.add_column(heading, justify="right", no_wrap=True)
        for name, step in steps.items():
            values = (step[key] / MEASURES[key].size for key in keys)
            table.add_row(name, *(f"{x:,.0f}" if x > 9999 else f"{x:.4g}" for x in values))
            for to in _TO if step["reference"] != name else ():
                ratios = (step[to][key] for key in keys)
                cells = ("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
                table.add_row(f"  {_TO[to]}", *cells, style="dim")
        console.print(table, "")


def draw(models: Mapping[str, Json]) -> bytes:
    """Bars of what each step costs over the base optimizer's, a row of panels per network."""
    steps = [step for model in models.values() for step in model["steps"].values()]
    drawn = [k for k, of in MEASURES.items() if of.drawn and any(step.get(k) for step in steps)]
    height = sum(1 + 0.2 * len(model["steps"]) for model in models.values())
    figure = Figure(figsize=(2 + 2 * len(drawn), height), layout="constrained")
    panels = figure.subplots(len(models), len(drawn), sharey="row", squeeze=False)
    for row, (name, model) in zip(panels, models.items(), strict=True):
        for panel, key in zip(row, drawn, strict=True):
            ratios = [step["/base"][key] or np.nan for step in model["steps"].values()]
            panel.barh(list(model["steps"]), ratios)
            panel.set(title=MEASURES[key].name, xlabel="× the base optimizer's")
            axes.tidy(panel, "x")
        row[0].set_ylabel(name)
        row[0].invert_yaxis()
    return axes.png(figure)
