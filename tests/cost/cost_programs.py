"""Compiled steps that several cost tests look at; each is compiled once a process."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from cost_hlo import Program
from more_by_hand import LIBRARY, by_hand

import sam_optax
from sam_optax.experiments import named
from sam_optax.experiments.cost import measure, steps
from sam_optax.experiments.cost.measure import Placement, make_mesh
from sam_optax.experiments.cost.steps import Loss, Step

VIT = named.find(f"{Path(__file__).parents[2]}/notebooks/vit.py:VisionTransformer")
MakeStep = Callable[[Loss], Step]
BASE_TX = steps.OPTIMIZERS["sgd"]
PROBLEMS: dict[str, Callable[[], steps.Problem]] = {
    "mlp": functools.cache(lambda: steps.make("mlp:4x1024", 256)),
    # Ratios of program sizes depend little on the depth, and compile time much.
    "vit": functools.cache(
        lambda: steps.classification(VIT(10, width=64, depth=1, heads=4, patch=4), 4, (28, 28, 1))
    ),
}


# What the library's steps of the command perturb by.
METHODS: dict[str, Callable[[], sam_optax.Perturbation]] = {
    "sam": lambda: sam_optax.sam(0.05),
    "asam": lambda: sam_optax.asam(0.5, 0.01),
    "fsam": lambda: sam_optax.fsam(0.1, 1.0, 0.9),
    "rsam": lambda: sam_optax.rsam(0.05, 0.1, key=jax.random.key(0)),
}


def mean(losses: Loss) -> Loss:
    return lambda params, batch: jnp.mean(losses(params, batch))


def library_step(losses: Loss, method: sam_optax.Perturbation, **options: Any) -> Step:
    """A training step with ``sharpness_aware``, as a user writes it."""
    tx, loss = sam_optax.sharpness_aware(BASE_TX, method, **options), mean(losses)

    def step(params: optax.Params, state: Any, batch: Any) -> Any:
        grad_fn = jax.grad(lambda p: loss(p, batch))
        if method.has_start:  # does not use the gradient at the params
            value, grads = None, None
        else:
            value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)


@functools.cache
def library(method: str, **options: Any) -> MakeStep:
    """The library's step of a method of the command; with options, as a user writes it."""
    if not options:
        return lambda losses: steps.library(method, losses, BASE_TX, **LIBRARY.get(method, {}))
    return lambda losses: library_step(losses, METHODS[method](), **options)


@functools.cache
def handwritten(method: str, **changes: Any) -> MakeStep:
    """The hand-written step of a method."""
    return lambda losses: by_hand(method, losses, BASE_TX, **changes)


base_step = handwritten("sgd")


@functools.cache
def perturbation(make: Callable[[], sam_optax.Perturbation]) -> MakeStep:
    """A library step with another perturbation."""
    return lambda losses: library_step(losses, make())


@functools.cache
def compiled(make: MakeStep, problem: str = "mlp") -> jax.stages.Compiled:
    made = PROBLEMS[problem]()
    return compile_step(make(made.losses), jax.eval_shape(made.init), made.batch)


def compile_step(step: Step, params: optax.Params, batch: Any) -> jax.stages.Compiled:
    return measure.Build(step, params, batch, Placement(make_mesh())).compiled


@functools.cache
def cost(make: MakeStep, problem: str = "mlp") -> dict[str, float]:
    counts = measure.costs(compiled(make, problem))
    return counts | {"instructions": len(list(program(make, problem).all()))}


@functools.cache
def program(make: MakeStep, problem: str = "mlp") -> Program:
    return Program(compiled(make, problem).as_text())


def ratios(make: MakeStep, reference: MakeStep, problem: str = "mlp") -> dict[str, float]:
    """Each count of a compiled step over that of another."""
    this, other = cost(make, problem), cost(reference, problem)
    return {name: this[name] / other[name] for name in this if other[name]}
