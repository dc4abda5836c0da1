"""Compiled steps that several cost tests look at; each is compiled once a process."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from cost_hlo import Program

import sam_optax
from sam_optax.experiments import bench_measure, bench_models
from sam_optax.experiments.bench_handwritten import Loss, Step
from sam_optax.experiments.bench_measure import CompiledCost
from sam_optax.experiments.bench_methods import METHODS, library_step

MakeStep = Callable[[Loss], Step]
PROBLEMS: dict[str, Callable[[], bench_models.Problem]] = {
    "mlp": functools.cache(lambda: bench_models.mlp(256)),
    # Ratios of program sizes depend little on the depth, and compile time much.
    "vit": functools.cache(lambda: bench_models.vit(4, blocks=1)),
}


@functools.cache
def library(method: str, **options: Any) -> MakeStep:
    """The library's step of a method of the benchmark."""
    return lambda loss: library_step(loss, METHODS[method].make(), **options)


def handwritten(method: str) -> MakeStep:
    """The hand-written step of a method of the benchmark."""
    return METHODS[method].handwritten


@functools.cache
def perturbation(make: Callable[[], sam_optax.Perturbation]) -> MakeStep:
    """A library step with another perturbation."""
    return lambda loss: library_step(loss, make())


@functools.cache
def compiled(make: MakeStep, problem: str = "mlp") -> jax.stages.Compiled:
    params, loss, batch = PROBLEMS[problem]()
    return bench_measure.compile_step(make(loss), params, batch)


@functools.cache
def cost(make: MakeStep, problem: str = "mlp") -> CompiledCost:
    return bench_measure.compiled_cost(compiled(make, problem))


@functools.cache
def program(make: MakeStep, problem: str = "mlp") -> Program:
    return Program(compiled(make, problem).as_text())


def ratios(make: MakeStep, reference: MakeStep, problem: str = "mlp") -> dict[str, float]:
    """Each count of a compiled step over that of another."""
    this, other = cost(make, problem)._asdict(), cost(reference, problem)._asdict()
    return {name: this[name] / other[name] for name in this}
