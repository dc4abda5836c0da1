# ruff: noqa: RUF009 (functions declare fields)
"""``python -m sam_optax cost``: options and measurements."""

import dataclasses
import functools
import json
import os
import pickle
import statistics
import subprocess
import sys
from pathlib import Path

import jax
from jax.sharding import Mesh

from sam_optax.experiments.cost import measure, problems, report, steps
from sam_optax.experiments.cost.placement import DATA, LIBTPU, Placement, make_mesh
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import COUNT, NOT_EMPTY, allowed, check, one_of, option
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import versions
from sam_optax.experiments.types import Record

_TARGET = allowed(lambda name: ":" in name, "use tpu:v5e:2x2 or cpu:8, for example")
_AXIS = allowed(lambda axis: axis.partition("=")[2].isdigit(), "use NAME=SIZE, such as data=8")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts what a training step of each method costs, next to hand-written steps.

    Steps are compiled for this device, for simulated CPU devices or for a TPU that need not be
    there. They only run with --time.
    """

    models: tuple[str, ...] = option(
        ("mlp:4x1024",),
        "Networks of compare; mlp:DEPTHxWIDTH (square layers); vit (4 blocks of width 64).",
        NOT_EMPTY,
    )
    methods: tuple[str, ...] = option(
        ("sam", "asam", "fsam", "rsam"),
        "Methods of compare, except those that use the whole training set; info and "
        "skip_nonfinite.",
        one_of(steps.METHODS),
    )
    optimizer: str = option(
        "sgd", "Base optimizer: sgd (with momentum) or adam.", one_of(steps.OPTIMIZERS)
    )
    target: str | None = option(
        None,
        "Devices to compile for: cpu:N (simulated), or tpu:TOPOLOGY, such as tpu:v5e:16x16 "
        "(default: this device).",
        _TARGET,
    )
    mesh: tuple[str, ...] | None = option(
        None,
        "Axes: data=N shards the batch, model=N each kernel (tensor parallel) (default: data, all "
        "of a target).",
        _AXIS,
    )
    params: str = option(
        "replicated",
        "Over the axis data: replicated, or sharded (fsdp).",
        one_of(("replicated", "fsdp")),
    )
    per_device: bool = option(
        False, "The step under shard_map with axis_name, without and with sync_perturbation."
    )
    batch_size: int = option(256, "Examples in a batch, on all devices together.", COUNT)
    dtype: str = option(
        "float32",
        "What the network computes in; the params are float32.",
        one_of(("float32", "bfloat16", "float16")),
    )
    time: bool = option(False, "Also run the steps on this device and measure their times.")
    rounds: int = option(
        15,
        "With --time: rounds, in each of which every step runs for about a tenth of a second.",
        COUNT,
    )
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


def run(options: Cost) -> None:
    """Measures, writes the files and prints the tables."""
    found = _in_another_process(options)
    if options.out is not None:
        output.write_json(options.out, found)
        output.replace_files({options.out.with_suffix(".png"): report.draw(found["models"])})
    console = Console()
    for name, model in found["models"].items():
        heading = f"{name}: {model['parameters']:,} parameters; {found['devices']}"
        console.print(heading, "", style="bold", soft_wrap=True)
        report.print_tables(console, model["steps"])
    console.print(report.LEGEND, style="dim")


def _in_another_process(options: Cost) -> Record:
    """Measures with other devices than this process has, and with no program cached."""
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    kind, _, count = (options.target or "").partition(":")
    if kind:
        flags = f"--xla_force_host_platform_device_count={count}" if kind == "cpu" else ""
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **LIBTPU}
    program = [sys.executable, "-c", f"import {__name__} as command; command.answer()"]
    given = pickle.dumps(options)
    done = subprocess.run(program, input=given, env=env, stdout=subprocess.PIPE)
    found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if "models" not in found:
        raise UserError(found.get("error", "the measuring process ended; its error is above."))
    return found


def answer() -> None:
    """Measures with the options on standard input; prints the measurements, or what is wrong."""
    options: Cost = pickle.load(sys.stdin.buffer)
    try:
        mesh = make_mesh(options.target, options.mesh)
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        placed = f"{options.target or jax.devices()[0].device_kind}, {axes}, {options.params}"
        models = {name: _model(name, options, mesh) for name in options.models}
        found = {"versions": versions(), "devices": placed, "models": models}
    except UserError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


def _model(name: str, options: Cost, mesh: Mesh) -> Record:
    if options.batch_size % mesh.shape[DATA]:
        raise UserError(f"--batch-size {options.batch_size}: use a multiple of {mesh.shape[DATA]}.")
    problem = problems.make(name, options.batch_size, options.dtype)
    losses, params = measure.counted(problem.losses), jax.eval_shape(problem.init)
    placement = Placement(mesh, options.params == "fsdp", options.per_device)
    rows, rounds = steps.rows(options.methods, options.per_device), options.rounds * options.time
    work = {"compiling": (1.0, len(rows)), "running": (0.3, len(rows) * rounds)}
    builds, times = {}, {}
    with Progress(Console(stderr=True), work, f"{name}:") as progress:
        for row in rows:
            make = functools.partial(steps.make, row, losses, options.optimizer, options.per_device)
            built = builds[row] = measure.build(make, params, problem.batch, placement)
            seconds = built.record["trace seconds"] + built.record["compile seconds"]
            progress.done("compiling", seconds)
        if rounds:
            done = functools.partial(progress.done, "running")
            times = measure.interleaved(builds, problem, rounds, done)
    found = {
        str(row): {
            "reference": str(row.reference),
            **built.record,
            "seconds": statistics.median(times.get(row, [0])),
            "rounds": times.get(row, []),
        }
        for row, built in builds.items()
    }
    report.add_ratios(found, str(steps.BASE))
    return {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params)), "steps": found}
