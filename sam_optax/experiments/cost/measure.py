"""Training steps, compiled for devices that need not be there, and what is measured of them."""

import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sam_optax.experiments.cost.steps import Step
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.types import Function, PyTree

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
# One that is started and awaited has its result in the second instruction.
_COLLECTIVE = re.compile(rf" = (\S.*?) ({'|'.join(COLLECTIVES)})(?:-done)?\(")
_ARRAY = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]")
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
        said = f"--target {target}: {str(error).splitlines()[0]}; use tpu:v5e:2x2, say."
        raise UserError(said) from error


def make_mesh(target: str | None = None, axes: Sequence[str] = ()) -> Mesh:
    """The mesh of ``NAME=SIZE`` axes; by default all devices of a target, or one of these."""
    devices = _devices(target)
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in axes)}
    sizes = sizes or {DATA: len(devices) if target else 1}
    if DATA not in sizes:
        raise UserError(f"--mesh {' '.join(axes)}: name an axis data, for the batch.")
    if (count := math.prod(sizes.values())) > len(devices):
        raise UserError(f"--mesh of {count} devices: there are {len(devices)}; use at most these.")
    return Mesh(np.array(devices[:count]).reshape(*sizes.values()), tuple(sizes))


class Placement(NamedTuple):
    """The mesh, and how a step uses it.

    The axis ``data`` shards the batch. ``model`` shards the longest axis of each kernel, and with
    ``fsdp`` ``data`` shards the longest other one; what does not divide is replicated. With
    ``per_device`` the step runs under ``shard_map``.
    """

    mesh: Mesh
    fsdp: bool = False
    per_device: bool = False

    def place(self, step: Step, params: PyTree, batch: PyTree) -> tuple[Any, tuple[PyTree, ...]]:
        """The step, jitted as in a training loop, and its arguments' shapes with shardings."""

        def placed(leaf: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        kept = params, jax.eval_shape(step.init, params)
        kept = jax.tree.map(lambda leaf: placed(leaf, self._kernel(leaf.shape)), kept)
        batch = jax.tree.map(lambda leaf: placed(leaf, P(DATA)), batch)
        whole: Any = step.step
        if self.per_device:
            specs: Any = {"in_specs": (P(), P(), P(DATA)), "out_specs": P()}
            whole = jax.shard_map(step.step, mesh=self.mesh, **specs, check_vma=False)
        out = jax.tree.map(lambda leaf: leaf.sharding, (*kept, None))
        return jax.jit(whole, donate_argnums=(0, 1), out_shardings=out), (*kept, batch)

    def _kernel(self, shape: tuple[int, ...]) -> P:
        spec: list[str | None] = [None] * len(shape)
        for name in [MODEL] * (MODEL in self.mesh.shape) + [DATA] * self.fsdp:
            free = [(size, i) for i, size in enumerate(shape) if spec[i] is None]
            if len(shape) > 1 and max(free)[0] % self.mesh.shape[name] == 0:
                spec[max(free)[1]] = name
        return P(*spec)


class Build:
    """A step that is compiled for the devices of a placement, with its measures in ``record``."""

    def __init__(self, step: Step, params: PyTree, batch: PyTree, placement: Placement) -> None:
        jitted, self._arguments = placement.place(step, params, batch)
        lowered = jitted.lower(*self._arguments)
        start = time.perf_counter()
        self._init, self.compiled = step.init, lowered.compile()
        seconds, state = time.perf_counter() - start, jax.tree.leaves(self._arguments[1])
        size = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
        self.record = {"compile seconds": seconds, "state": size, **costs(self.compiled)}

    def start(self, params: PyTree) -> None:
        """Goes to the first step, on a batch of ones."""
        ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), self._arguments[2])
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._arguments)
        *self._carry, self._batch = jax.device_put((params, self._init(params), ones), shardings)

    def run(self, steps: int) -> float:
        """Takes some steps and returns their seconds."""
        begin = time.perf_counter()
        for _ in range(steps):
            *self._carry, _ = self.compiled(*self._carry, self._batch)
        jax.block_until_ready(self._carry)
        return time.perf_counter() - begin


def costs(compiled: Any) -> dict[str, float]:
    """Counts that the compiler reports for the program of one device; equal on every run."""
    analysis = compiled.cost_analysis()
    return {
        "flops": analysis["flops"],
        "bytes accessed": analysis["bytes accessed"],
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "estimated seconds": max(0.0, analysis.get("optimal_seconds", 0.0)),  # < 0: unknown
        **collectives(compiled.as_text()),
    }


def collectives(program: str) -> dict[str, int]:
    """Numbers of collectives in a compiled program, and bytes of their results, by kind."""
    found = {key: 0 for kind in COLLECTIVES for key in (kind, f"{kind} bytes")} | {"bytes sent": 0}
    for result, kind in _COLLECTIVE.findall(re.sub(r"/\*.*?\*/", "", program)):
        found[kind] += 1
        for bits, axes in _ARRAY.findall(result):
            size = math.prod(int(n) for n in axes.split(",") if n) * int(bits or 8) // 8
            found[f"{kind} bytes"] += size
            found["bytes sent"] += size
    return found


def take_times(builds: Sequence[Build], init: Function, rounds: int, done: Function) -> None:
    """Adds the seconds per step in each round, in which the load of the machine drifts little."""
    for built in builds:
        built.start(init())
    builds[0].run(1)  # not a block yet: memory is allocated
    steps = max(2, round(0.1 / builds[0].run(1)))
    for _ in range(rounds):
        for built in builds:
            built.run(1)  # fills the caches
            seconds = built.run(steps)
            built.record.setdefault("seconds", []).append(seconds / steps)
            done()
