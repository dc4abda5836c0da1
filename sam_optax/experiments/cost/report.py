"""Ratios, tables and the figure of the results, which are plain data as in the JSON file."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sam_optax.experiments.cost.measure import COLLECTIVES
from sam_optax.experiments.cost.steps import BASE
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
MEASURES = {
    "gradients": ("gradients", 1),
    "flops": ("FLOPs\nG", 1e9),
    "bytes accessed": ("accessed\nMiB", 2**20),
    "temporaries": ("temporaries\nMiB", 2**20),
    "state": ("state\nMiB", 2**20),
    "estimated seconds": ("estimate\nµs", 1e-6),
    **{kind: (kind.replace("-", "-\n"), 1) for kind in COLLECTIVES},
    "sent": ("collectives\nMiB", 2**20),
    "compile seconds": ("compiling\ns", 1),
    "seconds": ("time\nms", 1e-3),
}
"""The columns: heading with the unit, and that unit in terms of what was measured."""
_DRAWN = "flops", "bytes accessed", "temporaries", "estimated seconds", "sent", "seconds"


def add_ratios(steps: Mapping[str, Record]) -> None:
    """Adds the ratios to the reference and to the base, ``None`` where that is 0."""
    for step in steps.values():
        for to, other in (("/hand", steps[step["reference"]]), ("/base", steps[BASE])):
            step[to] = {k: _ratio(step[k], other[k]) for k in MEASURES if k in step}


def _ratio(a: Any, b: Any) -> float | None:
    """Of numbers, or of the times in each round: the load of the machine drifts between them."""
    return float(np.median(np.divide(a, b))) if np.all(b) else None


def print_tables(console: Console, steps: Mapping[str, Json]) -> None:
    """Prints what is not zero everywhere, as many measures side by side as there is room for."""
    shown = [key for key in MEASURES if any(step.get(key) for step in steps.values())]
    side = max(1, (console.width - max(map(len, steps))) // 13)
    for i in range(0, len(shown), side):
        keys = shown[i : i + side]
        table = ruled("step")
        for key in keys:
            table.add_column(MEASURES[key][0], justify="right", no_wrap=True)
        for name, step in steps.items():
            values = (np.median(step[key]) / MEASURES[key][1] for key in keys)
            table.add_row(name, *(f"{x:,.0f}" if x > 9999 else f"{x:.4g}" for x in values))
            for to in _TO if step["reference"] != name else ():
                ratios = (step[to][key] for key in keys)
                cells = ("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
                table.add_row(f"  {_TO[to]}", *cells, style="dim")
        console.print(table, "")


def draw(models: Mapping[str, Json]) -> bytes:
    """Bars of what each step costs over the base optimizer's, a panel per measure."""
    steps = {f"{of}, {name}": x for of, m in models.items() for name, x in m["steps"].items()}
    drawn = [key for key in _DRAWN if any(step.get(key) for step in steps.values())]
    figure = Figure(figsize=(3 + 2 * len(drawn), 1 + 0.2 * len(steps)), layout="constrained")
    panels = figure.subplots(1, len(drawn), sharey=True)
    for panel, key in zip(panels, drawn, strict=True):
        panel.barh([*steps], [step["/base"][key] or np.nan for step in steps.values()])
        panel.set(title=MEASURES[key][0].split("\n")[0], xlabel="× the base optimizer's")
        axes.tidy(panel, "x")
    panels[0].invert_yaxis()
    return axes.png(figure)
