"""The command ``compare``: trains methods on the same data and compares them."""

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.describe import describe, planned, shared_settings
from sam_optax.experiments.options.options import Compare
from sam_optax.experiments.options.resolve import resolve
from sam_optax.experiments.reporting import results, table
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.live import Live
from sam_optax.experiments.reporting.output import OutputDirectory
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.snapshots import Snapshots, by_seed, load_params, to_npz
from sam_optax.experiments.result import Result
from sam_optax.experiments.training import devices, identity, initial
from sam_optax.experiments.training.task import (
    NOTHING,
    Given,
    Task,
    entries_of,
    load_dataset,
    task_of,
)
from sam_optax.experiments.training.train import Outcome, Training
from sam_optax.experiments.training.work import work
from sam_optax.experiments.tuning import search
from sam_optax.experiments.types import Json, PyTree, Record

if TYPE_CHECKING:
    from sam_optax.experiments.training.checkpoints import Checkpoints

__all__ = ["Compare", "run"]

CHECKPOINT = "checkpoint"
"""Directory of the checkpoints, inside that of --out."""
REPORT = "report.html"
"""Written last: a run without it has been killed before its figures were drawn."""
_FILES = ("results.*", "params*.npz", REPORT, "metrics.jsonl", "tensorboard", search.FILE)
"""Besides the figures."""


def run(options: Compare, given: Given = NOTHING, show: bool = True) -> Result | None:
    """Trains the methods, prints the table and writes the files.

    Args:
      options: the options of the command.
      given: what a call from Python gives as objects.
      show: whether the table is printed.

    Returns:
      What the run has found, or ``None`` after ``--dry-run``.

    Raises:
      UserError: an option or a file is invalid. It is raised before training, unless the output
        directory becomes unwritable later or every run diverges.
    """
    if options.distributed:
        devices.connect()
    resolved = resolve(options)
    if options.dry_run:
        table.print_settings(_console(), planned(options, resolved))
        return None
    count = options.devices if options.devices or options.preset or options.distributed else 1
    place = devices.choose(count)
    shared = {name: found.value for name, found in shared_settings(options, resolved).items()}
    everything = given.dataset or load_dataset(shared)
    full = {"train": len(everything.train.y), "test": len(everything.test.y)}
    dataset = everything.some(options.scale)
    description = describe(options, resolved, dataset, full, place.count, given)
    task = task_of(description, dataset, given)
    if options.init:
        start, new = initial.load(options.init, task)
        task = dataclasses.replace(task, initial=start)
        description["notes"] += [f"Not from the file of --init: {', '.join(new)}."] if new else []
    for note in description["notes"]:
        _say(note)
    run = _Run(options, task, description, place, show)
    if options.out is None or jax.process_index():  # only one process writes
        return _train_and_write(run, None)
    from sam_optax.experiments.reporting import figures  # slow; before training, if it cannot be

    ours = results.from_json(options.out / "results.json") is not None
    with OutputDirectory(options.out, (*_FILES, *figures.CAPTIONS), ours) as out:
        return _train_and_write(run, out)


class _Run(NamedTuple):
    """A training run, from the task to its results."""

    options: Compare
    task: Task
    description: Json
    place: devices.Devices
    show: bool

    def print(self, found: Json) -> None:
        """Prints the table."""
        if self.show:
            _console().print(table.ResultsTable(found), soft_wrap=True)  # paths stay on one line

    def tuned(self, out: OutputDirectory | None) -> "_Run":
        """The run with the values that ``--tune`` chooses; ``out`` keeps those that it tries."""
        options, of_run, path = self.options, identity.of(self.description), self.options.out
        task = search.held_out(self.task)
        trials = search.load(path / search.FILE, of_run, options.resume) if path else {}
        if out and not options.resume:
            (out.path / search.FILE).unlink(missing_ok=True)

        def keep() -> None:
            if out:
                kept = search.marked({"identity": of_run, "trials": trials})
                out.write({search.FILE: results.to_json(kept)})

        try:
            default = search.TRIALS_WITH_LR if options.tune_lr else search.TRIALS
            count = options.trials or default
            chosen = search.Search(task, self.place, count, options.tune_lr, trials)
            found = chosen.run(keep, _console(stderr=True))
        except KeyboardInterrupt:
            if out and any(trials.values()):
                _say(f"What --tune has tried is in {out.path / search.FILE}; --resume goes on.")
            raise
        for note in search.notes(found):
            _say(note)
        description = search.settled(self.description, found)
        entries = entries_of(description)
        task = dataclasses.replace(self.task, entries=entries)
        return self._replace(description=description, task=task)

    def train(
        self,
        checkpoints: "Checkpoints | None",
        live: Live | None = None,
        out: OutputDirectory | None = None,
    ) -> tuple[Record, dict[str, Outcome]]:
        """Trains, and returns the results and the outcome of each method."""
        options, task = self.options, self.task
        # A comparison without SGD still reports costs relative to SGD; a single method does not.
        timed = len(task.entries) > 1 and options.preset is None
        every = options.checkpoint_every if checkpoints else 0
        epochs = max(entry.recipe.epochs for entry in task.entries.values())
        pieces = work(task, None, every, timed)
        with Progress(_console(stderr=True), pieces, epochs=epochs) as progress:
            snapshots = None
            if out and options.save_every:
                of_run = identity.of(self.description)
                snapshots = Snapshots(out, options.save_every, task.seeds, of_run)
            training = Training(task, self.place, timed, watch=options.out is not None)
            outcomes = training.run(progress, checkpoints, live, snapshots)
        variables = next(iter(outcomes.values())).variables["params"]
        parameters = sum(leaf.size for leaf in jax.tree.leaves(variables)) // len(task.seeds)
        return results.collect(self.description, parameters, outcomes), outcomes


