# ruff: noqa: RUF009 (functions declare fields)
"""``python -m sam_optax cost``: options, tables and figure."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sam_optax.experiments.cost import measure, steps
from sam_optax.experiments.cost.measure import COLLECTIVES, DATA, Placement, make_mesh
from sam_optax.experiments.cost.steps import BASE
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import registry
from sam_optax.experiments.options.declare import COUNT, allowed, check, choice, option
from sam_optax.experiments.reporting import axes, output
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import to_json, versions
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.types import Json, Record

ROUNDS = 15
_TARGET = allowed(re.compile(r"cpu:[1-9]\d*|tpu:.+").fullmatch, "use tpu:v5e:2x2 or cpu:8, say")
_AXIS = allowed(re.compile(r"\w+=[1-9]\d*").fullmatch, "use NAME=SIZE, such as data=8")

LEGEND = """\
÷ by hand: over the hand-written step of the same method, or else of SAM. ÷ base: over the base
optimizer's. Per device, as compiled: temporaries are memory in addition to arguments and results;
collectives are counted, with MiB of their results; the estimate is the compiler's, not a
measurement. Ratios of measured times are medians over rounds of the ratio within a round."""
FILE, FIGURE, MARK = "cost.json", "cost_over_base.png", ".sam_optax.cost"
MEASURES = {
    "gradients": ("gradients", 1),
    "flops": ("FLOPs\nG", 1e9),
    "bytes accessed": ("accessed\nMiB", 2**20),
    "temporaries": ("temporaries\nMiB", 2**20),
    "state": ("state\nMiB", 2**20),
    "estimated seconds": ("estimate\nµs", 1e-6),
    **{kind: (kind.replace("-", "-\n"), 1) for kind in COLLECTIVES},
    "bytes sent": ("collectives\nMiB", 2**20),
    "compile seconds": ("compiling\ns", 1),
    "seconds": ("time\nms", 1e-3),
}
"""The columns: heading with the unit, and that unit in terms of what was measured."""
_DRAWN = "flops", "bytes accessed", "temporaries", "estimated seconds", "bytes sent", "seconds"


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts what a training step of each method costs, next to hand-written steps.

    Steps are compiled for this device, for simulated CPU devices or for a TPU that need not be
    there. They only run with --time.
    """

    models: tuple[str, ...] = option(
        ("mlp:4x1024",), "mlp:DEPTHxWIDTH, networks of compare, or FILE.py:NAME for yours."
    )
    shape: tuple[int, ...] = option((32, 32, 3), "Shape of an example (mlp: its width).", COUNT)
    methods: tuple[str, ...] = option(
        ("sam", "asam", "fsam", "rsam"),
        "Methods of compare, by name or FILE.py:NAME for yours; or options of SAM: "
        "info, skip_nonfinite, sync_perturbation.",
        partial(registry.rule, others=steps.OPTIONS),
    )
    optimizer: str = option("sgd", "Base optimizer.", **choice(*steps.OPTIMIZERS))
    target: str | None = option(
        None, "cpu:N (simulated) or a TPU, such as tpu:v5e:16x16 (default: this device).", _TARGET
    )
    mesh: tuple[str, ...] | None = option(
        None, "data=N shards the batch, model=N each kernel (default: data only).", _AXIS, "AXIS=N"
    )
    params: str = option("replicated", "Over the axis data.", **choice("replicated", "fsdp"))
    per_device: bool = option(False, "The step under shard_map, with axis_name.")
    batch_size: int = option(256, "Examples in a batch, on all devices together.", COUNT)
    time: bool = option(False, f"Also run the steps here, in {ROUNDS} rounds, and take times.")
    out: Path | None = option(
        None, f"Directory of {FILE}, with all measurements, and of {FIGURE}.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.time and self.target:
            raise UserError(f"--time: not with --target {self.target}, which is compiled for only.")
        if self.per_device and (self.params == "fsdp" or (self.mesh and len(self.mesh) > 1)):
            raise UserError("--per-device: use it with --params replicated and one axis, data.")
        if "sync_perturbation" in self.methods and not self.per_device:
            raise UserError("--methods sync_perturbation: use it with --per-device.")


def run(options: Cost) -> None:
    """Measures, prints the tables and writes the files."""
    out = options.out
    with output.claimed(out, (FILE, FIGURE), mark=MARK) if out else contextlib.nullcontext():
        found = _measured(options)
        if out:
            output.write(out, {FILE: to_json(found), FIGURE: draw(found["models"])})


def _measured(options: Cost) -> Record:
    jax.config.update("jax_enable_compilation_cache", False)  # its hits would be fast to compile
    mesh = make_mesh(options.target, options.mesh or ())
    if options.batch_size % mesh.shape[DATA]:
        raise UserError(f"--batch-size {options.batch_size}: use a multiple of {mesh.shape[DATA]}.")
    placement = Placement(mesh, options.params == "fsdp", options.per_device)
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    devices = f"{options.target or jax.devices()[0].device_kind}, {sizes}, {options.params}"
    console, models = Console(), {}
    for name in options.models:
        model = models[name] = _model(name, options, placement)
        heading = f"{name}: {model['parameters']:,} parameters; {devices}"
        console.print(heading, "", style="bold", soft_wrap=True)
        print_tables(console, model["steps"])
    console.print(LEGEND, style="dim")
    return {"versions": versions(), "devices": devices, "models": models}


def _model(name: str, options: Cost, placement: Placement) -> Record:
    problem = steps.make(name, options.batch_size, options.shape)
    params = jax.eval_shape(problem.init)
    base, axis = steps.OPTIMIZERS[options.optimizer], DATA if options.per_device else None
    rows = steps.rows(options.methods, problem.losses, base, axis)
    work = {"compiling": (1.0, len(rows)), "running": (0.3, len(rows) * ROUNDS * options.time)}
    builds = {}
    with Progress(Console(stderr=True), work) as progress:
        for i, (row, (step, known)) in enumerate(rows.items(), 1):
            progress.show(f"compiling {row} of {name} ({i} of {len(rows)})")
            builds[row] = measure.Build(step, params, problem.batch, placement)
            builds[row].record.update(known)
            progress.done("compiling")
        if options.time:
            progress.show(f"running {name}")
            made = [*builds.values()]
            measure.take_times(made, problem.init, ROUNDS, lambda: progress.done("running"))
    found = {row: built.record for row, built in builds.items()}
    return {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params)), "steps": found}


