"""Opens finished runs: their networks, and the loss of these on the data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import analysis
from sam_optax.experiments.data.images import Examples
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import snapshots
from sam_optax.experiments.reporting.results import from_json, load_params
from sam_optax.experiments.reporting.words import setting
from sam_optax.experiments.training import measures
from sam_optax.experiments.training.task import Task, load_dataset, noisy_labels, task_of, values
from sam_optax.experiments.types import PyTree, Record


class Run(NamedTuple):
    """A finished run: its ``results``, its ``task``, and the networks in its directory."""

    results: Record
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

    def load(self) -> PyTree:
        """Reads its variables."""
        return load_params(self.path, f"{self.name}/{self.seed}/")[self.name][self.seed]

    def labels(self) -> np.ndarray:
        """The labels that it was trained on."""
        return noisy_labels(self.run.task, (self.seed,))[0]


def open_runs(directories: Sequence[Path]) -> list[Run]:
    """Loads runs on the same data.

    Raises:
      UserError: none is given, the data of two differ, or :func:`open_run` fails.
    """
    if not directories:
        raise UserError("RUN_DIR: none is given; give the directories of --out of runs.")
    runs = [open_run(directory) for directory in directories]
    for directory, opened in zip(directories, runs, strict=True):
        if opened.task.dataset.sha256 != runs[0].task.dataset.sha256:
            raise UserError(
                f"{directory}: was trained on other data than {directories[0]}; give runs on the "
                "same data."
            )
    return runs


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


class Losses:
    """The losses of networks, as :func:`dataset_losses` makes them, once for equal networks.

    Their programs are compiled only once then.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def __call__(self, network: Network, part: str = "train", **how: Any) -> Any:
        """The losses on a part of the data: ``train`` or ``test``."""
        task = network.run.task
        kind = task.model, setting(network.run.results, "scale"), part, *how.items()
        if kind not in self._made:
            self._made[kind] = dataset_losses(task, getattr(task.dataset, part), **how)
        return self._made[kind]


def dataset_losses(
    task: Task, examples: Examples, group: int | None = None, train: bool = False
) -> Callable[[np.ndarray, PyTree], analysis.DatasetLoss]:
    """Returns ``(labels, variables) -> loss``, where ``loss`` is a function of the params.

    BatchNorm statistics are part of the data, so that all networks share one program.

    Args:
      task: the task, for its network.
      examples: the examples.
      group: number of random examples of each batch of the loss. Default: blocks of all examples.
      train: whether BatchNorm normalizes by the statistics of the batch, as in training.

    Raises:
      UserError: there are fewer examples than in a group.
    """
    x, chosen = measures.measured(examples)
    if group is None:
        index, weight = measures.in_blocks(len(x))
    else:
        if group > len(x) and not train:
            raise UserError(f"--m {group}: {len(x)} examples are measured; use at most as many.")
        index, weight = measures.in_groups(len(x), min(group, len(x)))
    images, weights = jnp.asarray(x[index]), jnp.asarray(weight)

    def mean(params: optax.Params, batch: tuple[measures.Blocks, PyTree]) -> jax.Array:
        block, statistics = batch
        variables, data = {"params": params, **statistics}, (block.x, block.y)
        losses, _ = measures.losses(task, variables, data, train)
        return jnp.sum(block.weight * losses) / jnp.sum(block.weight)

    def of(labels: np.ndarray, variables: PyTree) -> analysis.DatasetLoss:
        statistics = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(index), *leaf.shape)),
            {name: of for name, of in variables.items() if name != "params"},
        )
        blocks = measures.Blocks(images, jnp.asarray(labels[chosen[index]]), weights)
        return analysis.DatasetLoss(mean, (blocks, statistics), weights=weights.sum(axis=1))

    return of
