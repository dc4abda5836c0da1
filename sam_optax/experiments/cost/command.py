# ruff: noqa: RUF009 (functions declare fields)
"""``python -m sam_optax cost``: options and measurements."""

import dataclasses
import re
from pathlib import Path

import jax

from sam_optax.experiments.cost import measure, report, steps
from sam_optax.experiments.cost.measure import DATA, Placement, make_mesh
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import COUNT, allowed, check, one_of, option
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import to_json, versions
from sam_optax.experiments.types import Record

ROUNDS = 15
_TARGET = allowed(re.compile(r"cpu:\d+|tpu:.+").fullmatch, "use tpu:v5e:2x2 or cpu:8, say")
_AXIS = allowed(re.compile(r"\w+=[1-9]\d*").fullmatch, "use NAME=SIZE, such as data=8")
_DTYPE = one_of(("float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts what a training step of each method costs, next to hand-written steps.

    Steps are compiled for this device, for simulated CPU devices or for a TPU that need not be
    there. They only run with --time.
    """

    models: tuple[str, ...] = option(
        ("mlp:4x1024",),
        "mlp:DEPTHxWIDTH (square layers), networks of compare, or FILE.py:NAME for yours.",
    )
    shape: tuple[int, ...] = option(
        (32, 32, 3), "Axes of an example, of all networks but mlp:DEPTHxWIDTH.", COUNT
    )
    methods: tuple[str, ...] = option(
        ("sam", "asam", "fsam", "rsam"),
        "Methods of compare, except those that use the whole training set; or options of SAM: "
        "info, skip_nonfinite, sync_perturbation.",
        one_of(steps.METHODS),
    )
    optimizer: str = option("sgd", "Base optimizer, sgd or adam.", one_of(steps.OPTIMIZERS))
    target: str | None = option(
        None, "cpu:N (simulated) or a TPU, such as tpu:v5e:16x16 (default: this device).", _TARGET
    )
    mesh: tuple[str, ...] | None = option(
        None, "data=N shards the batch, model=N each kernel (default: data only).", _AXIS
    )
    params: str = option(
        "replicated", "Over the axis data: replicated or fsdp.", one_of(("replicated", "fsdp"))
    )
    per_device: bool = option(False, "The step under shard_map, with axis_name.")
    batch_size: int = option(256, "Examples in a batch, on all devices together.", COUNT)
    dtype: str = option("float32", "What the network computes in; the params are float32.", _DTYPE)
    time: bool = option(False, f"Also run the steps here, in {ROUNDS} rounds, and take times.")
    out: Path | None = option(
        None, "JSON file for all measurements, with a figure in addition (.png).", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check(self)
        output.check_file(self.out)
        if self.time and self.target:
            raise UserError(f"--time: not with --target {self.target}, which is compiled for only.")
        if self.per_device and (self.params == "fsdp" or (self.mesh and len(self.mesh) > 1)):
            raise UserError("--per-device: use it with --params replicated and one axis, data.")
        if "sync_perturbation" in self.methods and not self.per_device:
            raise UserError("--methods sync_perturbation: use it with --per-device.")


def run(options: Cost) -> None:
    """Measures, prints the tables and writes the files."""
    jax.config.update("jax_enable_compilation_cache", False)  # its hits would be fast to compile
    mesh = make_mesh(options.target, options.mesh or ())
    if options.batch_size % mesh.shape[DATA]:
        raise UserError(f"--batch-size {options.batch_size}: use a multiple of {mesh.shape[DATA]}.")
    placement = Placement(mesh, options.params == "fsdp", options.per_device)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    devices = f"{options.target or jax.devices()[0].device_kind}, {axes}, {options.params}"
    console, models = Console(), {}
    for name in options.models:
        model = models[name] = _model(name, options, placement)
        heading = f"{name}: {model['parameters']:,} parameters; {devices}"
        console.print(heading, "", style="bold", soft_wrap=True)
        report.print_tables(console, model["steps"])
    console.print(report.LEGEND, style="dim")
    if options.out is not None:
        found = {"versions": versions(), "devices": devices, "models": models}
        png = options.out.with_suffix(".png")
        with output.writable(options.out):
            output.replace_files({options.out: to_json(found), png: report.draw(models)})


def _model(name: str, options: Cost, placement: Placement) -> Record:
    problem = steps.make(name, options.batch_size, options.shape, options.dtype)
    params = jax.eval_shape(problem.init)
    base, axis = steps.OPTIMIZERS[options.optimizer], DATA if options.per_device else None
    rows = steps.rows(options.methods, problem.losses, base, axis)
    work = {"compiling": (1.0, len(rows)), "running": (0.3, len(rows) * ROUNDS * options.time)}
    builds = {}
    with Progress(Console(stderr=True), work, f"{name}:") as progress:
        for row, (step, known) in rows.items():
            builds[row] = measure.Build(step, params, problem.batch, placement)
            builds[row].record.update(known)
            progress.done("compiling")
        if options.time:
            made = [*builds.values()]
            measure.take_times(made, problem.init, ROUNDS, lambda: progress.done("running"))
    found = {row: built.record for row, built in builds.items()}
    report.add_ratios(found)
    return {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params)), "steps": found}
