"""The devices of a step, and the parts of params, state and batch on each of them."""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sam_optax.experiments.cost.handwritten import Step
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.types import PyTree

DATA, MODEL = "data", "model"
_LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_LIBTPU |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
"""Environment in which libtpu compiles and looks for no TPU; every topology is compiled for."""


def _devices(target: str | None) -> Sequence[Any]:
    """Those of a target, which this machine need not have; without one, its own."""
    kind, _, name = (target or "").partition(":")
    if not kind:
        return jax.devices()
    jax.config.update("jax_platforms", "cpu")
    if kind == "cpu":
        flag = f"--xla_force_host_platform_device_count={name}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        if (found := len(jax.devices())) < int(name):  # from Python, after the first use of JAX
            raise UserError(f"--target {target}: JAX has started with {found}; use a new process.")
        return jax.devices()[: int(name)]
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f'--target {target}: run pip install "sam_optax[tpu]" first.')
    jax.devices()  # the flags for CPUs are read once; libtpu refuses them
    os.environ.pop("XLA_FLAGS", None)
    os.environ.update(_LIBTPU)
    try:
        return topologies.get_topology_desc(name, platform="tpu").devices
    except Exception as error:  # of several types, which JAX does not document
        reason = str(error).splitlines()[0]
        raise UserError(f"--target {target}: {reason}; use tpu:v5e:2x2, say.") from error


def make_mesh(target: str | None = None, axes: Sequence[str] = ()) -> Mesh:
    """The mesh of ``NAME=SIZE`` axes; by default all devices of a target, or one of these."""
    devices = _devices(target)
    parts = [axis.partition("=") for axis in axes]
    sizes = {name: int(size) for name, _, size in parts} or {DATA: len(devices) if target else 1}
    if DATA not in sizes:
        raise UserError(f"--mesh {' '.join(axes)}: name an axis data, for the batch.")
    if (count := math.prod(sizes.values())) > len(devices):
        raise UserError(f"--mesh of {count} devices: there are {len(devices)}; use at most these.")
    return Mesh(np.array(devices[:count]).reshape(*sizes.values()), tuple(sizes))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh, and how a step uses it.

    The axis ``data`` shards the batch. ``model`` shards the longest axis of each kernel, and with
    ``fsdp`` ``data`` shards the longest other one; what does not divide is replicated. With
    ``per_device`` the step runs under ``shard_map``.
    """

    mesh: Mesh
    fsdp: bool = False
    per_device: bool = False

    def kernels(self, tree: PyTree) -> PyTree:
        """Shapes of params or of a state, with their shardings."""
        return jax.tree.map(lambda leaf: self._placed(leaf, self._spec(leaf.shape)), tree)

    def batch(self, tree: PyTree) -> PyTree:
        """Shapes of a batch, with their shardings."""
        return jax.tree.map(lambda leaf: self._placed(leaf, P(DATA)), tree)

    def jit(self, step: Step, params: PyTree, state: PyTree) -> Any:
        """The step, jitted as in a training loop, with params and state donated."""
        whole: Any = step.step
        if self.per_device:
            specs: Any = {"in_specs": (P(), P(), P(DATA)), "out_specs": P()}
            whole = jax.shard_map(step.step, mesh=self.mesh, **specs, check_vma=False)
        kept = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
        return jax.jit(whole, donate_argnums=(0, 1), out_shardings=(*kept, None))

    def _placed(self, leaf: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _spec(self, shape: tuple[int, ...]) -> P:
        spec: list[str | None] = [None] * len(shape)
        for name in [MODEL] * (MODEL in self.mesh.shape) + [DATA] * self.fsdp:
            free = [(size, i) for i, size in enumerate(shape) if spec[i] is None]
            if len(shape) > 1 and max(free)[0] % self.mesh.shape[name] == 0:
                spec[max(free)[1]] = name
        return P(*spec)
