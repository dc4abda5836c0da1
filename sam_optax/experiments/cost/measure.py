"""Measures a training step: counts of its traced and compiled program, and times."""

import math
import re
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from sam_optax.experiments.cost.handwritten import Step
from sam_optax.experiments.cost.placement import Placement
from sam_optax.experiments.cost.problems import Losses, Problem
from sam_optax.experiments.types import PyTree, Record

Name = TypeVar("Name", bound=Hashable)
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
_GRADIENT = "gradient of the losses"
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", re.MULTILINE)
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def counted(losses: Losses) -> Losses:
    """The losses, with a mark in the trace wherever they are differentiated; it costs nothing."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (checkpoint_name(g, _GRADIENT),))
    return lambda params, batch: identity(losses(params, batch))


def gradients(jaxpr: Any) -> int:
    """Examples whose gradients a traced step evaluates; of branches, in the most expensive one."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.params.get("name") == _GRADIENT:
            total += math.prod(equation.outvars[0].aval.shape)
        inner = [x for x in jax.tree.leaves(equation.params) if hasattr(x, "eqns")]
        found = [gradients(x) for x in inner]
        branches = equation.primitive.name == "cond"
        total += equation.params.get("length", 1) * (max(found) if branches else sum(found))
    return total


class Build(NamedTuple):
    """A compiled step, shapes of its arguments, and what was measured of it."""

    step: Step
    arguments: tuple[PyTree, PyTree, PyTree]
    compiled: jax.stages.Compiled
    record: Record


def build(
    make: Callable[[], Step], params: optax.Params, batch: PyTree, placement: Placement
) -> Build:
    """Builds a step from scratch, so that none of it is in JAX's caches."""
    step = make()
    params, state = (
        placement.kernels(jax.eval_shape(f, params)) for f in (lambda params: params, step.init)
    )
    arguments = params, state, placement.batch(batch)
    start = time.perf_counter()
    traced = placement.jit(step, params, state).trace(*arguments)
    lowered = traced.lower()
    middle = time.perf_counter()
    compiled = lowered.compile()
    parts = placement.mesh.size if placement.per_device else 1  # of the batch, each traced alone
    examples = len(jax.tree.leaves(batch)[0]) // parts
    record = {
        "trace seconds": middle - start,
        "compile seconds": time.perf_counter() - middle,
        "gradients": gradients(traced.jaxpr) / examples,
        "state": sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(state)
        ),
        **costs(compiled),
    }
    return Build(step, arguments, compiled, record)


def costs(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Counts that the compiler reports for the program of one device; equal on every run."""
    analysis: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return {
        "flops": analysis["flops"],
        "bytes accessed": analysis["bytes accessed"],
        "temporaries": memory.temp_size_in_bytes,
        "instructions": len(_INSTRUCTION.findall(text)),
        "estimated seconds": max(0.0, analysis.get("optimal_seconds", 0.0)),  # < 0: unknown
        **collectives(text),
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


def interleaved(
    builds: Mapping[Name, Build], problem: Problem, rounds: int, done: Callable[[float], None]
) -> dict[Name, list[float]]:
    """Seconds per step in each round; ``done`` receives the seconds of each block of steps.

    The load of the machine drifts, so only times within one round are comparable. Each round starts
    with another step, so that the neighbours in time change too. All run equally often, and the
    first for a tenth of a second.
    """
    blocks = {name: _block(built, problem) for name, built in builds.items()}
    times: dict[Name, list[float]] = {name: [] for name in builds}
    names = list(builds)
    steps = max(2, round(0.1 / blocks[names[0]](2)))
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(blocks[name](steps))
            done(steps * times[name][-1])
    return times


def _block(built: Build, problem: Problem) -> Callable[[int], float]:
    """Mean seconds per step over a block of steps, after one step that fills the caches."""
    *kept, whole = jax.tree.map(lambda leaf: leaf.sharding, built.arguments)
    start = jax.jit(lambda params: (params, built.step.init(params)), out_shardings=(*kept,))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), problem.batch)
    carry, batch = start(problem.init()), jax.device_put(ones, whole)

    def seconds(steps: int) -> float:
        nonlocal carry
        for count in (1, steps):
            begin = time.perf_counter()
            for _ in range(count):
                *carry, _ = built.compiled(*carry, batch)
            jax.block_until_ready(carry)
        return (time.perf_counter() - begin) / steps

    return seconds
