"""Opens finished runs: their networks, and the loss of these on the data."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import analysis
from sam_optax.experiments import named
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import archive, words
from sam_optax.experiments.reporting.results import describing, from_json
from sam_optax.experiments.training import identity, measures
from sam_optax.experiments.training import task as tasks
from sam_optax.experiments.types import Json, PyTree, Record

_PARAMS = "params.npz"


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its results, as in ``results.json``, its task, and its networks."""

    directory: Path
    results: Record
    task: tasks.Task
    networks: list["Network"] = dataclasses.field(default_factory=list)


class Network(NamedTuple):
    """A network of a run: that of a method and a seed.

    ``score`` is its test accuracy, or the user's metric.
    """

    run: Run
    method: str
    seed: int
    score: float | None

    def load(self) -> PyTree:
        """Reads its variables: the ``"params"``, and others such as statistics of BatchNorm."""
        path = self.run.directory / _PARAMS
        found = archive.load_params(path, f"{self.method}/{self.seed}/")
        return jax.tree.map(jnp.asarray, found[self.method][self.seed])

    def loss(
        self,
        variables: PyTree,
        part: str = "train",
        size: int = measures.BLOCK,
        train: bool = False,
    ) -> analysis.DatasetLoss:
        """Its mean loss on at most 10,000 examples, as a function of the params.

        Training labels are those that the seed was trained on; as many test labels are wrong, so
        that both follow one distribution. Batches are of ``size`` random examples, the same in
        every run. With ``train``, BatchNorm uses their statistics, and dropout is on.
        """
        if part not in ("train", "test") or size < 1:
            raise UserError(f'part {part!r}, size {size}: use "train" or "test", and at least 1.')
        task = dataclasses.replace(self.run.task, held_out=True)  # as many test labels are wrong
        examples = getattr(task.dataset, part)
        chosen = measures.measured(len(examples.y))
        n = len(chosen)
        # Examples of others, of weight 0, fill the last batch, so that the statistics of BatchNorm
        # are those of as many examples everywhere.
        size = min(size, n)
        place = np.arange(-(-n // size) * size).reshape(-1, size)
        index = chosen[np.random.default_rng(0).permutation(n)[place % n]]
        weight = (place < n).astype(np.float32)
        (labels,) = tasks.noisy_labels(task, (self.seed,), held_out=part == "test")
        x, y, weights = map(jnp.asarray, (examples.x[index], labels[index], weight))
        # As a part of the data, so that all networks share one compiled program.
        statistics = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(index), *leaf.shape)),
            {name: of for name, of in variables.items() if name != "params"},
        )
        loss_fn = _BlockLoss(task.model, task.dataset.sha256, train, task)
        batches = measures.Block(x, y, weights), statistics
        return analysis.DatasetLoss(loss_fn, batches, weights=weights.sum(axis=1))


@dataclasses.dataclass(frozen=True)
class _BlockLoss:
    """The loss of a block, equal (and compiled once) for equal networks on the same data."""

    model: Any
    data: str
    train: bool
    task: tasks.Task = dataclasses.field(compare=False)

    def __call__(self, params: optax.Params, batch: tuple[measures.Block, PyTree]) -> jax.Array:
        block, statistics = batch
        variables = {"params": params, **statistics}
        key = jax.random.key(0) if self.train else None  # of dropout
        return measures.total_loss(self.task, variables, block, key) / jnp.sum(block.weight)


def open_run(directory: str | Path) -> Run:
    """Opens a run of ``compare --out``: all its networks, to be measured or used.

    The sharpness of the first network::

        network = open_run("runs/compare").networks[0]
        variables = network.load()
        analysis.sharpness(network.loss(variables), variables["params"], rho=0.5)

    Raises:
      UserError: the run is not finished, its files are damaged or of several runs, its data or the
        file of its network or methods have changed, or a part of it was an object of Python.
    """
    directory = Path(directory)
    path = directory / "results.json"
    results = from_json(path)
    if results is None or not (directory / _PARAMS).is_file():
        raise UserError(
            f"{directory}: holds no results.json and params.npz of a finished run; train one with "
            "compare --out."
        )
    with describing(path):
        settings = tasks.values(results["settings"])
        _check_code(directory, settings, results["methods"])
        dataset = tasks.load_dataset(settings)
        if dataset.sha256 != results["dataset"]["sha256"]:
            changed = "its contents have changed since the run; restore them, or train again."
            raise UserError(f"{dataset.name}: {changed}")
        run = Run(directory, results, tasks.task_of(results, dataset))
        run.networks.extend(_networks(run))
    return run


def _check_code(directory: Path, settings: Json, rows: Sequence[Json]) -> None:
    """Raises :class:`UserError` unless the run's code and data are still those of the names."""
    if objects := settings.get("from_python"):
        raise UserError(
            f"{directory}: has its {' and '.join(objects)} from Python, in no file of the run; "
            "measure it with sam_optax.analysis."
        )
    now = named.digests([settings["model"]], [row["method"] for row in rows])
    if changed := [identity.FILES[of] for of in now if settings.get(of, now[of]) != now[of]]:
        raise UserError(
            f"{directory}: the file of {' and '.join(changed)} has changed since the run; restore "
            "it, or train again."
        )


def _networks(run: Run) -> Iterator[Network]:
    """Those in the file of the run, by method and seed; a :class:`UserError` if they do not fit."""
    key, needed = words.Score.of(run.results).key, tasks.shapes(run.task)
    path = run.directory / _PARAMS
    arrays = archive.read(path, identity=identity.of(run.results))
    for method in run.results["methods"]:
        for of in method["seeds"]:
            for place, like in needed.items():
                array = f"{method['name']}/{of['seed']}/{place}"
                found = arrays.get(array)
                if found is None or (found.dtype, found.shape) != (like.dtype, like.shape):
                    raise UserError(
                        f"{path}: {array} is not the {like.dtype}{[*like.shape]} of the network "
                        "that results.json describes; train again with --out."
                    )
            yield Network(run, method["name"], of["seed"], of[key])
