"""The share of SAM's gain that cheap methods keep, and their cost."""

from typing import NamedTuple

import numpy as np

from sam_optax.experiments.types import Json

GOAL_SHARE, GOAL_COST = 0.95, 1.15
"""The share of SAM's gain to keep, and the maximum cost of a step, in steps of SGD."""


class Point(NamedTuple):
    """A method with one radius; unknown values are NaN."""

    method: str
    hyperparameters: Json
    cost: float  # time of a step, in steps of SGD
    accuracy: float  # mean test accuracy, in [0, 1]
    interval: float  # half the width of its confidence interval
    share: float  # of SAM's gain over SGD that it keeps


def points(results: Json) -> list[Point]:
    """The methods of a run, with their share of the gain of the best SAM."""
    found = []
    for method in results["methods"]:
        accuracy = method["summary"]["test_accuracy"]
        numbers = method["step_cost"], accuracy["mean"], accuracy["interval"]
        cost, mean, half = (np.nan if value is None else value for value in numbers)
        name = method["method"]
        found.append(Point(name, method["hyperparameters"], cost, mean, half, np.nan))
    base = next(p.accuracy for p in found if p.method == "sgd")
    best = max((p.accuracy for p in found if p.method == "sam" and p.accuracy > base), default=None)
    if best is None:  # no gain to keep a share of
        return found
    return [p._replace(share=(p.accuracy - base) / (best - base)) for p in found]
