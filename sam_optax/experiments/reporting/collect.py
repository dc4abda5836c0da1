"""From what became of a run's methods to its results."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sam_optax.experiments.reporting.results import (
    FORMAT,
    FORMAT_VERSION,
    UNITS,
    number,
    summary,
    versions,
)
from sam_optax.experiments.training.train import Outcome


def collect(
    description: Mapping[str, Any], parameters: int, outcomes: Mapping[str, Outcome]
) -> dict[str, Any]:
    """Everything but the params, as plain data that JSON can hold (NaN becomes ``None``).

    A seed has diverged if its final training loss is not finite; summaries are over the others.

    Args:
      description: of the run.
      parameters: number of params of the network.
      outcomes: what became of each method.
    """
    seeds = description["seeds"]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **description,
        "parameters": parameters,
        "units": UNITS,
        "versions": versions(),
        "methods": [
            {**method, **_method(method, seeds, outcomes[method["name"]])}
            for method in description["methods"]
        ],
    }


def _method(method: Mapping[str, Any], seeds: list[int], outcome: Outcome) -> dict[str, Any]:
    accuracy = outcome.curves["test_accuracy"]
    finals = {
        "test_accuracy": accuracy[-1],
        "best_test_accuracy": np.nanmax(accuracy, axis=0),
        "train_loss": outcome.curves["train_loss"][-1],
        "sharpness": outcome.sharpness,
    }
    finite = np.isfinite(finals["train_loss"])
    seconds = float(np.median(outcome.seconds))
    examples = method["steps_per_epoch"] * method["batch_size"] * len(seeds)
    return {
        "step_cost": number(outcome.cost),
        "epoch_seconds": seconds,
        "compile_seconds": outcome.compile_seconds,
        "examples_per_second": examples / seconds,
        "diverged": int(np.sum(~finite)),
        "summary": {key: summary(values[finite]) for key, values in finals.items()},
        "seeds": [
            {
                "seed": seed,
                "diverged": not finite[i].item(),
                **{key: number(values[i]) for key, values in finals.items()},
                "best_epoch": int(np.nanargmax(accuracy[:, i])) + 1,
                "curves": {
                    name: [number(value) for value in values[:, i]]
                    for name, values in outcome.curves.items()
                },
            }
            for i, seed in enumerate(seeds)
        ],
    }
