"""The devices that share the batches, and the placement of arrays and seeds on them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.types import Function, PyTree


def choose(count: int | None) -> Mesh:
    """The first ``count`` devices, or all, as a mesh with one axis, ``"batch"``."""
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise UserError(
            f"--devices {count}: there are {len(devices)} devices; use at most as many."
        )
    return Mesh(np.array(devices[:count]), ("batch",))


def put(mesh: Mesh, tree: PyTree, axis: int | None = None) -> PyTree:
    """Places arrays on the devices, which share an axis of them, or have each the whole array."""
    spec = () if axis is None else (*[None] * axis, "batch")
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))


def jit(mesh: Mesh, f: Function, **options: Any) -> Any:
    """``f``, compiled, with results that each of the devices has."""
    return jax.jit(f, out_shardings=NamedSharding(mesh, PartitionSpec()), **options)


def over_seeds(f: Function, count: int) -> Function:
    """``f`` for ``count`` seeds, with a leading axis on every argument.

    Accelerators are faster with batched seeds. On a CPU, batched matrix products gain nothing, and
    batched convolutions are two to four times as slow, so the seeds run sequentially there.
    """
    if count == 1:
        return lambda *args: jax.tree.map(
            lambda leaf: leaf[None], f(*jax.tree.map(lambda leaf: leaf[0], args))
        )
    if jax.default_backend() == "cpu":
        return lambda *args: jax.lax.map(lambda one: f(*one), args)
    return jax.vmap(f)
