"""``python -m sam_optax train``: one method on one data set, as the papers do."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from sam_optax.experiments import identity
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.output import OutputDirectory
from sam_optax.experiments.papers import (
    architectures,
    datasets,
    devices,
    optimizer,
    outcome,
    plan,
    saved,
    settings,
    sharpness,
    step,
)
from sam_optax.experiments.papers.loop import Training
from sam_optax.experiments.papers.metrics import Metrics
from sam_optax.experiments.papers.options import Train
from sam_optax.experiments.papers.progress import Progress
from sam_optax.experiments.table import counted

__all__ = ["Train", "run"]

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def run(options: Train) -> None:
    """Trains, prints the outcome and writes the files.

    Raises:
      UserError: something is wrong with an option or a file, or the training diverges.
    """
    chosen = settings.resolve(options)
    _check(options)
    if options.distributed:
        devices.connect()
    if options.out is None or jax.process_index():
        _run(options, chosen, None)
        return
    import matplotlib  # noqa: F401  (before the training, as it might not be installed)

    with OutputDirectory(options.out) as out:
        _run(options, chosen, out)


def _check(options: Train) -> None:
    if options.dtype not in _DTYPES:
        raise UserError(f"--dtype {options.dtype}: use one of {', '.join(_DTYPES)}.")
    if options.out is None and (options.resume or options.tensorboard):
        flag = "--resume" if options.resume else "--tensorboard"
        raise UserError(f"{flag}: needs --out DIR, the directory of the run's files.")
    for name in ("checkpoint_every", "sharpness_examples", "seed", "sharpness_rho"):
        if not 0 <= getattr(options, name) < math.inf:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {getattr(options, name)}: use a number of at least 0.")
    if options.seed >= 2**31:
        raise UserError(f"--seed {options.seed}: use a number below 2^31.")


def _run(options: Train, chosen: settings.Settings, out: OutputDirectory | None) -> None:
    place = devices.choose(options.devices)
    dataset = datasets.load(chosen["dataset"], chosen["image_size"])
    dtype = _DTYPES[options.dtype]
    model = architectures.build(chosen["model"], dataset.classes, dataset.size, dtype)
    chosen = _with_image_size(chosen, options, dataset.size)
    extent = plan.make(chosen, dataset, options.scale, options.seed, place.count)
    stderr = Console(stderr=True, highlight=False)
    if jax.process_index():
        stderr.quiet = True
    _announce(stderr, options, chosen, extent)

    run_identity = _identity(options, chosen, dataset.sha256)
    try:
        key = jax.random.fold_in(jax.random.key(options.seed), 1)
        tx = optimizer.make(chosen, extent, key)
        problem = step.Problem(model, chosen, dataset)
        make = step.init(problem, tx, options.seed, dataset.size)
        state = jax.jit(make, out_shardings=place.whole)()
    except ValueError as error:  # the library's messages begin with the argument's name
        raise UserError(f"--method {chosen['method']}: {error}") from error
    if options.resume and _finished(options, run_identity):
        return
    state, record = _begin(options, run_identity, state)
    metrics = Metrics(options.out if out else None, options.tensorboard, record["points"])
    first = len(metrics.points)

    with Progress(stderr, extent.epochs, extent.steps_per_epoch, extent.batch_size) as progress:
        training = Training(problem, extent, place, state)

        def spent() -> dict[str, float]:
            cost = training.cost
            return {
                "train_seconds": record["train_seconds"] + cost.train_seconds,
                "train_images": record["train_images"] + cost.train_images,
            }

        def after_epoch(epoch: int) -> None:
            every = options.checkpoint_every
            if out and every and epoch % every == 0 and epoch < extent.epochs:
                so_far = {"points": metrics.points, **spent()}
                out.write({saved.NAME: saved.encode(training.state, run_identity, so_far)})

        training.run(first, metrics, progress, after_epoch)
    rise = None
    if options.sharpness_examples:
        count = min(options.sharpness_examples, len(extent.train))
        value = sharpness.measure(
            problem, extent, place, training.state, count, options.sharpness_rho
        )
        finite = value if math.isfinite(value) else None  # JSON has no other numbers
        rise = {"value": finite, "rho": options.sharpness_rho, "examples": count}

    found = {
        **outcome.description(options, chosen, extent, training.state.params),
        "points": metrics.points,
        "cost": outcome.cost(chosen, extent, training.cost, spent(), place.count),
        "sharpness": rise,
        "identity": run_identity,
    }
    try:
        if out:
            outcome.write(out, found, training.state)
            (out.path / saved.NAME).unlink(missing_ok=True)
    finally:  # where either fails, a full disk or a closed pipe, there is still the other
        if not jax.process_index():
            outcome.show(Console(highlight=False), found)
    if out:
        Console(highlight=False).print(f"The report is {out.path / 'report.html'}.", soft_wrap=True)


def _with_image_size(chosen: settings.Settings, options: Train, size: int) -> settings.Settings:
    """The settings with the size that the images have, where the data decide it."""
    if size == chosen["image_size"]:
        return chosen
    if options.image_size is not None:
        raise UserError(
            f"--image-size {options.image_size}: the images of --dataset {chosen['dataset']} all "
            f"have {size} pixels; leave it out."
        )
    of_data = {"image_size": settings.Setting(size, "the data's")}
    return dataclasses.replace(chosen, table={**chosen.table, **of_data})


def _finished(options: Train, run_identity: Mapping[str, Any]) -> bool:
    """Whether the run has been finished before; prints its results then.

    Raises:
      UserError: another run has been finished there.
    """
    assert options.out is not None
    found = None if (options.out / saved.NAME).exists() else outcome.read(options.out)
    if found is None:
        return False
    identity.check_results(options.out, found["identity"], run_identity)
    stdout = Console(highlight=False)
    stdout.quiet = bool(jax.process_index())
    outcome.show(stdout, found)
    stdout.print(f"This run is finished: its report is in {options.out}.", soft_wrap=True)
    return True


def _begin(
    options: Train, run_identity: Mapping[str, Any], state: step.State
) -> tuple[step.State, dict[str, Any]]:
    """The state to begin with, and what an earlier process has recorded."""
    nothing = {"points": [], "train_seconds": 0.0, "train_images": 0}
    if options.out is None:
        return state, nothing
    path = options.out / saved.NAME
    if options.resume:
        return saved.load(path, run_identity, state) or (state, nothing)
    if path.exists():
        raise UserError(
            f"--out: {path} is the checkpoint of an unfinished run; add --resume to continue that "
            "run, remove the file to start again, or choose another directory."
        )
    return state, nothing


def _identity(options: Train, chosen: settings.Settings, sha256: str) -> dict[str, Any]:
    """What makes two runs the same one; on which devices they run does not."""
    values = {name: setting.value for name, setting in chosen.table.items()}
    more = {"scale": options.scale, "seed": options.seed, "dtype": options.dtype}
    return {"settings": {**values, **more}, "hyperparameters": {}, "data": sha256}


def _announce(
    console: Console, options: Train, chosen: settings.Settings, extent: plan.Plan
) -> None:
    console.print(
        f"{outcome.title(chosen)}; {counted(extent.epochs, 'epoch')} of "
        f"{counted(extent.steps_per_epoch, 'step')}"
    )
    stand_ins = [
        f"{name} {setting.value}"
        for name, setting in chosen.table.items()
        if setting.source.startswith("not printed")
    ]
    if stand_ins:
        console.print(
            f"Not printed in the paper, chosen here: {', '.join(stand_ins)}.", soft_wrap=True
        )
    if extent.shrunk:
        console.print(
            f"Scaled down (--scale {options.scale:g}): {'; '.join(extent.shrunk)}. The accuracy is "
            "not to be compared with the paper's.",
            soft_wrap=True,
        )
