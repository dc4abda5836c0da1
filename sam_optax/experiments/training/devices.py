"""The devices that share the batches, and the placement of arrays and seeds on them."""

import atexit
import dataclasses
import inspect
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.types import Function, PyTree


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run, of all processes: a mesh with one axis, ``"batch"``."""

    mesh: Mesh

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.mesh.size

    def sharding(self, axis: int | None = None) -> NamedSharding:
        """Shards an axis of an array over the devices, or replicates the array."""
        spec = () if axis is None else (*[None] * axis, "batch")
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def rows(self, batch_size: int) -> slice:
        """The part of each batch that this process loads."""
        share = batch_size // jax.process_count()
        return slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def put(self, tree: PyTree, axis: int | None = None) -> PyTree:
        """Places arrays that every process has on the devices: see :meth:`sharding`."""
        if self.count == 1:
            return jax.device_put(tree, self.mesh.devices.flat[0])
        make, sharding = jax.make_array_from_process_local_data, self.sharding(axis)
        return jax.tree.map(lambda leaf: make(sharding, leaf, leaf.shape), tree)

    def put_rows(self, rows: PyTree, axis: int = 0) -> PyTree:
        """Places arrays of which this process has its :meth:`rows`, along an axis."""
        return jax.make_array_from_process_local_data(self.sharding(axis), rows)

    def jit(self, f: Function, **options: Any) -> Any:
        """``f``, compiled, with results that all devices have."""
        whole = self.sharding() if self.count > 1 else None
        return jax.jit(f, out_shardings=whole, **options)


def connect() -> None:
    """Connects to the other processes; must run before any other use of JAX.

    If one of them is lost, JAX ends this process within a minute; a process beside it then says how
    to go on.
    """
    soon: dict[str, Any] = {"heartbeat_timeout_seconds": _SECONDS}
    if not soon.keys() <= inspect.signature(jax.distributed.initialize).parameters.keys():
        soon = {}  # of older versions of JAX
    try:
        # JAX reads only the address from the environment.
        number, count = (
            int(os.environ[name]) if name in os.environ else None
            for name in ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
        )
        jax.distributed.initialize(num_processes=count, process_id=number, **soon)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed: the other processes were not found ({error}); outside of TPU pods and "
            "SLURM set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error
    # Its input ends with this process: empty if that did not end by itself.
    command = [sys.executable, "-c", _WATCH, LOST]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    atexit.register(watch.communicate, b"ended")


LOST = "another process of the run was lost; start all of them again with --resume."
_SECONDS = 30
_WATCH = "import sys; sys.stdin.read() or print('sam_optax:', sys.argv[1], file=sys.stderr)"


def choose(count: int | None) -> Devices:
    """The first ``count`` devices of this process; with ``None`` those of all processes."""
    devices = jax.devices()
    if count is not None:
        if jax.process_count() > 1:
            raise UserError(f"--devices {count}: with --distributed, all devices take part.")
        if count > len(devices):
            raise UserError(
                f"--devices {count}: there are {len(devices)} devices; use at most as many."
            )
        devices = devices[:count]
    return Devices(Mesh(np.array(devices), ("batch",)))


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
