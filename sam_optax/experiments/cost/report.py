# ruff: noqa: RUF001 (dashes and multiplication signs, in what is printed)
"""Ratios, tables and the figure of the results, which are plain data as in the JSON file."""

import itertools
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from sam_optax.experiments.cost.measure import COLLECTIVES
from sam_optax.experiments.reporting import axes
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.types import Json, Record

LEGEND = """\
/hand: ratio to the hand-written step of the same method, or else of SAM; /base: to the base
optimizer's. Per device, as compiled: temp is memory in addition to arguments and results;
collectives are counted, with MiB of their results; the estimate is the compiler's, not a
measurement. Ratios of times are medians over rounds of the ratio within a round, with quartiles."""
_MIB = 2**20
_MEASURES: Mapping[str, tuple[str, float, int]] = {  # key -> unit, its size, digits
    "gradients": ("gradients", 1, 2),
    "flops": ("GFLOP", 1e9, 3),
    "bytes accessed": ("MiB accessed", _MIB, 1),
    "temporaries": ("MiB temp", _MIB, 1),
    "state": ("MiB state", _MIB, 1),
    "estimated seconds": ("µs estimate", 1e-6, 1),
    **{kind: (kind.replace("-", "- "), 1, 0) for kind in COLLECTIVES},
    "sent": ("MiB collectives", _MIB, 2),
    "trace seconds": ("s trace", 1, 2),
    "compile seconds": ("s compile", 1, 2),
    "instructions": ("instructions", 1, 0),
    "seconds": ("ms", 1e-3, 2),
}
_DRAWN = {"flops": "FLOPs", "bytes accessed": "bytes accessed", "temporaries": "temporaries"}
_DRAWN |= {"sent": "collectives", "estimated seconds": "estimated time", "seconds": "time"}


def add_ratios(steps: Mapping[str, Record], base: str) -> None:
    """Adds the ratios to the reference and to the base, ``None`` where that is 0."""
    for step in steps.values():
        for to, other in (("hand", steps[step["reference"]]), ("base", steps[base])):
            ratios = {k: step[k] / other[k] if other[k] else None for k in _MEASURES}
            if step["rounds"]:  # the load of the machine drifts
                within = np.array(step["rounds"]) / np.array(other["rounds"])
                low, ratios["seconds"], high = np.quantile(within, [0.25, 0.5, 0.75]).tolist()
                ratios["quartiles"] = [low, high]
            step[f"/{to}"] = ratios


def print_tables(console: Console, steps: Mapping[str, Json]) -> None:
    """Prints what is not zero everywhere, as many measures side by side as there is room for."""
    shown = [key for key in _MEASURES if any(step[key] for step in steps.values())]
    side = max(1, (console.width - max(map(len, steps))) // 26)
    for keys in (shown[i : i + side] for i in range(0, len(shown), side)):
        table = ruled("step")
        table.columns[0].no_wrap = True
        for heading in itertools.chain(*((_MEASURES[k][0], "/hand", "/base") for k in keys)):
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
        for name, step in steps.items():
            table.add_row(name, *(cell for key in keys for cell in _cells(step, key)))
        console.print(table, "")


def _cells(step: Json, key: str) -> list[str]:
    _, unit, digits = _MEASURES[key]
    ratios = ["–" if (x := step[to][key]) is None else f"{x:.3f}" for to in ("/hand", "/base")]
    if key == "seconds":
        ratios[0] += " ({:.2f}-{:.2f})".format(*step["/hand"]["quartiles"])
    return [f"{step[key] / unit:,.{digits}f}", *ratios]


def draw(models: Mapping[str, Json]) -> bytes:
    """Bars of what each step costs over the base optimizer's, a row of panels per network."""
    steps = [step for model in models.values() for step in model["steps"].values()]
    drawn = [key for key in _DRAWN if any(step[key] for step in steps)]
    height = sum(1 + 0.2 * len(model["steps"]) for model in models.values())
    figure = Figure(figsize=(2 + 2 * len(drawn), height), layout="constrained")
    panels = figure.subplots(len(models), len(drawn), sharey="row", squeeze=False)
    for row, (name, model) in zip(panels, models.items(), strict=True):
        for panel, key in zip(row, drawn, strict=True):
            ratios = [step["/base"][key] or np.nan for step in model["steps"].values()]
            panel.barh(list(model["steps"]), ratios)
            panel.set(title=_DRAWN[key], xlabel="× the base optimizer's")
            axes.tidy(panel, "x")
        row[0].set_ylabel(name)
        row[0].invert_yaxis()
    return axes.png(figure)