def ratio(step: Json, other: Json, key: str) -> float:
    """A measure over that of another step; NaN if that is 0."""
    # Of times round by round: the load of the machine drifts.
    return float(np.median(np.divide(step[key], other[key]))) if np.all(other[key]) else np.nan


def print_tables(console: Console, rows: Mapping[str, Json]) -> None:
    """Prints what is not zero everywhere, as many measures side by side as there is room for."""
    shown = [key for key in MEASURES if any(step.get(key) for step in rows.values())]
    side = max(1, (console.width - max(map(len, rows))) // 13)
    for i in range(0, len(shown), side):
        keys = shown[i : i + side]
        table = ruled("step")
        for key in keys:
            table.add_column(MEASURES[key][0], justify="right", no_wrap=True)
        for name, step in rows.items():
            values = (np.median(step[key]) / MEASURES[key][1] for key in keys)
            table.add_row(name, *(f"{x:,.0f}" if x > 9999 else f"{x:.4g}" for x in values))
            for to, other in (("by hand", step["reference"]), ("base", BASE)):
                if step["reference"] != name:
                    ratios = (ratio(step, rows[other], key) for key in keys)
                    cells = ("–" if np.isnan(x) else f"{x:.3f}" for x in ratios)
                    table.add_row(f"  ÷ {to}", *cells, style="dim")
        console.print(table, "")


@matplotlib.rc_context({"text.parse_math": False})  # a dollar sign of a name is one
def draw(models: Mapping[str, Json]) -> bytes:
    """Bars of what each step costs over the base optimizer's, a panel per measure."""
    every = [(name, model["steps"]) for name, model in models.items()]
    rows = {f"{of}, {name}": (x, steps[BASE]) for of, steps in every for name, x in steps.items()}
    drawn = [key for key in _DRAWN if any(step.get(key) for step, _ in rows.values())]
    figure = Figure(figsize=(3 + 2 * len(drawn), 1 + 0.2 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(drawn), sharey=True)
    for panel, key in zip(panels, drawn, strict=True):
        panel.barh([*rows], [ratio(*both, key) for both in rows.values()])
        panel.set(title=key, xlabel="× the base optimizer's")  # as in the file
        axes.tidy(panel, "x")
    panels[0].invert_yaxis()
    return axes.png(figure, "Costs of a training step")
