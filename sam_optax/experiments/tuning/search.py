"""Trains every method at several values on part of the training set, and tests it on the rest."""

import dataclasses
import functools
import itertools
import json
import math

import msgspec
import numpy as np
from jax.sharding import Mesh

from sam_optax.experiments.data.examples import hold_out
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.options.options import Compare
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import describing, to_json
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.training import identity
from sam_optax.experiments.training.task import Entry, Task, noisy_labels
from sam_optax.experiments.training.train import Training, work
from sam_optax.experiments.tuning import choice
from sam_optax.experiments.tuning.choice import Axis, Trial
from sam_optax.experiments.types import Json, Record

FILE = "tune.json"
"""The trials of an unfinished run, in the directory of --out."""
SEEDS = 2
TRIALS, TRIALS_WITH_LR = 17, 40
"""How many trials each method gets by default: the coarse points, and a round around the best."""
RADIUS, DECAY, RATE = 2.0, 3.0, 2.0
"""Ratios of neighbouring radii, weight decays and learning rates."""
_FAR = 2**30
"""Flips a bit of the seeds, so that none is a seed of the comparison."""


def held_out(task: Task) -> Task:
    """The task of the search: a fifth of the training examples, class by class, are its test.

    Their labels are as noisy as those of training: nobody with wrong labels has clean ones.

    Raises:
      UserError: the examples are too few.
    """
    dataset = task.dataset
    train, rest = hold_out(dataset.train)
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


def axes(entry: Entry, rate: bool) -> list[Axis]:
    """What a search chooses for a method: radius, weight decay, with ``rate`` the learning rate."""
    recipe, values = entry.recipe, entry.variant.hyperparameters
    found = [Axis({name: values[name] for name in entry.variant.method.radius}, RADIUS)]
    if entry.variant.method.decays and recipe.weight_decay:
        found.append(Axis({"weight_decay": recipe.weight_decay}, DECAY))
    if rate:
        found.append(Axis({"lr": recipe.lr}, RATE))
    return [axis for axis in found if axis.start]  # SGD has no radius


class Kept(msgspec.Struct):
    """The content of ``tune.json``: the run that it is of, and the trials of each method."""

    identity: dict[str, object]
    trials: dict[str, list[Trial]] = {}


def run(task: Task, mesh: Mesh, options: Compare, kept: Kept, console: Console) -> Record:
    """What is chosen for each method of a :func:`held_out` task, with all its trials.

    Those of an earlier process are ``kept``; further ones are added there.
    """
    along = {name: axes(entry, options.tune_lr) for name, entry in task.entries.items()}
    count = options.trials or (TRIALS_WITH_LR if options.tune_lr else TRIALS)
    costs, left = work(task), dict[str, tuple[float, int]]()
    for name, of in along.items():  # where nothing is searched, one trial is enough
        missing = (count if of else 1) - len(kept.trials.setdefault(name, []))
        if missing > 0:
            left[name] = math.prod(costs[name]), missing
    if left:
        with Progress(console, left) as progress:
            _train(Training(task, mesh), along, left, options, kept, progress)
    found = {}
    for name, entry in task.entries.items():
        starts = {k: v for axis in along[name] for k, v in axis.start.items()}
        method = entry.variant.method
        around = {f"{method.name}.{k}" if k in method.radius else k: v for k, v in starts.items()}
        chosen = choice.choose(kept.trials[name], task.metric.higher_is_better)
        found[name] = {"around": around, "seeds": list(task.seeds), **chosen}
    return found


def _train(
    training: Training, along: Json, left: Json, options: Compare, kept: Kept, progress: Progress
) -> None:
    task, chance = training.task, 0.0
    if task.metric.of is None:  # the accuracy of the most frequent class among the held-out labels
        labels = noisy_labels(task, task.seeds, held_out=True)
        chance = float(np.mean([np.bincount(of).max() / len(of) for of in labels]))
    for runner in (runner for runner in training.runners if runner.name in left):
        trials, own = kept.trials[runner.name], along[runner.name]
        count = len(trials) + left[runner.name][1]
        tick = functools.partial(progress.done, runner.name)
        points = choice.points(trials, len(own), task.metric.higher_is_better)
        for point in itertools.islice(points, left[runner.name][1]):
            progress.show(f"tuning {runner.name}, trial {len(trials) + 1} of {count}")
            values = choice.values(own, point)
            curves = training.trial(runner, values, tick)
            trials.append(choice.trial(point, values, curves, task.metric, chance))
            if options.out:
                output.write(options.out, {FILE: to_json(msgspec.to_builtins(kept))})


def load(options: Compare, run: Record) -> Kept:
    """The trials of a run that an earlier process has made; without --resume its file goes.

    Raises:
      UserError: the file is damaged or not ours, or belongs to another run.
    """
    path = options.out / FILE if options.out else None
    if path is None or not path.exists():
        return Kept(run)
    try:
        found = msgspec.convert(json.loads(path.read_bytes()), Kept)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--tune: {path} is damaged, or of another program ({error}). Remove it to start "
            "the search again, or choose another --out."
        ) from error
    if not options.resume:
        path.unlink()
        return Kept(run)
    with describing(path):
        identity.check(found.identity, run, f"{path} is of")
    return found


def settled(description: Json, found: Json) -> Record:
    """The description of a run with what was chosen for its methods, and the whole search."""
    methods = []
    for row in description["methods"]:
        tune = found[row["name"]]
        method = {**row, "tune": tune}
        method |= {of: {**row[of]} for of in ("hyperparameters", "sources", "settings")}
        pairs = zip(tune["chosen"].items(), tune["around"].items(), strict=True)
        for (name, value), (option, start) in pairs:
            source = f"chosen by --tune, around {plain(start)}"
            if option != name:  # METHOD.HYPERPARAMETER
                method["hyperparameters"][name], method["sources"][name] = value, source
            else:  # in the place of the shared setting
                method["settings"][name] = {"value": value, "source": source}
        methods.append(method)
    return {**description, "methods": methods, "notes": [*description["notes"], *notes(found)]}


def notes(found: Json) -> list[str]:
    """Where the best value may lie beyond what was tried, or none is good."""
    lines = []
    for name, of in found.items():
        if all(trial["broken_down"] for trial in of["trials"]):
            lines.append(
                f"{name}: training breaks down at every value that --tune tries; use a smaller "
                "--lr, or more epochs."
            )
        elif of["at_bound"]:
            pairs = zip(of["around"], of["chosen"].values(), strict=True)
            given = " ".join(f"{flag(option)} {plain(value)}" for option, value in pairs)
            lines.append(
                f"{name}: not all neighbours of the best values were tried. Search around them "
                f"({given}), or give more --trials."
            )
    return lines
