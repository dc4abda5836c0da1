"""Opens finished runs: their networks, and the loss of these on the data."""

import dataclasses
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import analysis
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks import own
from sam_optax.experiments.reporting import snapshots, words
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import from_json, load_params
from sam_optax.experiments.training import identity, measures
from sam_optax.experiments.training import task as tasks
from sam_optax.experiments.types import Function, Json, PyTree, Record

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A finished run, and the networks that its directory has.

    ``label`` tells it from the other runs, if there are several, which share the loss ``programs``,
    and ``about`` is what they have in common, in words.
    ``labels`` are those that each seed was trained on, and ``scores`` those of each method after
    each epoch on the test examples, (seeds, epochs), of the seeds that have not diverged.
    """

    results: Record
    task: tasks.Task
    directory: Path
    label: str
    about: str
    programs: dict[Any, Function]
    labels: np.ndarray
    scores: dict[str, np.ndarray]
    networks: list["Network"] = dataclasses.field(default_factory=list)


class Network(NamedTuple):
    """A network of a run: that of a method and a seed, after an epoch.

    ``title`` is the method, and the run if there are several; ``last`` is whether its training had
    ended, and ``path`` the file that has it.
    """

    run: Run
    name: str
    seed: int
    epoch: int
    title: str
    last: bool
    path: Path

    @property
    def entry(self) -> tasks.Entry:
        """The method, with hyperparameters and recipe."""
        return self.run.task.entries[self.name]

    def load(self) -> PyTree | None:
        """Reads its variables; ``None`` if it has diverged."""
        found = load_params(self.path, f"{self.name}/{self.seed}/")[self.name][self.seed]
        finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found["params"]))
        return jax.tree.map(jnp.asarray, found) if finite else None

    def loss(
        self, variables: PyTree, part: str = "train", group: int | None = None, train: bool = False
    ) -> analysis.DatasetLoss:
        """Its loss on a part of the data, as a function of the params; see :func:`_losses`.

        Training labels are those trained on. Test labels get the same noise, so that both follow
        one distribution.
        """
        task, programs = self.run.task, self.run.programs
        kind = task.model, part, group, train
        if kind not in programs:
            programs[kind] = _losses(task, part, group, train)
        labels = self.run.labels[task.seeds.index(self.seed)]
        if part == "test":
            clean, rng = task.dataset.test.y, np.random.default_rng(0)
            labels = corrupt(clean, task.label_noise, task.dataset.classes, rng)
        return programs[kind](labels, variables)


def _losses(task: tasks.Task, part: str, group: int | None, train: bool) -> Function:
    """Returns ``(labels, variables) -> loss``, where ``loss`` is a function of the params.

    The loss is over blocks of all examples, or over groups of ``group`` random ones. With ``train``
    BatchNorm normalizes by the statistics of these, as in training; otherwise its own are part of
    the data, so that all networks share one program.
    """
    x, chosen = measures.measured(getattr(task.dataset, part))
    if group and group > len(x) and not train:
        raise UserError(f"--m {group}: {len(x)} examples are measured; use at most as many.")
    blocks = measures.in_groups(len(x), min(group, len(x))) if group else measures.in_blocks(len(x))
    index, weights = blocks[0], jnp.asarray(blocks[1])
    images = jnp.asarray(x[index])

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
        block = measures.Blocks(images, jnp.asarray(labels[chosen[index]]), weights)
        return analysis.DatasetLoss(mean, (block, statistics), weights=weights.sum(axis=1))

    return of


def open_runs(directories: Sequence[Path]) -> list[Run]:
    """Loads runs on the same data; says on stderr which snapshots are left out.

    Raises:
      UserError: none is given, one twice, one is damaged or not finished, or their data are
        missing, have changed, or differ.
    """
    if not directories:
        raise UserError("RUN_DIR: none is given; give the directories of --out of runs.")
    paths, runs = [os.path.abspath(directory) for directory in directories], list[Run]()
    for i, (directory, path) in enumerate(zip(directories, paths, strict=True)):
        if path in paths[:i]:
            raise UserError(f"RUN_DIR {directory}: is given twice; give each run once.")
        label = os.path.relpath(path, os.path.commonpath(paths)) if len(paths) > 1 else ""
        runs.append(_open(directory, label, runs[0].programs if runs else {}))
        if runs[i].task.dataset.sha256 != runs[0].task.dataset.sha256:
            raise UserError(
                f"{directory}: was trained on other data than {directories[0]}; give runs on the "
                "same data."
            )
    return runs


def _open(directory: Path, label: str, programs: dict[Any, Function]) -> Run:
    path = directory / "results.json"
    results = from_json(path)
    if results is None or not (directory / "params.npz").is_file():
        raise UserError(
            f"{directory}: holds no results.json and params.npz of a finished run; train one with "
            "compare --out."
        )
    try:
        of_run, settings = identity.of(results), tasks.values(results["settings"])
        _check_code(directory, settings)
        dataset = tasks.load_dataset(settings)
        if dataset.sha256 != results["dataset"]["sha256"]:
            raise UserError(
                f"{dataset.name}: its contents have changed since the run; the trained params no "
                "longer belong to it."
            )
        task = tasks.task_of(results, dataset)
        labels = tasks.noisy_labels(task, task.seeds)
        about = words.data_name(results) if label else words.task(results)
        key = words.Score.of(results).key
        scores = {method["name"]: _curves(method["seeds"], key) for method in results["methods"]}
        run = Run(results, task, directory, label, about, programs, labels, scores)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: describes no run of this version ({type(error).__name__}: {error}); train "
            "again with --out."
        ) from error
    run.networks.extend(_networks(run, snapshots.mark(of_run)))
    return run


def _check_code(directory: Path, settings: Json) -> None:
    """Raises :class:`UserError` unless the run's network, data and loss are those of the names."""
    if settings.get("scale", 1) != 1:
        raise UserError(
            f"{directory}: was trained on a share of its examples (--scale) by an earlier version; "
            "use that version, or train again."
        )
    if objects := settings.get("from_python"):
        raise UserError(
            f"{directory}: has its {' and '.join(objects)} from Python, in no file of the run; "
            "measure it with sam_optax.analysis."
        )
    digest, model = settings.get("model_sha256"), settings["model"]
    if digest is not None and digest != own.sha256(model):
        raise UserError(
            f"--model {model}: its file has changed since the run of {directory}; restore it, or "
            "train again."
        )


