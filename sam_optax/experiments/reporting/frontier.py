"""How much of SAM's gain the cheap methods keep, and at what price."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
GOAL_SHARE, GOAL_COST = 0.95, 1.15
"""The share of SAM's gain to keep, and the most that a step may cost, in steps of SGD."""


class Point(NamedTuple):
    """A method with one radius; what is not known is NaN."""

    method: str
    hyperparameters: Mapping[str, Any]
    cost: float  # time of a step, in steps of SGD
    accuracy: float  # mean test accuracy, in [0, 1]
    interval: float  # half the width of its confidence interval
    share: float  # of SAM's gain over SGD that it keeps


def points(results: Mapping[str, Any]) -> list[Point]:
    """The methods of a run, with their share of the gain of the best SAM."""
    from scipy import stats  # takes its time

    found = []
    for method in results["methods"]:
        runs = [run["test_accuracy"] for run in method["seeds"] if not run["diverged"]]
        mean = float(np.mean(runs)) if runs else np.nan
        interval = np.nan
        if len(runs) > 1:
            quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(runs) - 1)
            interval = float(quantile * np.std(runs, ddof=1) / np.sqrt(len(runs)))
        name = method["method"]
        cost = np.nan if method["step_cost"] is None else method["step_cost"]
        found.append(Point(name, method["hyperparameters"], cost, mean, interval, np.nan))
    base = next(p.accuracy for p in found if p.method == "sgd")
    best = max((p.accuracy for p in found if p.method == "sam" and p.accuracy > base), default=None)
    if best is None:  # no gain to keep a share of
        return found
    return [p._replace(share=(p.accuracy - base) / (best - base)) for p in found]
