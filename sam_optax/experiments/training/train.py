"""Trains several methods from several seeds in lockstep.

They take turns epoch by epoch, so that other load on the machine slows all of them alike.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from sam_optax.experiments.named import reported
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.training.checkpoints import Checkpoints
from sam_optax.experiments.training.devices import Source, over_seeds
from sam_optax.experiments.training.measures import Evaluation
from sam_optax.experiments.training.runner import Outcome, Runner
from sam_optax.experiments.training.task import OnEpoch, Task, initial_variables
from sam_optax.experiments.types import PyTree


class Training:
    """The runners of all methods, and the evaluation of their networks."""

    def __init__(self, task: Task, mesh: Mesh) -> None:
        self.task, self._source = task, Source(task, mesh)
        self.runners = [Runner(name, e, self._source) for name, e in task.entries.items()]
        self._evaluation = Evaluation(self._source)
        self._init = jax.jit(
            over_seeds(functools.partial(initial_variables, task), self._source.count)
        )
        variables = self._initial_variables()
        for runner in self.runners:
            runner.start(variables)

    def run(
        self,
        progress: Progress,
        checkpoints: Checkpoints | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> dict[str, Outcome]:
        """Trains every method from every seed, starting at the checkpoint if there is one."""
        self._compile(progress)
        every, first = (checkpoints.every, checkpoints.epoch) if checkpoints else (0, 0)
        if checkpoints and first:
            record, states = checkpoints.restore({r.name: r.states for r in self.runners})
            for runner in self.runners:
                runner.states, measured = states[runner.name], record[runner.name]
                runner.seconds, runner.curve = measured["seconds"], measured["curve"]
        epochs = max(r.entry.recipe.epochs for r in self.runners)
        for epoch in range(first, epochs):
            progress.show(f"training, epoch {epoch + 1} of {epochs}")
            turn = epoch % len(self.runners)  # so that no method always comes first
            for runner in self.runners[turn:] + self.runners[:turn]:
                self._run_epoch(runner, epoch, functools.partial(progress.done, runner.name))
            if on_epoch:
                trained = [r for r in self.runners if len(r.curve) > epoch]
                scores = copy.deepcopy({r.name: r.curve[epoch] for r in trained})
                with reported("on_epoch:"):
                    on_epoch(epoch + 1, scores, functools.partial(self._networks, trained))
            if checkpoints and every and (epoch + 1) % every == 0:
                record = {r.name: {"seconds": r.seconds, "curve": r.curve} for r in self.runners}
                checkpoints.save(epoch + 1, record, {r.name: r.states for r in self.runners})
        return {runner.name: self._outcome(runner, progress) for runner in self.runners}

    def trial(
        self, runner: Runner, values: Mapping[str, float], tick: Callable[[float], None]
    ) -> dict[str, np.ndarray]:
        """Trains a method anew, with values (see ``Entry.at``); returns the curves.

        All trials of a method share its program.
        """
        runner.start(self._initial_variables(), values)
        epochs = runner.entry.recipe.epochs
        for epoch in range(epochs):
            self._run_epoch(runner, epoch, lambda share: tick(share / epochs))
        return runner.curves

    def _initial_variables(self) -> list[PyTree]:
        made = []
        for seeds in self._source.groups:
            found = flatten_dict(self._init(np.array(seeds, np.int32)), sep="/")
            for path, value in self.task.initial.items():
                like = found[path]
                found[path] = jnp.broadcast_to(jnp.asarray(value, like.dtype), like.shape)
            made.append(unflatten_dict(found, sep="/"))
        return self._source.put(made)

    def _compile(self, progress: Progress) -> None:
        """Compiles all programs before anything is timed."""
        count = len(self.runners) + 1
        for number, runner in enumerate(self.runners, 1):
            progress.show(f"compiling {runner.name} ({number} of {count})")
            runner.compile()
        progress.show(f"compiling evaluation ({count} of {count})")
        self._evaluation.after_epoch(self.runners[0].variables[:1])

    def _run_epoch(self, runner: Runner, epoch: int, tick: Callable[[float], None]) -> None:
        if epoch >= runner.entry.recipe.epochs or runner.diverged:
            return
        runner.run_epoch(epoch, tick)
        found = self._evaluation.after_epoch(runner.variables)
        runner.curve.append({name: values.tolist() for name, values in found.items()})

    def _outcome(self, runner: Runner, progress: Progress) -> Outcome:
        progress.show("measuring sharpness")
        sharpness = self._evaluation.sharpness(runner.variables)
        progress.done("sharpness")
        references = [other for other in self.runners if other.entry.variant.method.name == "sgd"]
        return Outcome(
            variables=self._networks([runner])[runner.name],
            curves=runner.curves,
            sharpness=sharpness,
            seconds=runner.seconds,
            compile_seconds=runner.compile_seconds,
            cost=relative_cost(runner, references[0]) if references else float("nan"),
        )

    def _networks(self, runners: Sequence[Runner]) -> dict[str, dict[int, PyTree]]:
        """The variables of each seed's network, by method."""
        found: dict[str, dict[int, PyTree]] = {runner.name: {} for runner in runners}
        for runner in runners:
            of_groups = jax.device_get(runner.variables)
            for seeds, variables in zip(self._source.groups, of_groups, strict=True):
                for i, seed in enumerate(seeds):
                    found[runner.name][seed] = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
        return found


def work(task: Task, first: int = 0) -> dict[str, tuple[float, int]]:
    """The work from an epoch on: kind -> (cost in gradients of an epoch, number of pieces)."""
    test, train = len(task.dataset.test.y), len(task.dataset.train.y)
    evaluation = (1 + test / train) / 3
    pieces = {"sharpness": (5 / 3, len(task.entries))}
    for name, entry in task.entries.items():
        gradients = entry.variant.gradients(train / entry.recipe.batch_size)
        pieces[name] = gradients + evaluation, max(0, entry.recipe.epochs - first)
    return pieces


def relative_cost(runner: Runner, reference: Runner) -> float:
    """The median over rounds of the ratio of a step's times; the first round warms up."""
    pairs = zip(runner.seconds, reference.seconds, strict=False)
    ratios = [(a / runner.steps) / (b / reference.steps) for a, b in pairs]
    return float(np.median(ratios[1:] or ratios))
