"""Opens finished runs: their networks, and the loss of these on the data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax import analysis
from sam_optax.experiments.data.images import Examples
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.results import from_json, load_params
from sam_optax.experiments.training import measures
from sam_optax.experiments.training.task import Task, load_dataset, task_of, values


class Run(NamedTuple):
    """A finished run: its ``results``, its ``task``, and ``networks[name][seed]``."""

    results: dict[str, Any]
    task: Task
    networks: dict[str, dict[int, Any]]


def open_run(directory: Path) -> Run:
    """Loads the run that compare or train has written to a directory.

    Raises:
      UserError: there is no run, it is damaged, or its data are missing or have changed.
    """
    results, params = from_json(directory / "results.json"), directory / "params.npz"
    if results is None or not params.is_file():
        raise UserError(
            f"{directory}: holds no results.json and params.npz of a finished run; train one with "
            "compare --out or train --out."
        )
    networks, settings = load_params(params), values(results["settings"])
    dataset = load_dataset(settings).some(settings["scale"])
    if dataset.sha256 != results["dataset"]["sha256"]:
        raise UserError(
            f"{dataset.name}: its contents have changed since the run; the trained params no "
            "longer belong to it."
        )
    return Run(results, task_of(results, dataset), networks)


def dataset_losses(
    task: Task, examples: Examples
) -> Callable[[np.ndarray, Any], analysis.DatasetLoss]:
    """Returns ``(labels, variables) -> loss``, where ``loss`` is a function of the params.

    BatchNorm statistics are part of the data, so that all networks share one program.
    """
    x, chosen = measures.measured(examples)
    index, weight = measures.in_blocks(len(x))
    images, weights = jnp.asarray(x[index]), jnp.asarray(weight)

    def mean(params: Any, batch: tuple[measures.Blocks, Any]) -> jax.Array:
        block, statistics = batch
        total = measures.total_loss(task, measures.variables(params, statistics), block)
        return total / jnp.sum(block.weight)

    def of(labels: np.ndarray, variables: Any) -> analysis.DatasetLoss:
        statistics = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(index), *leaf.shape)),
            variables.get("batch_stats", {}),
        )
        blocks = measures.Blocks(images, jnp.asarray(labels[chosen[index]]), weights)
        return analysis.DatasetLoss(mean, (blocks, statistics), weights=weights.sum(axis=1))

    return of
