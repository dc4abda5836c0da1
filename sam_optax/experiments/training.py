"""Trains several methods from several seeds, all in lockstep.

One compiled call takes all seeds of one method through one epoch. The methods take turns, epoch
by epoch, so that their times are measured interleaved: what else the machine does meanwhile falls
on all of them alike, and the time left is known from the first round on.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax import StepInfo
from sam_optax.experiments import evaluation, snapshots
from sam_optax.experiments.evaluation import Blocks
from sam_optax.experiments.family import METHODS
from sam_optax.experiments.methods import Variant
from sam_optax.experiments.runner import Runner, over_seeds
from sam_optax.experiments.snapshots import Checkpointer
from sam_optax.experiments.task import Task, batch_indices, corrupted_labels, keys

REFERENCE = "sgd"
REFERENCE_ROUNDS = 10
"""Rounds in which the reference is timed if it is not among the methods that are compared."""


@dataclasses.dataclass
class Outcome:
    """What became of one method; the last axis of the arrays is the seed.

    Attributes:
      hyperparameters: those trained with.
      params: final params, a leading seed axis on every leaf.
      train_loss: nats, on the labels trained on, (epochs, seeds).
      test_accuracy: in [0, 1], (epochs, seeds).
      sharpness: nats, (seeds,).
      watched: of a step on a batch after each epoch, the numbers of :class:`sam_optax.StepInfo`,
        (epochs, seeds) each; a rise of the loss that is not known is NaN; empty where nothing was
        watched.
      seconds: of each timed epoch of all seeds, training steps alone.
      cost: step cost relative to the reference, the median over rounds.
    """

    hyperparameters: dict[str, float]
    params: Any
    train_loss: np.ndarray
    test_accuracy: np.ndarray
    sharpness: np.ndarray
    watched: dict[str, np.ndarray]
    seconds: list[float]
    cost: float


class Listener(Protocol):
    """Is told how the training proceeds."""

    def compiling(self, what: str, number: int, count: int) -> None:
        """Program ``number`` of ``count`` (from 1) is being compiled."""

    def resumed(self, pieces: Mapping[str, int]) -> None:
        """So many pieces of each kind were done by an earlier process."""

    def done(self, kind: str, seconds: float) -> None:
        """A piece of work of :func:`work` is done."""


def work(
    task: Task, chosen: Mapping[str, Variant], checkpoint_every: int = 0
) -> dict[str, tuple[float, int]]:
    """The pieces of work to come: kind -> (cost in gradients of an epoch, number of pieces)."""
    evaluation_cost = (1 + len(task.dataset.x_test) / len(task.dataset.x_train)) / 3
    pieces = {
        name: (variant.method.gradients + evaluation_cost, task.epochs)
        for name, variant in chosen.items()
    }
    if REFERENCE not in chosen:
        pieces[f"{REFERENCE} for reference"] = (1.0, min(task.epochs, REFERENCE_ROUNDS))
    if checkpoint_every:
        pieces["checkpoint"] = (0.1, task.epochs // checkpoint_every)
    return {**pieces, "sharpness": (5 / 3, len(chosen))}


def work_of_epochs(
    epochs: int, task: Task, chosen: Mapping[str, Variant], checkpoint_every: int = 0
) -> dict[str, int]:
    """The pieces of :func:`work` that are done after so many epochs: kind -> number."""
    whole = dataclasses.replace(task, epochs=epochs)
    pieces = work(whole, chosen, checkpoint_every)
    return {kind: count for kind, (_, count) in pieces.items() if kind != "sharpness"}


def train(
    task: Task,
    chosen: Mapping[str, Variant],
    listener: Listener,
    checkpoints: Checkpointer | None = None,
    watch: bool = False,
) -> dict[str, Outcome]:
    """Trains every method from every seed.

    Args:
      task: what to train on.
      chosen: what to train, by name; the name ``REFERENCE`` is the base optimizer's.
      listener: is told of every piece of work.
      checkpoints: keeps snapshots; the training begins with the one that it has, if any.
      watch: whether a step after every epoch is looked at in numbers.

    Returns:
      The outcome of each method.
    """
    every, first_epoch = (checkpoints.every, checkpoints.epoch) if checkpoints else (0, 0)
    if first_epoch:
        listener.resumed(work_of_epochs(first_epoch, task, chosen, every))
    train_labels = corrupted_labels(task)
    x = jnp.asarray(task.dataset.x_train)
    labels = jnp.asarray(train_labels)
    train_set, test_set = jax.device_put(
        (
            evaluation.blocks(task.dataset.x_train, train_labels),
            evaluation.blocks(task.dataset.x_test, task.dataset.y_test),
        )
    )
    model = task.model
    initial = jax.jit(over_seeds(lambda key: model.init(key, x[:1])))(keys(task, 0))

    runners = {name: Runner(task, name, v, initial) for name, v in chosen.items()}
    reference = runners.get(REFERENCE) or Runner(
        task, REFERENCE, Variant(METHODS[REFERENCE], {}), initial
    )
    timed = [*runners.values()] + ([] if REFERENCE in runners else [reference])

    # The examples are arguments: as constants of the program they would be compiled into it.
    def evaluate(params: Any, train: Blocks, test: Blocks) -> dict[str, jax.Array]:
        return over_seeds(lambda p, y: evaluation.evaluate(model, p, train._replace(y=y), test))(
            params, train.y
        )

    def sharpness(params: Any, train: Blocks) -> jax.Array:
        return over_seeds(
            lambda p, y: evaluation.sharpness(model, p, train._replace(y=y), task.sharpness_rho)
        )(params, train.y)

    programs: list[tuple[str, Callable[[], Any]]] = [
        *((runner.name, lambda r=runner: r.compile(x, labels, watch)) for runner in timed),
        ("evaluation", lambda: jax.jit(evaluate).lower(initial, train_set, test_set).compile()),
        ("sharpness", lambda: jax.jit(sharpness).lower(initial, train_set).compile()),
    ]
    compiled = []
    for number, (what, compile_program) in enumerate(programs, 1):
        listener.compiling(what, number, len(programs))
        compiled.append(compile_program())
    evaluate_all, sharpness_all = compiled[-2:]

    curves: dict[str, list[Any]] = {name: [] for name in chosen}
    if checkpoints and first_epoch:
        snapshots.put(checkpoints.restore(snapshots.arrays(timed)), timed, curves)
    for epoch in range(first_epoch, task.epochs):
        indices, epoch_keys = batch_indices(task, epoch), keys(task, 2 + epoch)
        # No method always comes first.
        for runner in timed[epoch % len(timed) :] + timed[: epoch % len(timed)]:
            if runner.name not in chosen and epoch >= REFERENCE_ROUNDS:
                continue
            start = time.perf_counter()
            runner.run_epoch(x, labels, epoch_keys, indices)
            if runner.name in chosen:
                point = evaluate_all(runner.params, train_set, test_set)
                seen = runner.look(x, labels, epoch_keys, indices)
                curves[runner.name].append(jax.device_get({**point, **seen}))
            kind = runner.name if runner.name in chosen else f"{REFERENCE} for reference"
            listener.done(kind, time.perf_counter() - start)
        if checkpoints and every and (epoch + 1) % every == 0:
            start = time.perf_counter()
            checkpoints.save(snapshots.take(epoch + 1, timed, curves))
            listener.done("checkpoint", time.perf_counter() - start)

    outcomes = {}
    for name, runner in runners.items():
        start = time.perf_counter()
        rise = jax.device_get(sharpness_all(runner.params, train_set))
        listener.done("sharpness", time.perf_counter() - start)
        outcomes[name] = Outcome(
            hyperparameters=dict(chosen[name].hyperparameters),
            params=jax.device_get(runner.params),
            train_loss=np.stack([point["train_loss"] for point in curves[name]]),
            test_accuracy=np.stack([point["test_accuracy"] for point in curves[name]]),
            sharpness=rise,
            watched={
                field: np.stack([point[field] for point in curves[name]])
                for field in StepInfo._fields
                if field in curves[name][0]
            },
            seconds=runner.seconds,
            cost=relative_cost(runner.seconds, reference.seconds),
        )
    return outcomes


def relative_cost(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median over rounds of the ratio of times; the first round warms up if there are more."""
    ratios = [a / b for a, b in zip(seconds, reference, strict=False)]
    return float(np.median(ratios[1:] or ratios))
