"""``python -m sam_optax compare``: what each method is worth on a small task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sam_optax.experiments import data, identity, models, results, table, training
from sam_optax.experiments.checkpoints import Checkpoints
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options import Compare, check
from sam_optax.experiments.output import OutputDirectory
from sam_optax.experiments.progress import Progress
from sam_optax.experiments.task import Task
from sam_optax.experiments.training import Outcome

__all__ = ["Compare", "run"]


def run(options: Compare) -> None:
    """Trains the methods, prints the table and writes the files.

    Raises:
      UserError: something is wrong with an option or a file. It is raised before the training,
        unless the directory for the results stops being writable meanwhile.
    """
    check(options)
    task = task_of(options)
    if options.out is None:
        _print(_train(task, options)[1])
        return
    import matplotlib  # noqa: F401  (before the training, as it might not be installed)

    with OutputDirectory(options.out) as out:
        run_identity = identity.of(task, options.settings(), options.chosen())
        checkpoints = Checkpoints(options.out, options.checkpoint_every, run_identity)
        if not options.resume:
            checkpoints.refuse()
        elif _resume(options.out, checkpoints, run_identity):
            return
        try:
            outcomes, found = _train(task, options, checkpoints)
            try:
                out.write(
                    {
                        "params.npz": results.params_to_npz(task.seeds, outcomes),
                        **_pictures(found),
                        "results.csv": results.to_csv(found),
                        "results.json": results.to_json(found),
                    }
                )
            finally:  # where either fails, a full disk or a closed pipe, there is still the other
                _print(found)
        except KeyboardInterrupt:
            if checkpoints.epoch:
                there = f"After epoch {checkpoints.epoch} there is a checkpoint"
                _say(f"{there}; --resume continues from it.")
            raise
        checkpoints.finish()
    Console(highlight=False).print(f"\nThe results are in {options.out}.", soft_wrap=True)


def _resume(out: Path, checkpoints: Checkpoints, run_identity: Mapping[str, Any]) -> bool:
    """Looks for what an earlier process has left.

    Returns:
      Whether it is the results, which are printed; ``checkpoints`` knows of a checkpoint.

    Raises:
      UserError: it is of another run.
    """
    if note := checkpoints.find():
        _say(note)
    if checkpoints.epoch:
        return False
    found = results.from_json(out / "results.json")
    if found is None:
        _say(f"There is no checkpoint in {out}: starting from the beginning.")
        return False
    identity.check_results(out, identity.of_results(found), run_identity)
    stdout = Console(highlight=False)
    _print(found)
    stdout.print(f"\nThis run is finished: its results are in {out}.", soft_wrap=True)
    return True


def _say(message: str) -> None:
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)


def task_of(options: Compare) -> Task:
    """What the options describe, with its data loaded."""
    if options.model not in models.MODELS:  # a wrong name need not wait for the data
        models.build(options.model, (), 2)
    dataset = data.load(options.dataset)
    examples = len(dataset.x_train)
    if options.batch_size > examples:
        raise UserError(
            f"--batch-size {options.batch_size}: {options.dataset} has {examples} training "
            "examples; use at most as many."
        )
    return Task(
        dataset=dataset,
        model=models.build(options.model, dataset.x_train.shape[1:], dataset.classes),
        seeds=tuple(range(options.seed_offset, options.seed_offset + options.seeds)),
        epochs=options.epochs,
        batch_size=options.batch_size,
        label_noise=options.label_noise,
        base=options.base(),
        sharpness_rho=options.sharpness_rho,
    )


def _print(found: Mapping[str, Any]) -> None:
    stdout = Console(highlight=False)
    if not found["settings"]["frontier"]:
        table.print_results(stdout, found)
        return
    from sam_optax.experiments import frontier

    frontier.print_frontier(stdout, found)


def _pictures(found: Mapping[str, Any]) -> dict[str, bytes]:
    from sam_optax.experiments import plots  # takes its time, and might not be installed

    if not found["settings"]["frontier"]:
        return {
            "curves.png": plots.curves(found),
            "bars.png": plots.bars(found),
            "steps.png": plots.steps(found),
        }
    from sam_optax.experiments import frontier_plot

    return {"frontier.png": frontier_plot.frontier(found)}


def _train(
    task: Task, options: Compare, checkpoints: Checkpoints | None = None
) -> tuple[dict[str, Outcome], Mapping[str, Any]]:
    chosen = options.chosen()
    work = training.work(task, chosen, options.checkpoint_every)
    with Progress(Console(stderr=True, highlight=False), work, task.epochs) as progress:
        outcomes = training.train(
            task, chosen, progress, checkpoints, watch=options.out is not None
        )
    return outcomes, results.collect(task, options.settings(), outcomes)
