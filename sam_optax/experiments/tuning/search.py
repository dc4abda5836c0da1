"""Trains every method at several values on part of the training set, and tests it on the rest."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from sam_optax.experiments.data.builtin import hold_out
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.training import identity, work
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.runner import Runner
from sam_optax.experiments.training.task import Entry, Task, noisy_labels
from sam_optax.experiments.training.train import Training, in_one_call
from sam_optax.experiments.tuning import choice
from sam_optax.experiments.tuning.choice import Axis, Point, Trial
from sam_optax.experiments.types import Json, Record

FILE = "tune.json"
"""The trials of an unfinished run, in the directory of --out."""
SEEDS = 2
TRIALS, TRIALS_WITH_LR = 17, 40
"""How many trials each method gets by default: the coarse points, and a round around the best."""
LANES = 9
"""How many values an accelerator trains together."""
RADIUS, DECAY, RATE = 2.0, 3.0, 2.0
"""Ratios of neighbouring radii, weight decays and learning rates."""
_FAR = 2**30
"""Flips a bit of the seeds, so that none is a seed of the comparison."""


def held_out(task: Task) -> Task:
    """The task of the search: a fifth of the training examples, class by class, are its test.

    (Any fifth, where a class has one example or there are none.) Their labels are as noisy as those
    of training: nobody with wrong labels has clean ones.

    Raises:
      UserError: the examples stay on disk, or are too few.
    """
    dataset = task.dataset
    if not dataset.resident:
        raise UserError(
            f"--tune: needs all examples in memory, and those of {dataset.name} stay on disk; "
            "leave it out, and give radii, such as --sam.rho 0.05."
        )
    train, rest, *_ = hold_out(dataset.train, by_class=False)
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


@dataclasses.dataclass(frozen=True)
class Search:
    """A search: a :func:`held_out` task, and how many trials each method gets.

    ``trials`` are those made so far, by method; with ``rate`` the learning rate is chosen, too.
    """

    task: Task
    place: Devices
    count: int
    rate: bool
    trials: dict[str, list[Trial]]

    def axes(self, entry: Entry) -> list[Axis]:
        """What a search chooses for a method: the radius, the weight decay, the learning rate."""
        method, recipe, found = entry.variant.method, entry.recipe, []
        if method.radius:
            start = {name: entry.variant.hyperparameters[name] for name in method.radius}
            found.append(Axis(start, RADIUS))
        if method.decays and recipe.weight_decay:
            found.append(Axis({"weight_decay": recipe.weight_decay}, DECAY))
        if self.rate:
            found.append(Axis({"lr": recipe.lr}, RATE))
        return found

    def run(self, keep: Callable[[], None], console: Console) -> Record:
        """What is chosen for each method, with all trials; ``keep`` is called after each one."""
        for name in self.task.entries:
            self.trials.setdefault(name, [])
        todo = {
            name: self.count - len(self.trials[name])
            for name, entry in self.task.entries.items()
            if self._missing(name, entry)
        }
        if todo:
            costs = work.work(self.task)
            pieces = {name: (math.prod(costs[name]), count) for name, count in todo.items()}
            with Progress(console, pieces, "tuning") as progress:
                self._train(keep, progress)
        higher = self.task.metric.higher_is_better
        return {
            name: {
                "around": self._around(entry),
                "seeds": list(self.task.seeds),
                **choice.choose(self.trials[name], higher),
            }
            for name, entry in self.task.entries.items()
        }

    def _around(self, entry: Entry) -> Record:
        """Where the search starts, with names as on the command line."""
        own, radius = f"{entry.method}.", entry.variant.method.radius
        starts = (pair for axis in self.axes(entry) for pair in axis.start.items())
        return {own * (name in radius) + name: value for name, value in starts}

    def _missing(self, name: str, entry: Entry) -> list[Point]:
        axes, higher = len(self.axes(entry)), self.task.metric.higher_is_better
        return choice.missing(self.trials[name], axes, self.count, higher)

    def _train(self, keep: Callable[[], None], progress: Progress) -> None:
        task, seeds = self.task, len(self.task.seeds)
        wide = dataclasses.replace(task, seeds=task.seeds * LANES)
        # Small networks do not fill an accelerator: it trains several values together. A CPU would
        # gain nothing.
        if jax.default_backend() != "cpu" and in_one_call(wide)[1]:
            task = wide
        training = Training(task, self.place, timed=False, watch=False)
        together, chance = len(task.seeds) // seeds, self._chance()
        for number, runner in enumerate(training.runners, 1):
            while points := self._missing(runner.name, runner.entry):
                if runner.program is None:
                    progress.compiling(runner.name, number, len(training.runners))
                for first in range(0, len(points), together):
                    some = points[first : first + together]
                    curves = self._curves(training, runner, some, together, progress)
                    for point, (values, own) in zip(some, curves, strict=True):
                        made = choice.trial(point, values, own, task.metric, chance)
                        self.trials[runner.name].append(made)
                    keep()

    def _chance(self) -> float:
        """The accuracy of the most frequent class among the held-out labels."""
        if self.task.metric.of is not None:
            return 0.0
        labels = noisy_labels(self.task, self.task.seeds, held_out=True)
        return float(np.mean([np.bincount(y := of[of >= 0]).max() / len(y) for of in labels]))

    def _curves(
        self,
        training: Training,
        runner: Runner,
        points: list[Point],
        together: int,
        progress: Progress,
    ) -> list[tuple[dict[str, float], dict[str, np.ndarray]]]:
        """The values at some points, and the curves of a training with each of them."""
        seeds, axes = len(self.task.seeds), self.axes(runner.entry)
        values = [choice.values(axes, point) for point in points]
        lanes = values + values[-1:] * (together - len(points))  # those left over repeat the last
        curves = training.trial(
            runner,
            {k: np.repeat([np.float32(lane[k]) for lane in lanes], seeds) for k in values[0]},
            lambda seconds, share: progress.done(runner.name, seconds, share * len(points)),
        )
        return [
            (own, {name: of[:, i * seeds : (i + 1) * seeds] for name, of in curves.items()})
            for i, own in enumerate(values)
        ]


def marked(content: Json) -> Record:
    """The content of ``tune.json`` with its digest: what has none is not ours."""
    return {**content, "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest()}


def load(path: Path, run: Json, resume: bool) -> dict[str, list[Trial]]:
    """The trials of an earlier process, by method; none without a file of them or ``resume``.

    Raises:
      UserError: the file is damaged or not ours, or belongs to another run.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        content = dict(found) if isinstance(found, dict) else {}
        content.pop("sha256", None)
        if found != marked(content):
            raise ValueError("its field sha256 is missing, or does not match the others")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"--tune: {path} is damaged, or of another program ({error}). Remove it to start "
            "the search again, or choose another --out."
        ) from error
    if not resume:
        return {}
    identity.check(found["identity"], run, f"{path} is of")
    return found["trials"]


def settled(description: Json, found: Json) -> Record:
    """The description of a run with what was chosen for its methods, and the whole search."""
    methods = []
    for method in description["methods"]:
        tune, radius = found[method["name"]], METHODS[method["method"]].radius
        told = {
            option: f"chosen by --tune, around {plain(start)}"
            for option, start in zip(tune["chosen"], tune["around"].values(), strict=True)
        }
        own = {name: value for name, value in tune["chosen"].items() if name in radius}
        settings = {
            name: {"value": value, "source": told[name]}
            for name, value in tune["chosen"].items()
            if name not in radius
        }
        methods.append(
            method
            | {
                "hyperparameters": method["hyperparameters"] | own,
                "sources": method["sources"] | {name: told[name] for name in own},
                "settings": method["settings"] | settings,  # in the place of the shared ones
                "tune": tune,
            }
        )
    return {**description, "methods": methods, "notes": [*description["notes"], *notes(found)]}


def notes(found: Json) -> list[str]:
    """Where the best value may lie beyond what was tried, or none is good."""
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
                f"{name}: not all neighbours of the best values were tried. Search around them "
                f"({given}), or give more --trials."
            )
    return lines
