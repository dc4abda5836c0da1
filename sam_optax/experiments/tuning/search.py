"""Trains every method at several values on part of the training set, and tests it on the rest."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from sam_optax.experiments.data.builtin import hold_out
from sam_optax.experiments.data.images import Examples
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.schema import Search, checked
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.training import identity, work
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.runner import Runner
from sam_optax.experiments.training.task import Entry, Task, noisy_labels
from sam_optax.experiments.training.train import Training, in_one_call
from sam_optax.experiments.tuning import choice
from sam_optax.experiments.tuning.choice import Trial
from sam_optax.experiments.types import Json, Record

FILE = "tune.json"
"""The trials of an unfinished run, in the directory of --out."""
SEEDS = 2
_FAR = 2**30
"""Flips a bit of the seeds, so that none is a seed of the comparison."""


def held_out(task: Task) -> Task:
    """The task of the search: a fifth of the training examples, class by class, are its test.

    (Of text it is the last fifth; where a class has one example, any fifth.) Their labels are as
    noisy as those of training: nobody with wrong labels has clean ones.

    Raises:
      UserError: the examples stay on disk, or are too few.
    """
    dataset = task.dataset
    if not dataset.resident:
        raise UserError(
            f"--tune: needs all examples in memory, and those of {dataset.name} stay on disk; "
            "leave it out, and give a radius, such as --sam.rho 0.05."
        )
    try:
        train, rest, *_ = (_last_fifth if dataset.text else hold_out)(dataset.train)
    except ValueError:  # a class has one example
        order = np.random.default_rng(0).permutation(len(dataset.train.y))
        train, rest = _last_fifth(dataset.train.some(order))
    batch = max(entry.recipe.batch_size for entry in task.entries.values())
    if batch > len(train.y):
        raise UserError(
            f"--tune: leaves {len(train.y)} of {len(dataset.train.y)} examples to train on, fewer "
            f"than a batch of {batch}; use a smaller --batch-size, or leave it out."
        )
    return dataclasses.replace(
        task,
        dataset=dataclasses.replace(dataset, train=train, test=rest),
        seeds=tuple((task.seeds[0] + i) % 2**31 ^ _FAR for i in range(SEEDS)),
        held_out=True,
    )


def _last_fifth(examples: Examples) -> tuple[Examples, Examples]:
    first, last = np.split(np.arange(n := len(examples.y)), [n - max(1, n // 5)])
    return examples.some(first), examples.some(last)


def search(
    task: Task,
    place: Devices,
    trials: dict[str, list[Trial]],
    keep: Callable[[], None],
    console: Console,
) -> Record:
    """What is chosen for each method of a :func:`held_out` task, with all trials.

    Args:
      task: the task.
      place: the devices.
      trials: those of an earlier process by method, to which the others are added.
      keep: called after each addition.
      console: for the progress.
    """
    for name in task.entries:
        trials.setdefault(name, [])
    todo = {name: len(_missing(entry, trials[name])) for name, entry in task.entries.items()}
    if any(todo.values()):
        costs = work.work(task)
        pieces = {name: (math.prod(costs[name]), count) for name, count in todo.items()}
        with Progress(console, pieces, "tuning") as progress:
            _train(task, place, trials, keep, progress)
    found = {}
    for name, entry in task.entries.items():
        prefix = f"{entry.method}." if entry.variant.method.radius else ""
        around = {prefix + option: value for option, value in entry.tuned.items()}
        chosen = choice.choose(trials[name])
        found[name] = {"around": around, "seeds": list(task.seeds), **chosen}
    return found


def _train(
    task: Task,
    place: Devices,
    trials: dict[str, list[Trial]],
    keep: Callable[[], None],
    progress: Progress,
) -> None:
    seeds = len(task.seeds)
    wide = dataclasses.replace(task, seeds=task.seeds * (2 * choice.START + 1))
    # Small networks do not fill an accelerator: it trains several values together. A CPU would gain
    # nothing.
    if jax.default_backend() != "cpu" and in_one_call(wide)[1]:
        task = wide
    together = len(task.seeds) // seeds
    labels = noisy_labels(task, task.seeds[:seeds], held_out=True)
    chance = np.mean([np.bincount(y := of[of >= 0]).max() / len(y) for of in labels])
    training = Training(task, place, timed=False, watch=False)

    def train(runner: Runner, some: list[int]) -> Iterator[Trial]:
        values = [_values(runner.entry, exponent) for exponent in some]
        lanes = values + values[-1:] * (together - len(some))  # those left over repeat the last
        curves = training.trial(
            runner,
            {k: np.repeat([np.float32(lane[k]) for lane in lanes], seeds) for k in values[0]},
            lambda seconds, share: progress.done(runner.name, seconds, share * len(some)),
        )
        for i, exponent in enumerate(some):
            own = {name: of[:, i * seeds : (i + 1) * seeds] for name, of in curves.items()}
            yield choice.trial(exponent, values[i], own, chance)

    for number, runner in enumerate(training.runners, 1):
        found = trials[runner.name]
        while exponents := _missing(runner.entry, found):
            if runner.program is None:
                progress.compiling(runner.name, number, len(training.runners))
            else:  # more than was announced
                progress.more(runner.name, len(exponents))
            for first in range(0, len(exponents), together):
                found += train(runner, exponents[first : first + together])
                keep()


def _missing(entry: Entry, trials: list[Trial]) -> list[int]:
    if all(value == 0 for value in entry.tuned.values()):  # no weight decay
        return choice.missing(trials, 0, 0)
    return choice.missing(trials)


def _values(entry: Entry, exponent: int) -> dict[str, float]:
    """The values of a trial, as short as they are printed."""
    factor = choice.FACTOR if entry.variant.method.radius else choice.DECAY_FACTOR
    scaled = {option: value * factor**exponent for option, value in entry.tuned.items()}
    return {option: float(f"{x:.3g}") for option, x in scaled.items()} if exponent else scaled


def load(path: Path, run: Json) -> dict[str, list[Trial]]:
    """The trials of an earlier process, by method; none without a file of them.

    Raises:
      UserError: they belong to another run, or the file is not what it should be.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    checked(path, found, Search)
    remedy = "Give the same ones, choose another --out, or remove the file to start again."
    identity.check(found["identity"], run, f"{path} is of", remedy)
    return found["trials"]


