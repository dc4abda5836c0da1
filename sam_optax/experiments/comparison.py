"""The command ``compare``: trains methods on the same data and compares them."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.describe import describe
from sam_optax.experiments.options.options import Compare
from sam_optax.experiments.options.resolve import resolve
from sam_optax.experiments.reporting import output, results
from sam_optax.experiments.reporting.archive import load_params, to_npz
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.table import Result, print_settings
from sam_optax.experiments.training import devices, identity
from sam_optax.experiments.training import task as tasks
from sam_optax.experiments.training.checkpoints import CHECKPOINT, Checkpoints
from sam_optax.experiments.training.runner import Outcome
from sam_optax.experiments.training.train import Training, work
from sam_optax.experiments.tuning import search
from sam_optax.experiments.types import Json, Record

REPORT = "report.html"
"""Written last: a run without it has been killed before its figures were drawn."""
_FILES = ("results.json", "params.npz", CHECKPOINT, REPORT, search.FILE)
"""Besides the figures."""


def run(options: Compare, given: tasks.Given = tasks.NOTHING, show: bool = True) -> Result | None:
    """Trains the methods, prints the table if it is to ``show`` it, and writes the files.

    ``given`` are the objects of a call from Python. After ``--dry-run`` it returns ``None``.

    Raises:
      UserError: an option or a file is invalid. It is raised before training, unless the output
        directory becomes unwritable later or every run diverges.
    """
    resolved = resolve(options)
    if options.dry_run:
        print_settings(Console(), resolved)
        return None
    mesh = devices.choose(options.devices if options.devices or options.preset else 1)
    dataset = given.dataset or tasks.load_dataset(tasks.values(resolved["settings"]))
    description = describe(options, resolved, dataset, mesh.size, given)
    task = tasks.task_of(description, dataset, given)
    if task.initial and (new := [path for path in tasks.shapes(task) if path not in task.initial]):
        description["notes"].append(f"Not among the variables of --model: {', '.join(new)}.")
    for note in description["notes"]:
        say(note)
    started = _Run(options, task, description, mesh, show, given.on_epoch)
    if options.out is None:
        return started.result()
    # Slow; before training, if it cannot be.
    from sam_optax.experiments.reporting.figures import CAPTIONS

    ours = results.from_json(options.out / "results.json") is not None
    with output.claimed(options.out, (*_FILES, *CAPTIONS), ours):
        return started.result()


@dataclasses.dataclass
class _Run:
    """A run, from its task to its results; ``--tune`` settles the methods of both."""

    options: Compare
    task: tasks.Task
    description: Record
    mesh: Mesh
    show: bool
    on_epoch: tasks.OnEpoch | None

    def result(self) -> Result:
        """Trains, unless the run is finished; writes the files and prints the table."""
        out, run = self.options.out, identity.of(self.description)
        checkpoints = Checkpoints(out, self.options.checkpoint_every, run) if out else None
        found = self._finished(checkpoints) if checkpoints else None
        begin = "This run is finished: its" if found else "The"
        found = found or self._trained(checkpoints)
        if out:
            (out / CHECKPOINT).unlink(missing_ok=True)  # its run is in the results now
            if self.options.tune:
                (out / search.FILE).unlink(missing_ok=True)  # it is in the results now
            if not (out / REPORT).exists():
                _draw(out, found.results)
            say(f"\n{begin} results are in {out}. Open {out / REPORT}.", stderr=False)
        if all(of.get("diverged") == len(self.task.seeds) for of in found.results["methods"]):
            raise UserError("The training has diverged; give a smaller --lr or radius, or --clip.")
        return found

    def _finished(self, checkpoints: Checkpoints) -> Result | None:
        """What the run has found if it is finished, after printing its table; else ``None``.

        Results or a checkpoint of another run in the directory raise :class:`UserError`.
        """
        options, path = self.options, checkpoints.path.parent
        begun = options.tune and (path / search.FILE).exists()
        checkpoints.find(options.resume)
        if checkpoints.epoch or begun or not options.resume:
            return None
        if (found := results.from_json(path / "results.json")) is None:
            if (path / "results.json").exists():
                why = "is damaged, or of another program; remove it, or choose another --out."
                raise UserError(f"--resume: {path / 'results.json'} {why}")
            say(f"There is no checkpoint in {options.out}: starting from the beginning.")
            return None
        with results.describing(path / "results.json"):
            theirs, ours = identity.of(found), identity.of(self.description)
            identity.check(theirs, ours, f"{options.out} holds the results of")
            before = Result(found, load_params(path / "params.npz", identity=theirs))
            if self.show:
                before.print()
            if not (path / REPORT).exists():
                _draw(path, found)
        return before

    def _trained(self, checkpoints: Checkpoints | None) -> Result:
        """What the run finds, after writing its files and printing its table."""
        out = self.options.out
        if self.options.tune:
            self._tune()
        outcomes = self._train(checkpoints)
        params = {name: outcome.variables for name, outcome in outcomes.items()}
        network = next(iter(next(iter(params.values())).values()))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(network["params"]))
        found = Result(results.collect(self.description, parameters, outcomes), params)
        try:
            if out:
                (out / REPORT).unlink(missing_ok=True)  # of an earlier run
                npz = to_npz(params, identity.of(found.results))
                text = results.to_json(found.results)
                output.write(out, {"params.npz": npz, "results.json": text})
        finally:  # where either fails, a full disk or a closed pipe, there is still the other
            if self.show:
                found.print()
        return found

    def _tune(self) -> None:
        """Chooses the values of ``--tune``; the directory keeps those that it tries."""
        options, task = self.options, search.held_out(self.task)
        kept = search.load(options, identity.of(self.description))
        try:
            found = search.run(task, self.mesh, options, kept, Console(stderr=True))
        except KeyboardInterrupt:
            if options.out and any(kept.trials.values()):
                say(f"What --tune has tried is in {options.out / search.FILE}; --resume goes on.")
            raise
        for note in search.notes(found):
            say(note)
        self.description = search.settled(self.description, found)
        self.task = dataclasses.replace(self.task, entries=tasks.entries_of(self.description))

    def _train(self, checkpoints: Checkpoints | None) -> dict[str, Outcome]:
        first = checkpoints.epoch if checkpoints else 0
        bar = Progress(Console(stderr=True), work(self.task, first))
        try:
            with bar as progress:
                return Training(self.task, self.mesh).run(progress, checkpoints, self.on_epoch)
        except KeyboardInterrupt:
            if checkpoints and checkpoints.epoch:
                there = f"After epoch {checkpoints.epoch} there is a checkpoint"
                say(f"{there}; --resume continues from it.")
            raise


def _draw(out: Path, found: Json) -> None:
    from sam_optax.experiments.reporting import figures, page  # slow to import

    drawn = figures.all_figures(found)
    with output.writable(out):
        for name in figures.CAPTIONS.keys() - drawn.keys():  # of an earlier run
            (out / name).unlink(missing_ok=True)
    output.write(out, {**drawn, REPORT: page.html_page(found, drawn)})
