# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""``compare --frontier``: how much of SAM's gain the cheap methods keep, and at what price."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from scipy import stats

from sam_optax.experiments.methods import Variant
from sam_optax.experiments.table import counted, heading, hyperparameters, ruled, variation

CONFIDENCE = 0.95
GOAL_SHARE, GOAL_COST = 0.95, 1.15
"""The share of SAM's gain to keep, and the most that a step may cost, in steps of SGD."""

RADII: dict[str, tuple[float, ...]] = {
    "sam": (0.3, 0.5, 0.7),
    "every": (0.5, 1.0, 1.5),
    "looksam": (0.2, 0.3, 0.5),
    "part": (0.65, 0.8, 0.95, 1.0),
    "momentum": (0.2, 0.3, 0.35, 0.4),
    "msam": (1.5, 2.0, 2.4),
    "m_asam": (4.0, 5.0, 6.0, 8.5, 9.0),
}
"""Radii at which each method is trained."""


class Point(NamedTuple):
    """A method with one radius.

    Attributes:
      name: name of the method.
      hyperparameters: what it was trained with.
      cost: time of a step, in steps of SGD.
      accuracy: mean test accuracy, in [0, 1]; NaN if all seeds diverged.
      interval: half the width of its confidence interval; NaN for fewer than two seeds.
      share: share of SAM's gain over SGD that it keeps; NaN if there is none.
    """

    name: str
    hyperparameters: Mapping[str, Any]
    cost: float
    accuracy: float
    interval: float
    share: float


def variants(of: Callable[[str], Variant]) -> dict[str, Variant]:
    """What is trained, by name; ``of`` gives each method its other hyperparameters."""
    chosen = {"sgd": of("sgd")}
    for name, radii in RADII.items():
        variant = of(name)
        for rho in radii:
            values = {**variant.hyperparameters, "rho": rho}
            chosen[f"{name} {rho:g}"] = Variant(variant.method, values)
    return chosen


def points(results: Mapping[str, Any]) -> list[Point]:
    """The methods of a run, with their share of the gain of the best SAM."""
    found = []
    for method in results["methods"]:
        runs = [run["test_accuracy"] for run in method["seeds"] if not run["diverged"]]
        mean = float(np.mean(runs)) if runs else np.nan
        interval = np.nan
        if len(runs) > 1:
            quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(runs) - 1)
            interval = float(quantile * np.std(runs, ddof=1) / np.sqrt(len(runs)))
        name = method["name"].split()[0]
        found.append(
            Point(name, method["hyperparameters"], method["step_cost"], mean, interval, np.nan)
        )
    base = next(p.accuracy for p in found if p.name == "sgd")
    best = max((p.accuracy for p in found if p.name == "sam" and p.accuracy > base), default=None)
    if best is None:  # no gain to keep a share of
        return found
    return [p._replace(share=(p.accuracy - base) / (best - base)) for p in found]


def print_frontier(console: Console, results: Mapping[str, Any]) -> None:
    """Prints a line for each method and radius, and which of them reach the goal."""
    console.print(heading(results))
    table = ruled()
    table.add_column("method")
    table.add_column("with")
    for name in ("test accuracy\n%", "gain kept\n%", "step cost\n× SGD", "goal"):
        table.add_column(name, justify="right")
    found = points(results)
    for point in found:
        reached = point.share >= GOAL_SHARE and point.cost <= GOAL_COST
        table.add_row(
            point.name,
            hyperparameters(point.hyperparameters),
            variation(100 * point.accuracy, 100 * point.interval),
            "–" if np.isnan(point.share) else f"{100 * point.share:.0f}",
            f"{point.cost:.2f}",
            "reached" if reached else "",
        )
    console.print(table)
    console.print(Text("\n" + "\n".join(_legend(len(results["seeds"])))), style="dim")


def _legend(seeds: int) -> list[str]:
    return [
        f"test accuracy: after the last epoch, on clean labels; mean of "
        f"{counted(seeds, 'seed')} ± {100 * CONFIDENCE:g} % confidence interval",
        "gain kept:     share of the gain over SGD that SAM has at its best radius here",
        "step cost:     time of a training step, median ratio over interleaved epochs",
        f"goal:          {100 * GOAL_SHARE:g} % of the gain at {GOAL_COST:g} × the cost of SGD",
    ]
