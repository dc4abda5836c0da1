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

_POSITIONS = "params/positions"


def sha256(spec: str) -> str:
    """The digest of the file of ``--init``."""
    path, _ = _split(spec)
    try:
        with path.open("rb") as file:
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
    path, network = _split(spec)
    ours, other = (_arrays(task, task.dataset.classes + more) for more in (0, 1))
    head = {name for name, leaf in ours.items() if leaf.shape != other[name].shape}
    try:
        theirs = _of_run(path, network)
        for name in {**ours, **theirs}:
            found, needed = (
                getattr(of.get(name), "shape", "no such array") for of in (theirs, ours)
            )
            if found != needed and name not in head:
                give = "the --model that the file is of"
                if name == _POSITIONS and len(found) == len(needed) == 3:
                    give = "examples of the size that the file is of"
                raise UserError(f"{name}: {found} in the file, {needed} here; give {give}.")
        for name, leaf in theirs.items():
            if leaf.dtype.kind not in "biuf" or not np.isfinite(leaf).all():
                raise UserError(f"{name}: not all values are finite numbers; give another network.")
    except UserError as error:
        raise UserError(f"--init {spec}: {error}") from error
    kept = {name: leaf for name, leaf in theirs.items() if leaf.shape == ours[name].shape}
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


def _arrays(task: Task, classes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The variables of the task's network, without values, by path."""
    model = task.model
    if isinstance(model, nn.Module) and hasattr(model, "classes"):
        model = model.clone(classes=classes)
    init = partial(model.init, train=False)
    found = jax.eval_shape(init, jax.random.key(0), task.example)
    return flax.traverse_util.flatten_dict(found, sep="/")


def _of_run(path: Path, network: str) -> dict[str, np.ndarray]:
    """A network of a ``params.npz``, which may be the only one."""
    try:
        loaded = load_params(path)
    except UserError as error:
        raise UserError("is damaged, or not the params.npz of a run; give one.") from error
    networks = {
        f"{method}/{seed}": variables
        for method, seeds in loaded.items()
        for seed, variables in seeds.items()
    }
    if not network and len(networks) == 1:
        (network,) = networks
    if network not in networks:
        first = next(iter(networks), "METHOD/SEED")
        has = ", ".join(networks) or "none"
        raise UserError(f"name one of its networks, as in {path}:{first}; it has {has}.")
    return flax.traverse_util.flatten_dict(networks[network], sep="/")
