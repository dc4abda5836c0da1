"""``python -m sam_optax bench``: what a step of each method costs."""

import dataclasses
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import sam_optax
from sam_optax.experiments import bench_handwritten as handwritten
from sam_optax.experiments import bench_measure as measure
from sam_optax.experiments import bench_methods, bench_models
from sam_optax.experiments.bench_family import FAMILY, Entry
from sam_optax.experiments.bench_handwritten import Loss, Step
from sam_optax.experiments.bench_methods import METHODS
from sam_optax.experiments.bench_report import (
    BASE,
    LEGEND,
    SAM_BY_HAND,
    ModelResult,
    StepResult,
    as_json,
    print_tables,
    write_json,
)
from sam_optax.experiments.errors import UserError


class Model(NamedTuple):
    """A network of the benchmark and its usual batch size."""

    make: Callable[[int], bench_models.Problem]
    batch_size: int


MODELS = {
    "mlp": Model(bench_models.mlp, 256),
    "mlp-small-batch": Model(bench_models.mlp, 32),
    "cnn": Model(bench_models.cnn, 64),
    "vit": Model(bench_models.vit, 32),
}


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measures a step of each method beside hand-written steps and optax.contrib.sam.

    Prints, for each model, wall times, trace and compile times, and the compiled program's
    counts, with ratios to a hand-written step of the same method ("by hand"), to a hand-written
    SAM step and to the base optimizer's. Wall ratios are medians over rounds of the ratio within
    the round, so they hold on a busy machine.
    """

    models: tuple[str, ...] = tuple(MODELS)
    """Networks: mlp (4 layers of 1024x1024), mlp-small-batch (the same, bound by memory), cnn and
    vit (4 blocks of width 64)."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods: sam, asam, fsam, rsam, and of the wider family gsam, fisher_sam, vasso, wsam, ssam,
    random_mask, looksam, every, part, momentum, low_pass; and sam's options info and
    skip_nonfinite."""
    leaves: int | None = None
    """Builds the steps and does not run them, on one narrow network of this many leaves, an even
    number. Large networks have 600."""
    rounds: int = 15
    """Rounds of wall times; in each, every step runs for about a tenth of a second."""
    builds: int = 3
    """Times that each step is traced and compiled; the least is reported."""
    batch_size: int | None = None
    """Batch size for every model. By default 256, 32, 64 and 32."""
    out: Path | None = None
    """JSON file for all measurements."""


def run(options: Bench) -> None:
    """Runs the benchmark, prints its tables and writes its file.

    Args:
      options: what to measure.

    Raises:
      UserError: an option's value is not usable.
    """
    _check(options)
    console = Console()
    console.print(f"{_environment()['device']}, jax {jax.__version__}\n{LEGEND}\n")
    results = {}
    models = {name: MODELS[name] for name in options.models}
    if options.leaves is not None:
        deep = functools.partial(bench_models.deep, leaves=options.leaves)
        models = {f"{options.leaves} leaves": Model(deep, 32)}
        options = dataclasses.replace(options, rounds=0)
    total = len(_steps(options.methods)) * (options.builds + options.rounds)
    for name, model in models.items():
        with _progress() as progress, measure.no_compilation_cache():
            task = progress.add_task(name, total=total)
            advance = functools.partial(progress.advance, task)
            results[name] = measure_model(model, options, advance)
        print_tables(console, name, results[name])
    if options.out is not None:
        chosen = dataclasses.asdict(options) | {"out": str(options.out)}
        content = {"environment": _environment(), "options": chosen, "models": as_json(results)}
        try:
            write_json(options.out, content)
        except OSError as error:
            raise UserError(f"--out: cannot write {options.out}: {error.strerror}.") from error
        console.print(f"Wrote {options.out}")


def measure_model(model: Model, options: Bench, advance: Callable[[], None]) -> ModelResult:
    """Measures every step on one model; calls ``advance`` after each build and each block."""
    batch_size = options.batch_size or model.batch_size
    problem = model.make(batch_size)
    steps = _steps(options.methods)
    builds: dict[str, list[measure.Build]] = {name: [] for name in steps}
    for _ in range(options.builds):
        for name, (make, _) in steps.items():
            make_step = functools.partial(make, problem.loss)
            builds[name].append(measure.build(make_step, problem.params, problem.batch))
            advance()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    if options.rounds:
        runners = {
            name: measure.Runner(of[-1].step, of[-1].compiled, problem.params, problem.batch)
            for name, of in builds.items()
        }
        seconds = measure.interleaved(runners, BASE, options.rounds, advance)
    results = {
        name: StepResult(
            reference=reference,
            cost=measure.compiled_cost(builds[name][-1].compiled),
            state_bytes=measure.state_bytes(builds[name][-1].step.init(problem.params)),
            trace_seconds=min(build.trace_seconds for build in builds[name]),
            compile_seconds=min(build.compile_seconds for build in builds[name]),
            seconds=seconds[name],
        )
        for name, (_, reference) in steps.items()
    }
    parameters = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    return ModelResult(batch_size, parameters, results)


def _steps(methods: tuple[str, ...]) -> dict[str, tuple[Callable[[Loss], Step], str]]:
    """Every step to measure and its hand-written reference, in the order to show them."""
    base_by_hand = f"{BASE} by hand"
    steps: dict[str, tuple[Callable[[Loss], Step], str]] = {
        BASE: (bench_methods.base_step, base_by_hand),
        base_by_hand: (handwritten.sgd, base_by_hand),
        SAM_BY_HAND: (handwritten.sam, SAM_BY_HAND),
        "optax.contrib.sam": (bench_methods.optax_contrib_step, SAM_BY_HAND),
    }
    for name in methods:
        library, of_method = _entry(name)
        by_hand = SAM_BY_HAND if of_method is None else f"{name} by hand"
        steps[name] = (library, by_hand)
        if of_method is not None:
            steps[by_hand] = (of_method, by_hand)
    return steps


def _entry(name: str) -> Entry:
    if name in FAMILY:
        return FAMILY[name]
    return Entry(_library_step(METHODS[name]), METHODS[name].handwritten)


def _library_step(method: bench_methods.Method) -> Callable[[Loss], Step]:
    return lambda loss: bench_methods.library_step(loss, method.make())


def _check(options: Bench) -> None:
    for option, chosen, known in (
        ("models", options.models, MODELS),
        ("methods", options.methods, {**METHODS, **FAMILY}),
    ):
        for name in chosen:
            if name not in known:
                raise UserError(f"--{option}: {name!r} is not one of {', '.join(known)}.")
        if not chosen:
            raise UserError(f"--{option} needs at least one of {', '.join(known)}.")
    for option in ("rounds", "builds", "batch_size"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} must be at least 1, got {value}.")
    if options.leaves is not None and (options.leaves < 2 or options.leaves % 2):
        raise UserError(f"--leaves must be an even number from 2 on, got {options.leaves}.")
    if options.out is not None and not options.out.parent.is_dir():
        raise UserError(f"--out: {options.out.parent} is not a folder.")
    if options.out is not None and options.out.is_dir():
        raise UserError(f"--out: {options.out} is a folder, not a file.")


def _progress() -> Progress:
    """On standard error. No remaining time: the stages differ too much to foretell it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    kind = device.device_kind
    return {
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores" if kind == "cpu" else kind,
        "platform": device.platform,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "sam_optax": sam_optax.__version__,
    }
