"""Which values a search tries, and which it chooses; trials are plain data, as in the results."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from sam_optax.experiments.reporting.results import number
from sam_optax.experiments.types import Json, Record

Trial: TypeAlias = Json
"""A method trained at one value: see :func:`trial`."""
FACTOR, DECAY_FACTOR = 2.0, 3.0
"""Ratio of neighbouring radii, and of neighbouring weight decays."""
START, REACH = 2, 5
"""How many values on either side are tried at first, and at most."""


def trial(
    exponent: int, values: Mapping[str, float], curves: Mapping[str, np.ndarray], chance: float
) -> Trial:
    """The record of a training; the curves are (epochs, seeds).

    It has broken down if a seed diverged, or if the mean accuracy is not better than ``chance``,
    that of the most frequent class.
    """
    accuracy = curves["test_accuracy"]
    diverged = ~np.isfinite(curves["train_loss"][-1])
    return {
        "exponent": exponent,
        "values": dict(values),
        "held_out_accuracy": [[number(x) for x in curve] for curve in accuracy.T],
        "diverged": int(diverged.sum()),
        "broken_down": bool(diverged.any() or accuracy[-1].mean() <= chance),
    }


def mean_curve(found: Trial) -> np.ndarray:
    """The mean held-out accuracy of the seeds after each epoch."""
    return np.mean(np.array(found["held_out_accuracy"], float), axis=0)


def best(trials: Sequence[Trial]) -> Trial:
    """That with the highest accuracy after the last epoch; of equal ones, with the smallest value.

    What has broken down counts less than everything else.
    """
    ordered = sorted(trials, key=lambda found: found["exponent"])
    return max(ordered, key=lambda found: 0 if found["broken_down"] else mean_curve(found)[-1])


def missing(trials: Sequence[Trial], start: int = START, reach: int = REACH) -> list[int]:
    """The exponents to try next, until the best one has neighbours or ``reach`` is tried."""
    tried = {found["exponent"] for found in trials}
    if first := [exponent for exponent in range(-start, start + 1) if exponent not in tried]:
        return first
    edge = best(trials)["exponent"]
    return [n for n in (edge - 1, edge + 1) if n not in tried and abs(n) <= reach]


def choose(trials: Sequence[Trial]) -> Record:
    """The trials of a method in order, with the value and the epoch that they choose."""
    found = best(trials)
    return {
        "trials": sorted(trials, key=lambda of: of["exponent"]),
        "chosen": found["values"],
        "epoch": int(np.nanargmax(mean_curve(found))) + 1,
        "at_bound": abs(found["exponent"]) == REACH,
    }
