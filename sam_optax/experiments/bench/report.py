"""Ratios and tables of the benchmark's results, which are plain data as in its JSON file."""

import math
import statistics
from collections.abc import Callable, Mapping

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sam_optax.experiments.bench.steps import BASE, SAM_BY_HAND
from sam_optax.experiments.types import Json, Record

LEGEND = (
    "/hand: ratio to the hand-written step of the same method; /SAM: to the hand-written SAM "
    f"step; /{BASE}: to the base optimizer's step. Wall ratios are medians over rounds of the "
    "ratio within the round, with quartiles. size: instructions of the compiled program; traffic "
    "and temp: memory read and written, and held in addition to arguments and results; state: "
    "bytes in addition to the base optimizer's."
)
Measurements = Json
_Column = tuple[str, Callable[[Measurements], str]]


def wall_ratio(step: Measurements, reference: Measurements) -> list[float]:
    """Quartiles over rounds of the ratio within a round, since the load of the machine drifts."""
    found = np.array(step["seconds"]) / np.array(reference["seconds"])
    return np.quantile(found, [0.25, 0.5, 0.75]).tolist()


def with_ratios(steps: Mapping[str, Measurements]) -> dict[str, Record]:
    """The measurements of all steps, with their ratios to the reference steps."""
    return {
        name: {
            **step,
            "ratios": {
                other: _ratios(step, steps[other])
                for other in dict.fromkeys((step["reference"], SAM_BY_HAND, BASE))
            },
        }
        for name, step in steps.items()
    }


def _ratios(step: Measurements, reference: Measurements) -> dict[str, float | None]:
    """Ratios of all measurements (for wall times the median); ``None`` if the reference is 0."""
    result: dict[str, float | None] = {}
    if step["seconds"]:
        result["wall"] = wall_ratio(step, reference)[1]
    these, those = (
        {key: of[key] for key in ("trace_seconds", "compile_seconds")} | of["cost"]
        for of in (step, reference)
    )
    return result | {key: these[key] / x if x else None for key, x in those.items()}


def print_tables(console: Console, name: str, model: Json) -> None:
    """Prints times, build times and compiled counts of the steps on one model."""
    steps = model["steps"]
    title = f"{name}: {model['parameters']:,} parameters, batch {model['batch_size']}"
    timed = bool(steps[BASE]["seconds"])

    def quartiles(step: Measurements) -> str:
        low, _, high = wall_ratio(step, steps[step["reference"]])
        return f"{low:.2f}-{high:.2f}"

    def state(step: Measurements) -> str:
        return _size(step["state_bytes"] - steps[BASE]["state_bytes"])

    if timed:
        columns: list[_Column] = [
            ("ms/step", lambda step: f"{1e3 * statistics.median(step['seconds']):.2f}"),
            ("/hand", _ratio("wall", 3)),
            ("quartiles", quartiles),
            ("/SAM", _ratio("wall", 3, SAM_BY_HAND)),
            (f"/{BASE}", _ratio("wall", 3, BASE)),
        ]
        console.print(_table(title, steps, columns))
    columns = [
        ("trace", lambda step: f"{step['trace_seconds']:.3f}s"),
        ("/hand", _ratio("trace_seconds", 2)),
        ("/SAM", _ratio("trace_seconds", 2, SAM_BY_HAND)),
        ("compile", lambda step: f"{step['compile_seconds']:.3f}s"),
        ("/hand", _ratio("compile_seconds", 2)),
        ("/SAM", _ratio("compile_seconds", 2, SAM_BY_HAND)),
        ("size", lambda step: f"{step['cost']['instructions']:,}"),
    ]
    console.print(_table("" if timed else title, steps, columns))
    if timed:
        columns = [
            ("GFLOP", lambda step: f"{step['cost']['flops'] / 1e9:.3f}"),
            ("/hand", _ratio("flops", 4)),
            ("traffic", lambda step: _size(step["cost"]["bytes_accessed"])),
            ("/hand", _ratio("bytes_accessed", 3)),
            ("temp", lambda step: _size(step["cost"]["temp_bytes"])),
            ("/hand", _ratio("temp_bytes", 3)),
            ("state", state),
        ]
        console.print(_table("", steps, columns))
    console.print()


def _table(title: str, steps: Mapping[str, Measurements], columns: list[_Column]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("step", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, step in steps.items():
        table.add_row(name, *(cell(step) for _, cell in columns))
    return table


def _ratio(key: str, digits: int, to: str = "") -> Callable[[Measurements], str]:
    """The ratio to another step, or to the hand-written step of the same method."""

    def cell(step: Measurements) -> str:
        ratio = step["ratios"][to or step["reference"]][key]
        return f"{math.nan if ratio is None else ratio:.{digits}f}"

    return cell


def _size(count: float) -> str:
    """Bytes, or MiB if at least 0.1 MiB."""
    return f"{count / 2**20:.1f}M" if count >= 2**20 / 10 else f"{count:.0f}"
