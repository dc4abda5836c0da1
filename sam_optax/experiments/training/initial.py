"""Initial params from a file: a network of a run."""

import hashlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.snapshots import load_params
from sam_optax.experiments.training.task import Task
from sam_optax.experiments.types import PyTree


def sha256(spec: str) -> str:
    """The digest of the file of ``--init``."""
    try:
        with _split(spec)[0].open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"--init {spec}: cannot be read ({reason}).") from error


def load(spec: str, task: Task) -> tuple[dict[str, np.ndarray], list[str]]:
    """The variables of ``FILE[:METHOD/SEED]`` by path, as the network of the task has them.

    And the names of what they lack: the head, if its shape differs or it is not in the file. It is
    what depends on the number of classes.

    Raises:
      UserError: the file has no such network, or the network of the task has other arrays.
    """
    ours, other = (_shapes(task, task.dataset.classes + more) for more in (0, 1))
    try:
        theirs = _of_run(*_split(spec))
        for name in {**ours, **theirs}:
            found, needed = getattr(theirs.get(name), "shape", None), ours.get(name)
            if found != needed and needed == other.get(name):
                there, here = (of or "no such array" for of in (found, needed))
                raise UserError(
                    f"{name}: {there} in the file, {here} here; give the --model and the size of "
                    "examples that the file is of."
                )
        for name, leaf in theirs.items():
            if leaf.dtype.kind not in "biuf" or not np.isfinite(leaf).all():
                raise UserError(f"{name}: not all values are finite numbers; give another network.")
    except UserError as error:
        raise UserError(f"--init {spec}: {error}") from error
    kept = {name: leaf for name, leaf in theirs.items() if leaf.shape == ours[name]}
    return kept, [name for name in ours if name not in kept]


def start(initial: Mapping[str, np.ndarray], variables: PyTree) -> PyTree:
    """Variables with an axis of seeds in front, with the initial ones in their places."""
    own = flax.traverse_util.flatten_dict(variables, sep="/")
    own |= {
        name: jnp.broadcast_to(jnp.asarray(value, own[name].dtype), own[name].shape)
        for name, value in initial.items()
    }
    return flax.traverse_util.unflatten_dict(own, sep="/")


def _split(spec: str) -> tuple[Path, str]:
    """The file, and method and seed, if they are given."""
    path, _, network = spec.rpartition(":")
    if not path or os.path.exists(os.path.expanduser(spec)):
        path, network = spec, ""
    return Path(path).expanduser(), network


def _shapes(task: Task, classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the variables of the task's network, by path."""
    model = task.model
    if isinstance(model, nn.Module) and hasattr(model, "classes"):
        model = model.clone(classes=classes)
    found = jax.eval_shape(partial(model.init, train=False), jax.random.key(0), task.example)
    return {k: of.shape for k, of in flax.traverse_util.flatten_dict(found, sep="/").items()}


def _of_run(path: Path, network: str) -> dict[str, np.ndarray]:
    """A network of a ``params.npz``, which may be the only one."""
    try:
        loaded = load_params(path)
    except UserError as error:
        raise UserError("is damaged, or not the params.npz of a run; give one.") from error
    networks = {
        f"{name}/{seed}": of for name, seeds in loaded.items() for seed, of in seeds.items()
    }
    if not network and len(networks) == 1:
        (network,) = networks
    if network not in networks:
        first = next(iter(networks), "METHOD/SEED")
        has = ", ".join(networks) or "none"
        raise UserError(f"name one of its networks, as in {path}:{first}; it has {has}.")
    return flax.traverse_util.flatten_dict(networks[network], sep="/")