def _train_and_write(run: _Run, out: OutputDirectory | None) -> Result:
    """Trains and prints the table, after writing the files and before drawing."""
    options, path = run.options, run.options.out
    checkpoints = _checkpoints(run, path) if path else None  # written by all processes
    begun = path and options.tune and (path / search.FILE).exists()
    done = checkpoints.epoch if checkpoints else 0
    if path and checkpoints and not done:
        if options.resume and not begun and (before := _finished(run, path, out)) is not None:
            checkpoints.finish()
            return before
        checkpoints.refuse(foreign=bool(options.resume or options.checkpoint_every))
        if options.resume and not begun:
            _say(f"There is no checkpoint in {path}: starting from the beginning.")
    if options.tune:
        run = run.tuned(out)
    with Live(out.path, options.tensorboard, done) if out else nullcontext() as live:
        try:
            found, outcomes = run.train(checkpoints, live, out)
        except KeyboardInterrupt:
            if checkpoints and checkpoints.epoch:
                there = f"After epoch {checkpoints.epoch} there is a checkpoint"
                _say(f"{there}; --resume continues from it.")
            raise
    params = by_seed({name: of.variables for name, of in outcomes.items()}, run.task.seeds)
    try:
        if out:
            (out.path / REPORT).unlink(missing_ok=True)  # that of an earlier run
            out.write(_files(found, params))
            if options.tune and not (checkpoints and checkpoints.epoch):
                (out.path / search.FILE).unlink(missing_ok=True)  # it is in the results now
    finally:  # where either fails, a full disk or a closed pipe, there is still the other
        run.print(found)
    if out:
        _draw(out, found)
    if checkpoints:
        checkpoints.finish()
    if out:
        if options.tune:
            (out.path / search.FILE).unlink(missing_ok=True)
        _print(f"\nThe results are in {out.path}. Open {out.path / REPORT}.")
    if all(method["diverged"] == len(found["seeds"]) for method in found["methods"]):
        raise UserError("The training has diverged; give a smaller --lr or radius, or --clip.")
    return Result(found, params)


def _checkpoints(run: _Run, out: Path) -> "Checkpoints | None":
    """The run's checkpoints, if requested or if there are any."""
    options, path = run.options, out / CHECKPOINT
    if not (options.resume or options.checkpoint_every or path.exists()):
        return None
    from sam_optax.experiments.training.checkpoints import Checkpoints  # slow to import

    run_identity = identity.of(run.description)
    found = Checkpoints(path, options.checkpoint_every, run_identity, results.versions())
    for note in found.find() if options.resume else ():
        _say(note)
    return found


def _finished(run: _Run, path: Path, out: OutputDirectory | None) -> Result | None:
    """What the run has found if it was trained before; prints its table, draws what is missing."""
    found = results.from_json(path / "results.json")
    if found is None:
        return None
    theirs, ours = identity.of(found), identity.of(run.description)
    identity.check(theirs, ours, f"{path} holds the results of")
    run.print(found)
    if out and not (path / REPORT).exists():
        _draw(out, found)
    _print(f"\nThis run is finished: its results are in {path}. Open {path / REPORT}.")
    return Result(found, load_params(path / "params.npz"))


def _files(found: Json, params: Mapping[str, Mapping[int, PyTree]]) -> dict[str, bytes]:
    return {
        "params.npz": to_npz(params, identity.of(found)),
        "results.csv": results.to_csv(found),
        "results.json": results.to_json(found),
    }


def _draw(out: OutputDirectory, found: Json) -> None:
    from sam_optax.experiments.reporting import figures, html  # slow to import

    drawn = figures.all_figures(found)
    out.write({**drawn, REPORT: html.html_page(found, drawn)})


def _console(stderr: bool = False) -> Console:
    return Console(stderr, quiet=bool(jax.process_index()))


def _print(message: str, stderr: bool = False) -> None:
    say(message, stderr, quiet=bool(jax.process_index()))


def _say(message: str) -> None:
    _print(message, stderr=True)
