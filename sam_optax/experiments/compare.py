"""The commands ``compare`` and ``train``: what each method is worth on the same data."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from rich.console import Console
from rich.text import Text

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.describe import describe, shared_settings
from sam_optax.experiments.options.options import Compare, Train
from sam_optax.experiments.options.resolve import resolve
from sam_optax.experiments.reporting import results, table
from sam_optax.experiments.reporting.live import Live
from sam_optax.experiments.reporting.output import OutputDirectory
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.training import devices, identity, restore
from sam_optax.experiments.training.task import Task
from sam_optax.experiments.training.train import Outcome, Training, train
from sam_optax.experiments.training.work import work

if TYPE_CHECKING:
    from sam_optax.experiments.training.checkpoints import Checkpoints

__all__ = ["Compare", "Train", "run"]

CHECKPOINT = "checkpoint"
"""The directory of the checkpoints, inside of that of --out."""


def run(options: Compare | Train) -> None:
    """Trains the methods, prints the table and writes the files.

    Raises:
      UserError: something is wrong with an option or a file. It is raised before the training,
        unless the directory for the results stops being writable meanwhile, or all of it diverges.
    """
    if isinstance(options, Train):
        options = options.compare()
    if options.distributed:
        devices.connect()
    resolved = resolve(options)
    count = options.devices if options.devices or options.preset or options.distributed else 1
    place = devices.choose(count)
    shared = {name: found.value for name, found in shared_settings(options, resolved).items()}
    everything = restore.load_dataset(shared)
    full = {"train": len(everything.train.y), "test": len(everything.test.y)}
    dataset = everything.some(options.scale)
    description = describe(options, resolved, dataset, full, place.count)
    task = restore.task_of(description, dataset)
    if options.dry_run:
        table.print_settings(_console(), description)
        return
    for note in description["notes"]:
        _say(note)
    run = _Run(options, task, description, place)
    if options.out is None or jax.process_index():
        _run_along(run)
        return
    import matplotlib  # noqa: F401  (before the training, as it might not be installed)

    with OutputDirectory(options.out) as out:
        _run_into(out, run)


class _Run(NamedTuple):
    """A training, from the task to its results."""

    options: Compare
    task: Task
    description: Mapping[str, Any]
    place: devices.Devices

    def train(
        self, checkpoints: "Checkpoints | None", live: Live | None = None
    ) -> tuple[dict[str, Any], dict[str, Outcome]]:
        """Trains: the results, and what became of each method."""
        options, task = self.options, self.task
        # A comparison without SGD still tells costs in steps of SGD; one method is not compared.
        timed = len(task.entries) > 1 and options.preset is None
        every = options.checkpoint_every if checkpoints else 0
        epochs = max(entry.recipe.epochs for entry in task.entries.values())
        pieces = work(task, None, every, timed)
        with Progress(_console(stderr=True), pieces, epochs=epochs) as progress:
            training = Training(task, self.place, timed, watch=options.out is not None)
            outcomes = train(training, progress, checkpoints, live)
        variables = next(iter(outcomes.values())).variables["params"]
        parameters = sum(leaf.size for leaf in jax.tree.leaves(variables)) // len(task.seeds)
        return results.collect(self.description, parameters, outcomes), outcomes


def _run_along(run: _Run) -> None:
    """A run without files, or another process's part in a run with them."""
    checkpoints = None
    if run.options.out is not None:  # all processes write a checkpoint together
        checkpoints, finished = _begin(run.options.out, run)
        if finished:
            return
    found, _ = run.train(checkpoints)
    if checkpoints:
        checkpoints.finish()
    table.print_results(_console(), found)
    _fail_if_all_diverged(found)


def _run_into(out: OutputDirectory, run: _Run) -> None:
    checkpoints, finished = _begin(out.path, run)
    if finished:
        return
    done = checkpoints.epoch if checkpoints else 0
    with Live(out.path, run.options.tensorboard, done) as live:
        try:
            found, outcomes = run.train(checkpoints, live)
        except KeyboardInterrupt:
            if checkpoints and checkpoints.epoch:
                there = f"After epoch {checkpoints.epoch} there is a checkpoint"
                _say(f"{there}; --resume continues from it.")
            raise
    try:
        params = {
            name: {
                seed: jax.tree.map(lambda leaf, i=i: leaf[i], outcome.variables)
                for i, seed in enumerate(run.task.seeds)
            }
            for name, outcome in outcomes.items()
        }
        out.write(
            {
                "params.npz": results.params_to_npz(params),
                "results.csv": results.to_csv(found),
                "results.json": results.to_json(found),
            }
        )
    finally:  # where either fails, a full disk or a closed pipe, there is still the other
        table.print_results(_console(), found)
    from sam_optax.experiments.reporting import figures, html  # take their time

    drawn = figures.all_figures(found)
    out.write({**drawn, "report.html": html.html_page(found, drawn)})
    if checkpoints:
        checkpoints.finish()
    _console().print(Text(f"\nThe results are in {out.path}."), soft_wrap=True)
    _fail_if_all_diverged(found)


def _begin(out: Path, run: _Run) -> tuple["Checkpoints | None", bool]:
    """The run's checkpoints, if it is to have any, and whether it was finished before.

    The table of a finished run is printed.
    """
    options, run_identity = run.options, identity.of(run.description)
    if not (options.resume or options.checkpoint_every or (out / CHECKPOINT).exists()):
        return None, False
    from sam_optax.experiments.training.checkpoints import Checkpoints  # Orbax takes its time

    found = Checkpoints(
        out / CHECKPOINT, options.checkpoint_every, run_identity, results.versions()
    )
    if not options.resume:
        found.refuse()
    elif note := found.find():
        _say(note)
    if options.resume and not found.epoch:
        if before := results.from_json(out / "results.json"):
            identity.check_results(out, identity.of(before), run_identity)
            table.print_results(_console(), before)
            text = f"\nThis run is finished: its results are in {out}."
            _console().print(Text(text), soft_wrap=True)
            return None, True
        _say(f"There is no checkpoint in {out}: starting from the beginning.")
    return found, False


def _fail_if_all_diverged(found: Mapping[str, Any]) -> None:
    if all(method["diverged"] == len(found["seeds"]) for method in found["methods"]):
        raise UserError("The training has diverged; give a smaller --lr or radius, or --clip.")


def _console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, quiet=bool(jax.process_index()))


def _say(message: str) -> None:
    _console(stderr=True).print(Text(message), soft_wrap=True)
