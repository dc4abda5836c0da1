"""Trains several methods from several seeds, all in lockstep.

The methods take turns, epoch by epoch, so that their times are measured interleaved: what else the
machine does meanwhile falls on all of them alike, and the time left is known from the first round
on.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax import StepInfo
from sam_optax.experiments.networks.small import CNN, MLP
from sam_optax.experiments.training import snapshots
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.evaluation import Evaluation
from sam_optax.experiments.training.program import Program, over_seeds
from sam_optax.experiments.training.runner import Runner
from sam_optax.experiments.training.snapshots import Checkpointer
from sam_optax.experiments.training.task import Entry, Task, keys
from sam_optax.experiments.training.work import (
    REFERENCE,
    REFERENCE_ROUNDS,
    TIMED,
    Listener,
    Recorder,
    reference,
    work,
)

_SMALL = 2**24
"""Params of all seeds together up to which an accelerator trains them at once."""


@dataclasses.dataclass
class Outcome:
    """What became of one method; the last axis of the arrays is the seed.

    Attributes:
      entry: the method, as it was trained.
      variables: of the trained networks, a leading seed axis on every leaf.
      curves: after each epoch, (epochs, seeds): ``train_loss`` in nats, ``test_accuracy`` in
        [0, 1], and where steps were watched the numbers of :class:`sam_optax.StepInfo` (NaN if
        not known).
      sharpness: nats, (seeds,).
      seconds: of each timed epoch of all seeds, training steps alone.
      compile_seconds: of the training steps.
      cost: step cost relative to the reference, the median over rounds; NaN without one.
    """

    entry: Entry
    variables: Any
    curves: dict[str, np.ndarray]
    sharpness: np.ndarray
    seconds: list[float]
    compile_seconds: float
    cost: float


class Training:
    """Runners of all methods and seeds, and what they share.

    Args:
      task: what is trained.
      place: the devices.
      timed: whether the reference is trained for its time if it is not among the methods.
      watch: whether a step after every epoch is looked at in numbers.
    """

    def __init__(self, task: Task, place: Devices, timed: bool, watch: bool) -> None:
        self.task, self._place = task, place
        resident = isinstance(task.dataset.train.x, np.ndarray)
        self._watch = watch and resident
        example = jnp.zeros((1, *task.dataset.shape), jnp.float32)

        def init(key: jax.Array) -> Any:
            return task.model.init(key, example, train=False)

        shapes = jax.eval_shape(init, jax.random.key(0))
        size = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * len(task.seeds)
        if jax.default_backend() == "cpu":
            # What is inside of a loop runs on fewer threads there: several convolutions take up to
            # 16 times as long. Small networks gain more by one call for an epoch of all seeds.
            looped = isinstance(task.model, MLP | CNN)
            mapped = resident and looped
        else:
            looped, mapped = True, resident and size <= _SMALL
        groups = [task.seeds] if mapped else [(seed,) for seed in task.seeds]
        count = len(groups[0])
        x = place.put(task.dataset.train.x) if resident else None
        chosen = dict(task.entries)
        if timed and (entry := reference(task)):
            chosen[TIMED] = entry
        self.runners = []
        for name, entry in chosen.items():
            program = Program(task, entry, count, place, looped)
            self.runners += [
                Runner(name, task, entry, seeds, program, x, place) for seeds in groups
            ]
        self.evaluation = Evaluation(task, count, place)
        initial = jax.jit(over_seeds(init, count))
        for seeds in groups:
            variables = place.put(initial(keys(seeds, 0)))
            for runner in self.runners:
                if runner.seeds == seeds:
                    runner.start(variables)
        self.curves: dict[tuple[str, int], list[dict[str, np.ndarray]]] = {
            (runner.name, runner.seeds[0]): [] for runner in self.runners
        }

    def compile(self, listener: Listener) -> None:
        """Compiles everything, before anything is timed."""
        first = self.runners[0]
        programs: dict[str, Callable[[], None]] = {}
        for runner in self.runners:
            watch = self._watch and runner.name in self.task.entries
            programs.setdefault(runner.name, lambda r=runner, w=watch: r.compile(w))  # type: ignore[misc]
        programs["evaluation"] = lambda: self.evaluation.warm_up(first.variables, first.seeds)
        for number, (what, compile_program) in enumerate(programs.items(), 1):
            listener.compiling(what, number, len(programs))
            compile_program()

    def run_epoch(self, epoch: int, listener: Listener, recorder: Recorder | None) -> None:
        """Takes every runner through an epoch (from 0) and measures it."""
        turn = epoch % len(self.runners)  # no method always comes first
        for runner in self.runners[turn:] + self.runners[:turn]:
            kept = runner.name in self.task.entries
            curve = self.curves[runner.name, runner.seeds[0]]
            rounds = runner.entry.recipe.epochs if kept else REFERENCE_ROUNDS
            if epoch >= rounds or (curve and np.isnan(curve[-1]["train_loss"]).all()):
                continue
            share = len(runner.seeds) / len(self.task.seeds)

            def tick(seconds: float, part: float, r: Runner = runner, s: float = share) -> None:
                listener.done(r.name, seconds, part * s)

            runner.run_epoch(epoch, tick)
            if not kept:
                continue
            point = {
                **self.evaluation.after_epoch(runner.variables, runner.seeds),
                **(runner.look(epoch) if self._watch else {}),
            }
            curve.append(point)
            for i, seed in enumerate(runner.seeds if recorder else ()):
                assert recorder is not None
                numbers = {name: float(values[i]) for name, values in point.items()}
                recorder.add(runner.name, seed, epoch + 1, numbers)

    def outcome(self, name: str, listener: Listener) -> Outcome:
        """What became of a method."""
        runners = [runner for runner in self.runners if runner.name == name]
        entry, start = self.task.entries[name], time.perf_counter()
        rises = [self.evaluation.sharpness(r.variables, r.seeds) for r in runners]
        listener.done("sharpness", time.perf_counter() - start)
        fields = "train_loss", "test_accuracy", *StepInfo._fields
        curves = [self.curves[name, runner.seeds[0]] for runner in runners]
        compared = [other for other in self.runners if other.entry.method == REFERENCE]
        return Outcome(
            entry=entry,
            variables=jax.tree.map(
                lambda *leaves: np.concatenate(leaves),
                *[jax.device_get(runner.variables) for runner in runners],
            ),
            curves={
                field: np.concatenate(
                    [_curve(c, field, entry, r) for c, r in zip(curves, runners, strict=True)], 1
                )
                for field in fields
                if field in curves[0][0]
            },
            sharpness=np.concatenate(rises),
            seconds=[sum(times) for times in zip(*(r.seconds for r in runners), strict=False)],
            compile_seconds=runners[0].compile_seconds,
            cost=relative_cost(runners, compared[: len(runners)]),
        )


def _curve(points: list[Any], field: str, entry: Entry, runner: Runner) -> np.ndarray:
    """(epochs, seeds); what was not trained after all seeds had diverged is NaN."""
    found = np.stack([point[field] for point in points])
    missing = entry.recipe.epochs - len(found)
    return np.concatenate([found, np.full((missing, len(runner.seeds)), np.nan, np.float32)])


def train(
    training: Training,
    listener: Listener,
    checkpoints: Checkpointer | None = None,
    recorder: Recorder | None = None,
) -> dict[str, Outcome]:
    """Trains every method from every seed.

    Args:
      training: what is trained.
      listener: is told of every piece of work.
      checkpoints: keeps snapshots; the training begins with the one that it has, if any.
      recorder: is told what is measured.

    Returns:
      The outcome of each method.
    """
    task = training.task
    every, first = (checkpoints.every, checkpoints.epoch) if checkpoints else (0, 0)
    training.compile(listener)
    if checkpoints and first:
        pieces = work(task, first, every, any(r.name not in task.entries for r in training.runners))
        listener.resumed({kind: count for kind, (_, count) in pieces.items()})
        snapshots.put(checkpoints.restore(snapshots.arrays(training)), training)
    for epoch in range(first, max(entry.recipe.epochs for entry in task.entries.values())):
        training.run_epoch(epoch, listener, recorder)
        if checkpoints and every and (epoch + 1) % every == 0:
            start = time.perf_counter()
            checkpoints.save(snapshots.take(epoch + 1, training))
            listener.done("checkpoint", time.perf_counter() - start)
    return {name: training.outcome(name, listener) for name in task.entries}


def relative_cost(runners: Sequence[Runner], references: Sequence[Runner]) -> float:
    """The median over rounds of the ratio of a step's times; the first round warms up."""
    ratios: list[float] = []
    for a, b in zip(runners, references, strict=False):
        found = [(x / a.steps) / (y / b.steps) for x, y in zip(a.seconds, b.seconds, strict=False)]
        ratios += found[1:] or found
    return float(np.median(ratios)) if ratios else float("nan")