def settled(description: Json, found: Json) -> Record:
    """The description of a run with what was chosen for its methods, and the whole search."""
    methods = []
    for method in description["methods"]:
        tune = found[method["name"]]
        around = ", ".join(plain(value) for value in tune["around"].values())
        told = dict.fromkeys(tune["chosen"], f"chosen by --tune, around {around}")
        if METHODS[method["method"]].radius:
            own = {
                "hyperparameters": method["hyperparameters"] | tune["chosen"],
                "sources": method["sources"] | told,
            }
        else:  # in the place of the shared one
            settings = {k: {"value": v, "source": told[k]} for k, v in tune["chosen"].items()}
            own = {"settings": method["settings"] | settings}
        methods.append({**method, **own, "tune": tune})
    return {**description, "methods": methods, "notes": [*description["notes"], *notes(found)]}


def notes(found: Json) -> list[str]:
    """Where the best value is the last that was tried, or none is good."""
    lines = []
    for name, of in found.items():
        if all(found["broken_down"] for found in of["trials"]):
            lines.append(
                f"{name}: training breaks down at every value that --tune tries; use a smaller "
                "--lr, or more epochs."
            )
        elif of["at_bound"]:
            pairs = zip(of["around"], of["chosen"].values(), strict=True)
            given = " ".join(f"{flag(option)} {plain(value)}" for option, value in pairs)
            lines.append(
                f"{name}: the best value is the last that --tune tries. Search around it: {given}."
            )
    return lines
