"""Measures a training step: counts of its compiled program, and times."""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sam_optax.experiments.cost.handwritten import Step
from sam_optax.experiments.cost.placement import Placement
from sam_optax.experiments.cost.problems import Problem
from sam_optax.experiments.types import PyTree, Record

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


class Build(NamedTuple):
    """A compiled step, shapes of its arguments, and what was measured of it."""

    step: Step
    arguments: tuple[PyTree, PyTree, PyTree]
    compiled: jax.stages.Compiled
    record: Record


def build(step: Step, params: optax.Params, batch: PyTree, placement: Placement) -> Build:
    """Compiles a step for the devices of a placement."""
    state = placement.kernels(jax.eval_shape(step.init, params))
    arguments = placement.kernels(params), state, placement.batch(batch)
    start = time.perf_counter()
    lowered = placement.jit(step, *arguments[:2]).lower(*arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    shards = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(state))
    record = {
        "trace seconds": middle - start,
        "compile seconds": time.perf_counter() - middle,
        "state": sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards),
        **costs(compiled),
    }
    return Build(step, arguments, compiled, record)


def costs(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Counts that the compiler reports for the program of one device; equal on every run."""
    analysis: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    return {
        "flops": analysis["flops"],
        "bytes accessed": analysis["bytes accessed"],
        "temporaries": memory.temp_size_in_bytes,
        "estimated seconds": max(0.0, analysis.get("optimal_seconds", 0.0)),  # < 0: unknown
        **collectives(compiled.as_text() or ""),
    }


def collectives(program: str) -> dict[str, int]:
    """Numbers of collectives in a compiled program, and bytes of their results, by kind."""
    program = re.sub(r"/\*.*?\*/", "", program)
    found: dict[str, int] = {}
    for kind in COLLECTIVES:
        # One that is started and awaited has its result in the second instruction.
        results = re.findall(rf" = (\S.*?) {kind}(?:-done)?\(", program)
        found |= {kind: len(results), f"{kind} bytes": sum(map(_bytes, results))}
    return found | {"sent": sum(found[f"{kind} bytes"] for kind in COLLECTIVES)}


def _bytes(result: str) -> int:
    arrays = _ARRAY.findall(result)
    sizes = [math.prod(int(n) for n in dims.split(",") if n) for _, _, dims in arrays]
    return sum(n * int(bits or 8) for n, (_, bits, _) in zip(sizes, arrays, strict=True)) // 8


def take_times(
    builds: Mapping[str, Build], problem: Problem, rounds: int, done: Callable[[float], None]
) -> None:
    """Adds the seconds per step in each round; ``done`` receives those of each block of steps.

    The load of the machine drifts, so only times within one round are comparable.
    """
    carries = {name: _start(built, problem) for name, built in builds.items()}

    def seconds(name: str, steps: int) -> float:
        *carry, batch = carries[name]
        begin = time.perf_counter()
        for _ in range(steps):
            *carry, _ = builds[name].compiled(*carry, batch)
        jax.block_until_ready(carry)
        carries[name] = *carry, batch
        return time.perf_counter() - begin

    first = next(iter(builds))
    seconds(first, 1)  # not a block yet: memory is allocated
    steps = max(2, round(0.1 / seconds(first, 1)))
    for _ in range(rounds):
        for name, built in builds.items():
            seconds(name, 1)  # fills the caches
            built.record.setdefault("rounds", []).append(seconds(name, steps) / steps)
            done(steps * built.record["rounds"][-1])
    for built in builds.values():
        built.record["seconds"] = statistics.median(built.record["rounds"])


def _start(built: Build, problem: Problem) -> tuple[PyTree, ...]:
    """Arguments of the first step."""
    *kept, whole = jax.tree.map(lambda leaf: leaf.sharding, built.arguments)
    start = jax.jit(lambda params: (params, built.step.init(params)), out_shardings=(*kept,))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), problem.batch)
    return *start(problem.init()), jax.device_put(ones, whole)
