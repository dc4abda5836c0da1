"""``python -m sam_optax bench``: options and measurements."""

import dataclasses
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console

from sam_optax.experiments.bench import measure, models, report, steps
from sam_optax.experiments.bench.models import MODELS, Model
from sam_optax.experiments.bench.steps import BASE, DEFAULT, METHODS
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import versions
from sam_optax.experiments.types import Record


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measures a training step of each method next to hand-written steps and optax.contrib.sam.

    Prints for each model wall times, trace and compile times, and counts of the compiled program,
    with ratios to a hand-written step of the same method ("by hand"), to a hand-written SAM step
    and to a step of the base optimizer. Wall-time ratios are medians over rounds of the ratio
    within the round, so they are reliable on a busy machine.
    """

    models: tuple[str, ...] = tuple(MODELS)
    """Networks: mlp (4 layers of 1024x1024), mlp-small-batch (the same, memory-bound), cnn and
    vit (4 blocks of width 64)."""
    methods: tuple[str, ...] = DEFAULT
    """Methods of compare, except those whose steps use the whole training set; and sam with its
    options info and skip_nonfinite."""
    leaves: int | None = None
    """Only build the steps, without running them, for one narrow network with this even number of
    leaves. Large networks have 600."""
    rounds: int = 15
    """Rounds of wall-time measurements; in each, every step runs for about a tenth of a second."""
    builds: int = 3
    """Number of times each step is traced and compiled; the minimum is reported."""
    batch_size: int | None = None
    """Batch size for every model. Default: 256, 32, 64 and 32."""
    out: Path | None = None
    """JSON file for all measurements."""

    def __post_init__(self) -> None:
        for option, chosen, known in (
            ("models", self.models, MODELS),
            ("methods", self.methods, METHODS),
        ):
            for name in chosen:
                if name not in known:
                    raise UserError(f"--{option}: {name!r} is not one of {', '.join(known)}.")
            if not chosen:
                raise UserError(f"--{option} needs at least one of {', '.join(known)}.")
        for option in ("rounds", "builds", "batch_size"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UserError(f"--{option.replace('_', '-')} must be at least 1, got {value}.")
        if self.leaves is not None and (self.leaves < 2 or self.leaves % 2):
            raise UserError(f"--leaves must be an even number of at least 2, got {self.leaves}.")
        output.check_file(self.out)


def run(options: Bench) -> None:
    """Runs the benchmark, writes the JSON file and prints the tables."""
    console = Console()
    environment = _environment()
    console.print(f"{environment['device']}, jax {jax.__version__}\n{report.LEGEND}\n")
    chosen, rounds = {name: MODELS[name] for name in options.models}, options.rounds
    if options.leaves is not None:
        deep = functools.partial(models.deep, leaves=options.leaves)
        chosen, rounds = {f"{options.leaves} leaves": Model(deep, 32)}, 0
    given = {**dataclasses.asdict(options), "rounds": rounds, "out": str(options.out)}
    count = len(steps.steps(options.methods))
    results: Record = {}
    for name, model in chosen.items():
        work = {"building": (2.0, count * options.builds), "running": (1.0, count * rounds)}
        with (
            Progress(Console(stderr=True), work, f"{name}:") as progress,
            measure.no_compilation_cache(),
        ):
            results[name] = measure_model(model, options, rounds, progress.done)
        if options.out is not None:
            content = {"environment": environment, "options": given, "models": results}
            output.write_json(options.out, content)
        report.print_tables(console, name, results[name])
    if options.out is not None:
        console.print(f"Wrote {options.out}")


def measure_model(
    model: Model, options: Bench, rounds: int, done: Callable[[str, float], None]
) -> Record:
    """Measures every step on one model; calls ``done(kind, seconds)`` after each piece of work."""
    batch_size = options.batch_size or model.batch_size
    problem = model.make(batch_size)
    names = steps.steps(options.methods)
    builds: dict[str, list[measure.Build]] = {name: [] for name in names}
    for _ in range(options.builds):
        for name in names:
            make = functools.partial(steps.make, name, problem)
            built = measure.build(make, problem.params, problem.batch)
            builds[name].append(built)
            done("building", built.trace_seconds + built.compile_seconds)
    last = {name: of[-1] for name, of in builds.items()}
    seconds = measure.interleaved(
        last, problem.params, problem.batch, BASE, rounds, functools.partial(done, "running")
    )
    measured = {
        name: {
            "reference": steps.reference(name),
            "cost": measure.compiled_cost(last[name].compiled)._asdict(),
            "state_bytes": measure.state_bytes(last[name].step.init(problem.params)),
            "trace_seconds": min(built.trace_seconds for built in builds[name]),
            "compile_seconds": min(built.compile_seconds for built in builds[name]),
            "seconds": seconds[name],
        }
        for name in names
    }
    return {
        "batch_size": batch_size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(problem.params)),
        "steps": report.with_ratios(measured),
    }


def _environment() -> Record:
    device = jax.devices()[0]
    kind = device.device_kind
    name = f"{platform.machine()} CPU, {os.cpu_count()} cores" if kind == "cpu" else kind
    return {**versions(), "device": name, "platform": device.platform}
