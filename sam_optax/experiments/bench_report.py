"""The benchmark's results: what is kept of a run, as tables and as JSON."""

import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from sam_optax.experiments.bench_measure import CompiledCost

BASE = "sgd"
SAM_BY_HAND = "sam by hand"


class StepResult(NamedTuple):
    """Measurements of one step.

    Attributes:
      reference: name of the hand-written step of the same method.
      cost: counts of the compiled program.
      state_bytes: size of the state, the base optimizer's included.
      trace_seconds: least time to trace and lower the step.
      compile_seconds: least time to compile it.
      seconds: time a step in each round; one index is one round for every step of a model. Empty
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


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def wall_ratio(step: StepResult, reference: StepResult) -> tuple[float, float, float]:
    """Quartiles over rounds of the ratio within the round: the load of the machine drifts."""
    return _quartiles([a / b for a, b in zip(step.seconds, reference.seconds, strict=True)])


_SCALARS: dict[str, Callable[[StepResult], float]] = {
    "trace_seconds": lambda step: step.trace_seconds,
    "compile_seconds": lambda step: step.compile_seconds,
    "flops": lambda step: step.cost.flops,
    "bytes_accessed": lambda step: step.cost.bytes_accessed,
    "temp_bytes": lambda step: step.cost.temp_bytes,
    "instructions": lambda step: step.cost.instructions,
}


def ratios(step: StepResult, reference: StepResult) -> dict[str, float]:
    """Ratios of all measurements; of wall times the median over rounds."""
    result = {"wall": wall_ratio(step, reference)[1]} if step.seconds else {}
    for name, value in _SCALARS.items():
        result[name] = value(step) / value(reference) if value(reference) else math.nan
    return result


def print_tables(console: Console, name: str, model: ModelResult) -> None:
    """Prints times, build times and compiled counts of the steps on one model."""
    title = f"{name}: {model.parameters:,} parameters, batch {model.batch_size}"
    if model.steps[BASE].seconds:
        tables = [_wall_table(title, model), _build_table("", model), _count_table(model)]
    else:
        tables = [_build_table(title, model)]
    for table in tables:
        console.print(table)
    console.print()


LEGEND = (
    "/hand: ratio to the hand-written step of the same method; /SAM: to the hand-written SAM "
    f"step; /{BASE}: to the base optimizer's step. Wall ratios are medians over rounds of the "
    "ratio within the round, with quartiles. size: instructions of the compiled program; traffic "
    "and temp: memory read and written, and held beside arguments and results; state: bytes "
    "beside the base optimizer's."
)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("step", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _wall_table(title: str, model: ModelResult) -> Table:
    table = _table(title, "ms/step", "/hand", "quartiles", "/SAM", f"/{BASE}")
    for name, step in model.steps.items():
        low, median, high = wall_ratio(step, model.steps[step.reference])
        table.add_row(
            name,
            f"{statistics.median(step.seconds) * 1e3:.2f}",
            f"{median:.3f}",
            f"{low:.2f}-{high:.2f}",
            f"{wall_ratio(step, model.steps[SAM_BY_HAND])[1]:.3f}",
            f"{wall_ratio(step, model.steps[BASE])[1]:.3f}",
        )
    return table


def _build_table(title: str, model: ModelResult) -> Table:
    table = _table(title, "trace", "/hand", "/SAM", "compile", "/hand", "/SAM", "size")
    for name, step in model.steps.items():
        by_hand = ratios(step, model.steps[step.reference])
        to_sam = ratios(step, model.steps[SAM_BY_HAND])
        row = [name]
        for key in ("trace_seconds", "compile_seconds"):
            row += [f"{_SCALARS[key](step):.3f}s", f"{by_hand[key]:.2f}", f"{to_sam[key]:.2f}"]
        table.add_row(*row, f"{step.cost.instructions:,}")
    return table


def _count_table(model: ModelResult) -> Table:
    table = _table("", "GFLOP", "/hand", "traffic", "/hand", "temp", "/hand", "state")
    base_state = model.steps[BASE].state_bytes
    for name, step in model.steps.items():
        by_hand = ratios(step, model.steps[step.reference])
        table.add_row(
            name,
            f"{step.cost.flops / 1e9:.3f}",
            f"{by_hand['flops']:.4f}",
            _size(step.cost.bytes_accessed),
            f"{by_hand['bytes_accessed']:.3f}",
            _size(step.cost.temp_bytes),
            f"{by_hand['temp_bytes']:.3f}",
            _size(step.state_bytes - base_state),
        )
    return table


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


def write_json(path: Path, content: Any) -> None:
    """Writes a file in one piece: an interrupt leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(
            json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
