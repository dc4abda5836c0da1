"""The benchmark's results: what is kept of a run, as tables and as JSON."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sam_optax.experiments.bench.measure import CompiledCost
from sam_optax.experiments.bench.steps import BASE, SAM_BY_HAND


class StepResult(NamedTuple):
    """Measurements of one step.

    Attributes:
      reference: name of the hand-written step of the same method.
      cost: counts of the compiled program.
      state_bytes: size of the state, the base optimizer's included.
      trace_seconds: least time to trace and lower the step.
      compile_seconds: least time to compile it.
      seconds: time per step in each round; one index is one round for every step of a model. Empty
        where the step was only built.
    """

    reference: str
    cost: CompiledCost
    state_bytes: int
    trace_seconds: float
    compile_seconds: float
    seconds: list[float]


class ModelResult(NamedTuple):
    """Measurements of all steps on one model, in the order to show them."""

    batch_size: int
    parameters: int
    steps: dict[str, StepResult]


def wall_ratio(step: StepResult, reference: StepResult) -> tuple[float, float, float]:
    """Quartiles over rounds of the ratio within the round: the load of the machine drifts."""
    found = np.array(step.seconds) / np.array(reference.seconds)
    low, median, high = np.quantile(found, [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def _scalars(step: StepResult) -> dict[str, float]:
    times = {"trace_seconds": step.trace_seconds, "compile_seconds": step.compile_seconds}
    return {**times, **step.cost._asdict()}


def ratios(step: StepResult, reference: StepResult) -> dict[str, float]:
    """Ratios of all measurements; of wall times the median over rounds."""
    result = {"wall": wall_ratio(step, reference)[1]} if step.seconds else {}
    these, those = _scalars(step), _scalars(reference)
    return result | {name: these[name] / x if x else math.nan for name, x in those.items()}


LEGEND = (
    "/hand: ratio to the hand-written step of the same method; /SAM: to the hand-written SAM "
    f"step; /{BASE}: to the base optimizer's step. Wall ratios are medians over rounds of the "
    "ratio within the round, with quartiles. size: instructions of the compiled program; traffic "
    "and temp: memory read and written, and held in addition to arguments and results; state: "
    "bytes in addition to the base optimizer's."
)


def print_tables(console: Console, name: str, model: ModelResult) -> None:
    """Prints times, build times and compiled counts of the steps on one model."""
    title = f"{name}: {model.parameters:,} parameters, batch {model.batch_size}"
    timed = bool(model.steps[BASE].seconds)
    if timed:
        columns = ["ms/step", "/hand", "quartiles", "/SAM", f"/{BASE}"]
        console.print(_table(title, model, columns, _wall_cells))
    columns = ["trace", "/hand", "/SAM", "compile", "/hand", "/SAM", "size"]
    console.print(_table("" if timed else title, model, columns, _build_cells))
    if timed:
        columns = ["GFLOP", "/hand", "traffic", "/hand", "temp", "/hand", "state"]
        console.print(_table("", model, columns, _count_cells))
    console.print()


_Cells = Callable[[StepResult, ModelResult], list[str]]


def _table(title: str, model: ModelResult, columns: list[str], cells: _Cells) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("step", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, step in model.steps.items():
        table.add_row(name, *cells(step, model))
    return table


def _wall_cells(step: StepResult, model: ModelResult) -> list[str]:
    low, median, high = wall_ratio(step, model.steps[step.reference])
    to_sam, to_base = (wall_ratio(step, model.steps[name])[1] for name in (SAM_BY_HAND, BASE))
    milliseconds = statistics.median(step.seconds) * 1e3
    quartiles = f"{low:.2f}-{high:.2f}"
    return [f"{milliseconds:.2f}", f"{median:.3f}", quartiles, f"{to_sam:.3f}", f"{to_base:.3f}"]


def _build_cells(step: StepResult, model: ModelResult) -> list[str]:
    to_hand, to_sam = (ratios(step, model.steps[name]) for name in (step.reference, SAM_BY_HAND))
    cells = []
    for key in ("trace_seconds", "compile_seconds"):
        cells += [f"{_scalars(step)[key]:.3f}s", f"{to_hand[key]:.2f}", f"{to_sam[key]:.2f}"]
    return [*cells, f"{step.cost.instructions:,}"]


def _count_cells(step: StepResult, model: ModelResult) -> list[str]:
    to_hand, cost = ratios(step, model.steps[step.reference]), step.cost
    cells = [f"{cost.flops / 1e9:.3f}", f"{to_hand['flops']:.4f}"]
    for key in ("bytes_accessed", "temp_bytes"):
        cells += [_size(getattr(cost, key)), f"{to_hand[key]:.3f}"]
    return [*cells, _size(step.state_bytes - model.steps[BASE].state_bytes)]


def _size(count: float) -> str:
    """Bytes, or MiB from a tenth of one on."""
    return f"{count / 2**20:.1f}M" if count >= 2**20 / 10 else f"{count:.0f}"


def as_json(results: dict[str, ModelResult]) -> dict[str, Any]:
    """All measurements, with ratios to each step's references."""
    return {
        name: {
            "batch_size": model.batch_size,
            "parameters": model.parameters,
            "steps": {
                step_name: {
                    **step._asdict(),
                    "cost": step.cost._asdict(),
                    "ratios": {
                        reference: {
                            key: None if math.isnan(ratio) else ratio
                            for key, ratio in ratios(step, model.steps[reference]).items()
                        }
                        for reference in dict.fromkeys((step.reference, SAM_BY_HAND, BASE))
                    },
                }
                for step_name, step in model.steps.items()
            },
        }
        for name, model in results.items()
    }
