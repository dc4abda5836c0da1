"""Which values a search tries, and which it chooses.

A search moves on a lattice: each axis, such as the radius, has the value where the search starts
times a power of the axis's factor, and a point is an exponent for each axis.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from sam_optax.experiments.reporting.results import number
from sam_optax.experiments.training.task import Metric
from sam_optax.experiments.types import Json, Record

Point: TypeAlias = tuple[int, ...]


class Axis(NamedTuple):
    """What moves together, with its values at exponent 0, and the ratio of neighbouring values."""

    start: Mapping[str, float]
    factor: float


class Trial(msgspec.Struct):
    """A method trained at one point, as it is in the results.

    It has broken down if a seed diverged or has no finite score, or if the mean accuracy is not
    better than that of the most frequent class.
    """

    exponents: Point
    values: dict[str, float]
    held_out: list[list[float | None]]  # scores, by seed, after each epoch
    broken_down: bool

    @property
    def curve(self) -> np.ndarray:
        """The mean held-out score of the seeds after each epoch."""
        return np.mean(np.array(self.held_out, float), axis=0)


def values(axes: Sequence[Axis], point: Point) -> dict[str, float]:
    """The values at a point, as short as they are printed."""
    found = {}
    for axis, exponent in zip(axes, point, strict=True):
        for name, start in axis.start.items():
            scaled = start * axis.factor**exponent
            found[name] = float(f"{scaled:.3g}") if exponent else start
    return found


def trial(
    point: Point, values: Json, curves: Mapping[str, np.ndarray], metric: Metric, chance: float
) -> Trial:
    """The record of a training; the curves are (epochs, seeds), and ``chance`` an accuracy."""
    scores = curves[metric.key]
    finite = np.isfinite([curves["train_loss"][-1], scores[-1]]).all()
    no_better = metric.of is None and scores[-1].mean() <= chance
    held_out = [[number(x) for x in curve] for curve in scores.T]
    return Trial(point, dict(values), held_out, bool(no_better or not finite))


def coarse(axes: int) -> list[Point]:
    """The first points: of one axis 5, of two 3×3, of three 15, two steps apart."""
    if axes == 1:
        return [(i,) for i in (-4, -2, 0, 2, 4)]
    grid = itertools.product((-2, 0, 2), repeat=axes)
    # Of three axes without the middles of the edges: they would be as many as all others.
    return [point for point in grid if axes < 3 or point.count(0) != 1]


def points(trials: Sequence[Trial], axes: int, higher: bool = True) -> Iterator[Point]:
    """The points to try, each after the trials of those before it have been added to ``trials``.

    First come the coarse ones; then, again and again, the neighbours of the best point that has
    some left, those along one axis before the diagonal ones. A search that was interrupted goes
    on: the points of its first trials are passed over.
    """
    planned: list[Point] = []
    following = coarse(axes)
    while following:
        planned += following
        yield from planned[len(trials) :]
        around = (neighbours(found.exponents) for found in ranked(trials[: len(planned)], higher))
        left = ([point for point in near if point not in planned] for near in around)
        following = next(filter(None, left), [])


def neighbours(point: Point) -> list[Point]:
    """The points next to one, those along one axis first."""
    steps = sorted(itertools.product((0, -1, 1), repeat=len(point)), key=np.count_nonzero)[1:]
    return [tuple(int(a + b) for a, b in zip(point, step, strict=True)) for step in steps]


def ranked(trials: Sequence[Trial], higher: bool = True) -> list[Trial]:
    """The best after the last epoch first; of equal ones, the nearest to where the search starts.

    What has broken down counts less than everything else.
    """
    sign = -1 if higher else 1

    def place(found: Trial) -> tuple[bool, float, int, Point]:
        score = 0.0 if found.broken_down else sign * round(float(found.curve[-1]), 6)
        return found.broken_down, score, sum(map(abs, found.exponents)), found.exponents

    return sorted(trials, key=place)


def choose(trials: Sequence[Trial], higher: bool = True) -> Record:
    """The trials of a method in order, with the values and the epoch that they choose.

    ``at_bound`` is whether the neighbours of the choice along an axis were not all tried.
    """
    best, tried = ranked(trials, higher)[0], {found.exponents for found in trials}
    beside = neighbours(best.exponents)[: 2 * len(best.exponents)]
    goodness = np.nan_to_num(best.curve if higher else -best.curve, nan=-np.inf)
    return {
        "trials": msgspec.to_builtins(sorted(trials, key=lambda found: found.exponents)),
        "chosen": best.values,
        "epoch": int(np.argmax(goodness)) + 1,
        "at_bound": not tried.issuperset(beside),
    }
