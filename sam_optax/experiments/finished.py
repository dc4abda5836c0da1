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
from sam_optax.experiments.reporting import snapshots
from sam_optax.experiments.reporting.results import from_json, load_params
from sam_optax.experiments.reporting.words import setting
from sam_optax.experiments.training import measures
from sam_optax.experiments.training.task import Task, load_dataset, task_of, values


class Run(NamedTuple):
    """A finished run: its ``results``, its ``task``, and the networks in its directory."""

    results: dict[str, Any]
    task: Task
    directory: Path

    @property
    def networks(self) -> list["Network"]:
        """Those of each method, by epoch and seed."""
        every = setting(self.results, "save_every", 0)
        return [
            Network(self, name, seed, epoch)
            for name, entry in self.task.entries.items()
            for epoch in snapshots.epochs(every, entry.recipe.epochs)
            for seed in self.task.seeds
        ]


class Network(NamedTuple):
    """A network of a run: that of a method and a seed, after an epoch."""

    run: Run
    name: str
    seed: int
    epoch: int

    @property
    def last(self) -> bool:
        """Whether its training had ended."""
        return self.epoch == self.run.task.entries[self.name].recipe.epochs

    @property
    def path(self) -> Path:
        """The file that has it."""
        name = "params.npz" if self.last else snapshots.file_name(self.epoch)
        return self.run.directory / name

    def load(self) -> Any:
        """Reads its variables."""
        return load_params(self.path, f"{self.name}/{self.seed}/")[self.name][self.seed]


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
    settings = values(results["settings"])
    dataset = load_dataset(settings).some(settings["scale"])
    if dataset.sha256 != results["dataset"]["sha256"]:
        raise UserError(
            f"{dataset.name}: its contents have changed since the run; the trained params no "
            "longer belong to it."
        )
    run = Run(results, task_of(results, dataset), directory)
    for path in {network.path: None for network in run.networks}:
        load_params(path, "/")  # nothing of it, but a damaged file is found before any work
    return run


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
