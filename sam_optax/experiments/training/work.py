"""The amount of work of a run, for estimating the remaining time."""

from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.training.task import Entry, Task

REFERENCE = "sgd"
REFERENCE_ROUNDS = 10
"""Rounds in which the reference is timed if it is not among the compared methods."""
TIMED = f"{REFERENCE} for reference"


def reference(task: Task) -> dict[str, Entry]:
    """The reference method for step costs, by name; empty if it is among the methods."""
    first = next(iter(task.entries.values()))
    if any(entry.method == REFERENCE for entry in task.entries.values()):
        return {}
    return {TIMED: Entry(REFERENCE, METHODS[REFERENCE].variant(), first.recipe)}


def work(
    task: Task, until: int | None = None, checkpoint_every: int = 0, timed: bool = False
) -> dict[str, tuple[float, int]]:
    """The pieces of work: kind -> (cost in gradients of an epoch, number of pieces).

    They cover the whole run, or all epochs up to one; with ``timed``, also the reference.
    """
    test, train = len(task.dataset.test.y), len(task.dataset.train.y)
    evaluation = (1 + test / train) / 3
    pieces = {}
    for name, entry in task.entries.items():
        epochs = entry.recipe.epochs if until is None else min(until, entry.recipe.epochs)
        gradients = entry.variant.gradients(train / entry.recipe.batch_size)
        pieces[name] = gradients + evaluation, epochs
    longest = max(count for _, count in pieces.values())
    if timed and reference(task):
        pieces[TIMED] = (1.0, min(longest, REFERENCE_ROUNDS))
    if checkpoint_every:
        pieces["checkpoint"] = (0.1, longest // checkpoint_every)
    if until is None:
        pieces["sharpness"] = (5 / 3, len(task.entries))
    return pieces
