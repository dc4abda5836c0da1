"""Trains several methods from several seeds in lockstep.

The methods take turns epoch by epoch, so that their times are interleaved: other load on the
machine affects all of them equally, and the remaining time is known after the first round.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from sam_optax.experiments.networks.small import CNN, MLP
from sam_optax.experiments.training import initial, work
from sam_optax.experiments.training.devices import Devices, over_seeds
from sam_optax.experiments.training.evaluation import Evaluation
from sam_optax.experiments.training.runner import Runner, Source
from sam_optax.experiments.training.task import Entry, Task, initial_variables
from sam_optax.experiments.types import PyTree, Record

if TYPE_CHECKING:
    from sam_optax.experiments.reporting.live import Live
    from sam_optax.experiments.reporting.progress import Progress
    from sam_optax.experiments.reporting.snapshots import Snapshots
    from sam_optax.experiments.training.checkpoints import Checkpoints

_SMALL = 2**24
"""Maximum number of params of all seeds that an accelerator trains together."""


@dataclasses.dataclass
class Outcome:
    """The outcome of one method.

    The curves are ``train_loss`` in nats, test accuracies in [0, 1], and with ``watch`` the fields
    of :class:`sam_optax.StepInfo` (NaN if not known).
    """

    entry: Entry
    variables: PyTree  # of the trained networks, a leading seed axis on every leaf
    curves: dict[str, np.ndarray]  # after each epoch, (epochs, seeds)
    sharpness: np.ndarray  # nats, (seeds,)
    seconds: list[float]  # of the training steps per timed epoch, all seeds
    compile_seconds: float  # of the training steps
    cost: float  # of a step relative to the reference, the median over rounds; NaN without one


def in_one_call(task: Task) -> tuple[bool, bool]:
    """Whether one call of a program runs many steps, and whether it trains all seeds."""
    resident = isinstance(task.dataset.train.x, np.ndarray)
    if jax.default_backend() == "cpu":
        # Inside a loop, XLA for CPUs uses fewer threads: convolutions take up to 16 times as long.
        # Small networks gain more from one call for an epoch of all seeds.
        looped = resident and isinstance(task.model, MLP | CNN)
        return looped, looped
    shapes = jax.tree.leaves(jax.eval_shape(functools.partial(initial_variables, task), 0))
    size = sum(leaf.size for leaf in shapes) * len(task.seeds)
    return resident, resident and size <= _SMALL


class Training:
    """The runners of all methods, and the evaluation of their networks.

    With ``timed``, the reference is trained for timing if it is not among the methods. With
    ``watch``, diagnostics of a step are recorded after every epoch.
    """

    def __init__(self, task: Task, place: Devices, timed: bool, watch: bool) -> None:
        self.task = task
        looped, mapped = in_one_call(task)
        groups = [task.seeds]
        if not mapped:
            groups = [(seed,) for seed in task.seeds]
        source = Source(task, groups, place)
        self._watch, self._groups, self._place = watch and source.resident, groups, place
        entries = {**task.entries, **(work.reference(task) if timed else {})}
        self.runners = [Runner(name, e, source, looped) for name, e in entries.items()]
        self._evaluation = Evaluation(task, len(groups[0]), place)
        self._init = jax.jit(over_seeds(functools.partial(initial_variables, task), len(groups[0])))
        variables = self._initial_variables()
        for runner in self.runners:
            runner.start(variables)

    def run(
        self,
        progress: "Progress",
        checkpoints: "Checkpoints | None" = None,
        live: "Live | None" = None,
        snapshots: "Snapshots | None" = None,
    ) -> dict[str, Outcome]:
        """Trains every method from every seed, starting at the checkpoint if there is one."""
        self._compile(progress)
        every, first = (checkpoints.every, checkpoints.epoch) if checkpoints else (0, 0)
        if checkpoints and first:
            timed = len(self.runners) > len(self.task.entries)
            pieces = work.work(self.task, first, every, timed)
            progress.resumed({kind: count for kind, (_, count) in pieces.items()})
            self._resume(*checkpoints.restore(self._arrays()))
        epochs = max(entry.recipe.epochs for entry in self.task.entries.values())
        for epoch in range(first, epochs):
            turn = epoch % len(self.runners)  # so that no method always comes first
            for runner in self.runners[turn:] + self.runners[:turn]:
                self._run_epoch(runner, epoch, functools.partial(progress.done, runner.name), live)
            going = [r for r in self._trained() if epoch + 1 < r.entry.recipe.epochs]
            if snapshots and going and (epoch + 1) % snapshots.every == 0:
                snapshots.save(epoch + 1, {r.name: _variables(r) for r in going})
            if checkpoints and every and (epoch + 1) % every == 0:
                start = time.perf_counter()
                checkpoints.save(epoch + 1, self._record(), self._arrays())
                progress.done("checkpoint", time.perf_counter() - start)
        return {runner.name: self._outcome(runner, progress) for runner in self._trained()}

    def trial(
        self, runner: Runner, values: Mapping[str, np.ndarray], tick: Callable[[float, float], None]
    ) -> dict[str, np.ndarray]:
        """Trains a method anew, with values (see ``Entry.at``) for each seed.

        Returns the curves. All trials of a method share its program.
        """
        split = {name: of.reshape(len(self._groups), -1) for name, of in values.items()}
        groups = [{name: of[i] for name, of in split.items()} for i in range(len(self._groups))]
        runner.start(self._initial_variables(), groups)
        if runner.program is None:
            runner.compile(False)
        epochs = runner.entry.recipe.epochs
        for epoch in range(epochs):
            self._run_epoch(runner, epoch, lambda s, share: tick(s, share / epochs), None)
        return self._curves(runner)

    def _initial_variables(self) -> list[PyTree]:
        seeds = [np.array(group, np.int32) for group in self._groups]
        made = (self._init(group) for group in seeds)
        return [self._place.put(initial.start(self.task.initial, found)) for found in made]

    def _trained(self) -> list[Runner]:
        """The runners of the methods: all but that of the reference."""
        return [runner for runner in self.runners if runner.name in self.task.entries]

    def _compile(self, progress: "Progress") -> None:
        """Compiles all programs before anything is timed."""
        count = len(self.runners) + 1
        for number, runner in enumerate(self.runners, 1):
            progress.compiling(runner.name, number, count)
            runner.compile(self._watch and runner.name in self.task.entries)
        progress.compiling("evaluation", count, count)
        self._evaluation.after_epoch(self.runners[0].variables[0], self._groups[0])

    def _run_epoch(
        self, runner: Runner, epoch: int, tick: Callable[[float, float], None], live: "Live | None"
    ) -> None:
        kept = runner.name in self.task.entries
        rounds = runner.entry.recipe.epochs if kept else work.REFERENCE_ROUNDS
        if epoch >= rounds or runner.diverged:
            return
        runner.run_epoch(epoch, tick)
        if not kept:
            return
        pairs = zip(runner.variables, self._groups, strict=True)
        found = [self._evaluation.after_epoch(*pair) for pair in pairs]
        point = _joined(found) | (_joined(runner.look(epoch)) if self._watch else {})
        runner.curve.append(point)
        for i, seed in enumerate(self.task.seeds):
            if live is not None:
                numbers = {name: float(values[i]) for name, values in point.items()}
                live.add(runner.name, seed, epoch + 1, numbers)

    def _outcome(self, runner: Runner, progress: "Progress") -> Outcome:
        start = time.perf_counter()
        pairs = zip(runner.variables, self._groups, strict=True)
        sharpness = np.concatenate([self._evaluation.sharpness(*pair) for pair in pairs])
        progress.done("sharpness", time.perf_counter() - start)
        variables = _variables(runner)
        references = [other for other in self.runners if other.entry.method == work.REFERENCE]
        return Outcome(
            entry=runner.entry,
            variables=variables,
            curves=self._curves(runner),
            sharpness=sharpness,
            seconds=runner.seconds,
            compile_seconds=runner.compile_seconds,
            cost=relative_cost(runner, references[0]) if references else float("nan"),
        )

    def _curves(self, runner: Runner) -> dict[str, np.ndarray]:
        """(epochs, seeds); epochs that were skipped after all seeds had diverged are NaN."""
        missing = runner.entry.recipe.epochs - len(runner.curve)
        gap = np.full((missing, len(self.task.seeds)), np.nan, np.float32)
        return {
            field: np.concatenate([np.stack([point[field] for point in runner.curve]), gap])
            for field in runner.curve[0]
        }

    def _arrays(self) -> dict[str, PyTree]:
        """The state of every runner, on its devices."""
        return {runner.name: runner.states for runner in self.runners}

    def _record(self) -> Record:
        """The measurements of every runner, as plain data."""
        return {
            runner.name: {
                "seconds": runner.seconds,
                "curve": jax.tree.map(np.ndarray.tolist, runner.curve),
            }
            for runner in self.runners
        }

    def _resume(self, record: Record, arrays: dict[str, PyTree]) -> None:
        for runner in self.runners:
            runner.states = arrays[runner.name]
            runner.seconds = record[runner.name]["seconds"]
            runner.curve = [
                {field: np.array(values, np.float32) for field, values in point.items()}
                for point in record[runner.name]["curve"]
            ]


def _variables(runner: Runner) -> dict[str, PyTree]:
    """What all networks of a method are applied with, an axis of seeds in front of every leaf."""
    return _joined(jax.device_get(runner.variables))


def _joined(groups: Sequence[Mapping[str, PyTree]]) -> dict[str, PyTree]:
    """Concatenates the arrays of all groups of seeds, by name."""
    return {
        name: jax.tree.map(lambda *leaves: np.concatenate(leaves), *(g[name] for g in groups))
        for name in groups[0]
    }


def relative_cost(runner: Runner, reference: Runner) -> float:
    """The median over rounds of the ratio of a step's times; the first round warms up."""
    pairs = zip(runner.seconds, reference.seconds, strict=False)
    ratios = [(a / runner.steps) / (b / reference.steps) for a, b in pairs]
    return float(np.median(ratios[1:] or ratios))
