"""Which devices share the batches, and how arrays lie on them."""

import dataclasses
import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sam_optax.experiments.errors import UserError


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
      count: how many, of all processes.
      split: lays an array's first axis over them.
      whole: gives each of them the whole array.
    """

    count: int
    split: NamedSharding
    whole: NamedSharding

    def rows(self, batch_size: int) -> slice:
        """The part of each batch that this process has to load."""
        share = batch_size // jax.process_count()
        return slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def put(self, rows: np.ndarray) -> jax.Array:
        """A batch, of which this process has its :meth:`rows`."""
        return jax.make_array_from_process_local_data(self.split, rows)


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
        if not 1 <= count <= len(devices):
            raise UserError(
                f"--devices {count}: there are {len(devices)}; use a number from 1 to that."
            )
        devices = devices[:count]
    mesh = Mesh(np.array(devices), ("batch",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("batch",), ()))
    return Devices(len(devices), split, whole)
