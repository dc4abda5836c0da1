"""Compiled steps that several cost tests look at; each is compiled once a process."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from cost_hlo import Program

import sam_optax
from sam_optax.experiments.bench import measure, models, steps
from sam_optax.experiments.bench.handwritten import HANDWRITTEN, Loss, Step
from sam_optax.experiments.bench.measure import CompiledCost

MakeStep = Callable[[Loss], Step]
PROBLEMS: dict[str, Callable[[], models.Problem]] = {
    "mlp": functools.cache(lambda: models.mlp(256)),
    # Ratios of program sizes depend little on the depth, and compile time much.
    "vit": functools.cache(lambda: models.vit(4, blocks=1)),
}


# What the library's steps of the benchmark perturb by.
METHODS: dict[str, Callable[[], sam_optax.Perturbation]] = {
    "sam": lambda: sam_optax.sam(0.05),
    "asam": lambda: sam_optax.asam(0.5, 0.01),
    "fsam": lambda: sam_optax.fsam(0.1, 1.0, 0.9),
    "rsam": lambda: sam_optax.rsam(0.05, 0.1, key=jax.random.key(0)),
}


def library_step(loss: Loss, method: sam_optax.Perturbation, **options: Any) -> Step:
    """A training step with ``sharpness_aware``, as a user writes it."""
    tx = sam_optax.sharpness_aware(steps.base_tx(), method, **options)

    def step(params: optax.Params, state: Any, batch: Any) -> Any:
        grad_fn = jax.grad(lambda p: loss(p, batch))
        if method.has_start:  # does not use the gradient at the params
            value, grads = None, None
        else:
            value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)


base_step = steps.library("sgd")


@functools.cache
def library(method: str, **options: Any) -> MakeStep:
    """The library's step of a method of the benchmark; with options, as a user writes it."""
    if not options:
        return steps.library(method)
    return lambda loss: library_step(loss, METHODS[method](), **options)


def handwritten(method: str) -> MakeStep:
    """The hand-written step of a method of the benchmark."""
    return HANDWRITTEN[method]


@functools.cache
def perturbation(make: Callable[[], sam_optax.Perturbation]) -> MakeStep:
    """A library step with another perturbation."""
    return lambda loss: library_step(loss, make())


@functools.cache
def compiled(make: MakeStep, problem: str = "mlp") -> jax.stages.Compiled:
    made = PROBLEMS[problem]()
    return compile_step(make(made.loss), made.params, made.batch)


def compile_step(step: Step, params: optax.Params, batch: Any) -> jax.stages.Compiled:
    return measure.build(lambda: step, params, batch).compiled


@functools.cache
def cost(make: MakeStep, problem: str = "mlp") -> CompiledCost:
    return measure.compiled_cost(compiled(make, problem))


@functools.cache
def program(make: MakeStep, problem: str = "mlp") -> Program:
    return Program(compiled(make, problem).as_text())


def ratios(make: MakeStep, reference: MakeStep, problem: str = "mlp") -> dict[str, float]:
    """Each count of a compiled step over that of another."""
    this, other = cost(make, problem)._asdict(), cost(reference, problem)._asdict()
    return {name: this[name] / other[name] for name in this}