def _curves(seeds: Sequence[Json], key: str) -> np.ndarray:
    return np.array([s["curves"][key] for s in seeds if not s["diverged"]], float)


def _networks(run: Run, ours: str) -> Iterator[Network]:
    """Those of each method, by epoch and seed; says which snapshots are not the run's."""
    of_last, left_out = run.directory / "params.npz", dict[Path, str]()
    if (mark := snapshots.mark_of(of_last)) not in ("", ours):
        raise UserError(f"{of_last}: is of another run than results.json; train again with --out.")
    variables = jax.eval_shape(lambda: tasks.initial_variables(run.task, 0))
    arrays = flax.traverse_util.flatten_dict(variables, sep="/")
    every = words.setting(run.results, "save_every", 0)
    for name, entry in run.task.entries.items():
        title = f"{run.label}: {name}" if run.label else name
        for epoch in snapshots.epochs(every, entry.recipe.epochs):
            last = epoch == entry.recipe.epochs
            path = of_last if last else run.directory / snapshots.file_name(epoch)
            if (found := snapshots.mark_of(path)) != mark:
                left_out[path] = "it is missing" if found is None else "it is of another run"
                continue
            for seed in run.task.seeds:
                snapshots.check(path, {f"{name}/{seed}/{leaf}": of for leaf, of in arrays.items()})
                yield Network(run, name, seed, epoch, title, last, path)
    for path, why in left_out.items():
        say(f"{path}: {why}, and left out; train again to have it.")


def grouped(networks: Iterable[Network], *names: str) -> dict[Any, list[Network]]:
    """The networks by the values of some attributes."""
    found: dict[Any, list[Network]] = {}
    for network in networks:
        found.setdefault(operator.attrgetter(*names)(network), []).append(network)
    return found


def measured(
    networks: Sequence[Network], what: str, measure: Callable[[Network], Value]
) -> dict[Network, Value]:
    """What ``measure`` returns for each network, with a progress display."""
    work = {title: (1.0, len(members)) for title, members in grouped(networks, "title").items()}
    found = {}
    with Progress(Console(stderr=True), work, what) as progress:
        for network in networks:
            start = time.perf_counter()
            found[network] = measure(network)
            progress.done(network.title, time.perf_counter() - start)
    return found
