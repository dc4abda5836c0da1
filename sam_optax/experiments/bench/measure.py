"""Measures the cost of a training step: counts of the compiled program, and times."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

from sam_optax.experiments.bench.handwritten import Step
from sam_optax.experiments.types import PyTree

_BLOCK_SECONDS = 0.1
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", re.MULTILINE)


class CompiledCost(NamedTuple):
    """Counts that the compiler reports for a program; equal on every run."""

    flops: float
    bytes_accessed: float  # memory traffic in the compiler's model
    temp_bytes: int  # in addition to arguments and results
    instructions: int  # of the optimized program; compile time grows with it


def jit(step: Step) -> Any:
    """The step, jitted as in a training loop, with params and state donated."""
    return jax.jit(step.step, donate_argnums=(0, 1))


def compiled_cost(compiled: jax.stages.Compiled) -> CompiledCost:
    """The compiler's counts for a program."""
    analysis: Any = compiled.cost_analysis()
    if isinstance(analysis, list):  # one entry per program in older versions of JAX
        analysis = analysis[0]
    memory: Any = compiled.memory_analysis()
    return CompiledCost(
        flops=analysis["flops"],
        bytes_accessed=analysis["bytes accessed"],
        temp_bytes=memory.temp_size_in_bytes,
        instructions=len(_INSTRUCTION.findall(compiled.as_text() or "")),
    )


def state_bytes(state: optax.OptState) -> int:
    """Bytes of all arrays in a state."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


class Build(NamedTuple):
    """A step built without caches, and the time to trace and to compile it."""

    step: Step
    compiled: jax.stages.Compiled
    trace_seconds: float
    compile_seconds: float


def build(make: Callable[[], Step], params: optax.Params, batch: PyTree) -> Build:
    """Builds a step from scratch, so that none of it is in JAX's caches."""
    step = make()
    state = jax.eval_shape(step.init, params)
    start = time.perf_counter()
    lowered = jit(step).lower(params, state, batch)
    middle = time.perf_counter()
    compiled = lowered.compile()
    return Build(step, compiled, middle - start, time.perf_counter() - middle)


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Disables the persistent compilation cache, so that every compilation is real."""
    option = "jax_enable_compilation_cache"
    before = getattr(jax.config, option)
    jax.config.update(option, False)
    try:
        yield
    finally:
        jax.config.update(option, before)


class _Runner:
    """A compiled step with copies of params and state, because the step donates them."""

    def __init__(self, built: Build, params: optax.Params, batch: PyTree):
        self._compiled, self._batch = built.compiled, batch
        self._carry = jax.tree.map(lambda w: w.copy(), params), built.step.init(params)

    def _run(self, steps: int) -> None:
        params, state = self._carry
        for _ in range(steps):
            params, state, _ = self._compiled(params, state, self._batch)
        self._carry = jax.block_until_ready((params, state))

    def seconds(self, steps: int) -> float:
        """Mean seconds per step over a block of steps, after one step that fills the caches."""
        self._run(1)
        start = time.perf_counter()
        self._run(steps)
        return (time.perf_counter() - start) / steps


def interleaved(
    builds: Mapping[str, Build],
    params: optax.Params,
    batch: PyTree,
    base: str,
    rounds: int,
    done: Callable[[float], None],
) -> dict[str, list[float]]:
    """Seconds per step in each round.

    The load of the machine drifts, so only times within one round are comparable. Each round starts
    with a different step, so that the neighbours in time change too. All steps run equally often,
    enough for ``base`` to run for a while. ``done`` receives the seconds of each block.
    """
    times: dict[str, list[float]] = {name: [] for name in builds}
    if not rounds:
        return times
    runners = {name: _Runner(built, params, batch) for name, built in builds.items()}
    names = list(builds)
    steps = max(2, round(_BLOCK_SECONDS / runners[base].seconds(2)))
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(runners[name].seconds(steps))
            done(steps * times[name][-1])
    return times
