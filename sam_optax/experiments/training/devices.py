"""Which devices share the batches, and how arrays lie on them."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sam_optax.experiments.errors import UserError


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run; all processes' together.

    Attributes:
      mesh: one axis, ``"batch"``.
    """

    mesh: Mesh

    @property
    def count(self) -> int:
        """How many there are."""
        return self.mesh.size

    @property
    def whole(self) -> NamedSharding:
        """Gives each device the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    def split(self, axis: int) -> NamedSharding:
        """Lays an axis of an array over the devices."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "batch"))

    def rows(self, batch_size: int) -> slice:
        """The part of each batch that this process has to load."""
        share = batch_size // jax.process_count()
        return slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def put(self, tree: Any, axis: int | None = None) -> Any:
        """Arrays that every process has, on the devices: whole, or with an axis laid over them."""
        if self.count == 1:
            return jax.device_put(tree, self.mesh.devices.flat[0])
        sharding = self.whole if axis is None else self.split(axis)
        if jax.process_count() == 1:
            return jax.device_put(tree, sharding)

        def place(leaf: Any) -> jax.Array:
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                impl = jax.random.key_impl(leaf)
                return jax.random.wrap_key_data(place(jax.random.key_data(leaf)), impl=impl)
            leaf = np.asarray(leaf)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(place, tree)

    def put_rows(self, rows: Any) -> Any:
        """Arrays of which this process has its :meth:`rows`."""
        split = self.split(0)
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(split, leaf), rows)


def connect() -> None:
    """Finds the other processes; before anything else touches JAX.

    Raises:
      UserError: they do not answer, or nothing says who they are.
    """
    try:
        # JAX itself looks for the address in the environment, and not for the others.
        number, count = (
            int(os.environ[name]) if name in os.environ else None
            for name in ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
        )
        jax.distributed.initialize(num_processes=count, process_id=number)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed: the other processes were not found ({error}); outside of TPU pods and "
            "SLURM set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error


def choose(count: int | None) -> Devices:
    """The devices of all processes, or some of this one's.

    Args:
      count: how many; ``None`` for all.

    Raises:
      UserError: there are not so many, or other processes take part.
    """
    devices = jax.devices()
    if count is not None:
        if jax.process_count() > 1:
            raise UserError(f"--devices {count}: with --distributed, all devices take part.")
        if count > len(devices):
            raise UserError(
                f"--devices {count}: there are {len(devices)}; use a number from 1 to that."
            )
        devices = devices[:count]
    return Devices(Mesh(np.array(devices), ("batch",)))
