"""Arguments of a step of the methods in the registry: their own gradients, and what is theirs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.methods.method import Arguments, Step
from sam_optax.experiments.types import PyTree


def gradient(step: Step, **_: Any) -> Arguments:
    """The gradient on the batch, without the loss."""
    return {"grad_fn": step.grad_fn(step.batch)}


def two_batches(step: Step, **_: Any) -> Arguments:
    """The gradients on the batch and on that of the previous step."""
    return {"grad_fn": step.grad_fn(step.batch), "previous_grad_fn": step.grad_fn(step.previous)}


def linearized_back(step: Step, **_: Any) -> Arguments:
    """The loss at w, from loss and gradient at w + ε."""

    def value_and_grad_fn(params: optax.Params) -> PyTree:
        (value, aux), grads = step.value_and_grad_fn(params)
        eps = jax.tree.map(jnp.subtract, params, step.params)
        return (jnp.maximum(value - optax.tree.vdot(grads, eps), 0), aux), grads

    ascent = step.grad_fn(step.batch)
    return {"value_and_grad_fn": value_and_grad_fn, "ascent_grad_fn": ascent}


def eigenvector(step: Step, iterations: int, **_: Any) -> Arguments:
    """The Hessian's leading eigenvector on the batch, by power iteration.

    It starts at the gradient, so that the vector's sign is the gradient's.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations!r}.")
    grad_fn = step.grad_fn(step.batch)

    def iteration(_: int, v: PyTree) -> PyTree:
        product = jax.jvp(grad_fn, (step.params,), (v,))[1]
        norm = optax.tree.norm(product)
        return jax.tree.map(lambda leaf: leaf / jnp.where(norm == 0, 1, norm), product)

    v = jax.lax.fori_loop(0, iterations, iteration, grad_fn(step.params))
    return {"grad_fn": grad_fn, "eigenvector": v}


def steepness(step: Step, rho: float, alpha: float, **_: Any) -> Arguments:
    """GAM's gradients of the gradient's norm, and of the loss."""
    grad_fn = step.grad_fn(step.batch)
    ascent = jax.grad(lambda params: optax.tree.norm(grad_fn(params)))

    def sharp(params: optax.Params) -> PyTree:
        parts = grad_fn(step.params), ascent(params)
        return jax.tree.map(lambda g, f: g + alpha * rho * f, *parts)

    return {"grad_fn": sharp, "ascent_grad_fn": ascent}


def value(step: Step, **_: Any) -> Arguments:
    """The loss on the batch."""
    return {"value_fn": lambda params: jnp.mean(step.losses_fn(params, step.batch))}


def rising(step: Step, fraction: float, **_: Any) -> Arguments:
    """The sharp gradient on the examples whose loss rises most."""
    rising = sam_optax.rising_samples(step.losses_fn, step.params, step.batch, fraction)
    return {"grad_fn": rising, "ascent_grad_fn": step.grad_fn(step.batch)}


def reweighted(step: Step, **_: Any) -> Arguments:
    """The ascent gradient of δ-SAM."""
    ascent = sam_optax.reweighted_ascent(step.losses_fn, step.batch, key=step.key)
    return {"ascent_grad_fn": ascent}


def part(step: Step, fraction: float, **_: Any) -> Arguments:
    """The ascent gradient on part of the batch."""
    return {"ascent_grad_fn": step.grad_fn(sam_optax.part_of_batch(step.batch, fraction))}


def whole(step: Step, **_: Any) -> Arguments:
    """The ascent gradient on all data."""
    return {"ascent_grad_fn": step.full_grad_fn}


def another_batch(step: Step, **_: Any) -> Arguments:
    """The ascent gradient on a batch of other examples, which are not augmented."""
    examples, size = len(step.data[1]), len(step.batch[1])
    index = jax.random.choice(step.key, examples, (size,), replace=False)
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], step.data)
    return {"ascent_grad_fn": step.grad_fn(batch)}


def several_batches(step: Step, batches: int, **_: Any) -> Arguments:
    """The ascent gradient on the batch and on others, which are not augmented; at most all data."""
    if batches < 1:
        raise ValueError(f"batches must be at least 1, got {batches!r}.")
    examples, size = len(step.data[1]), len(step.batch[1])
    if batches == 1:
        return {}
    if batches * size >= examples:
        return whole(step)
    index = jax.random.choice(step.key, examples, (batches - 1, size), replace=False)

    def of_another(params: optax.Params, i: jax.Array) -> PyTree:
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index[i]], step.data)
        return step.grad_fn(batch)(params)

    others = sam_optax.accumulate(of_another, batches - 1)

    def mean(params: optax.Params) -> PyTree:
        grads = step.grad_fn(step.batch)(params), others(params)
        return jax.tree.map(lambda g, rest: (g + (batches - 1) * rest) / batches, *grads)

    return {"ascent_grad_fn": mean}


def full_gradient(step: Step, **_: Any) -> Arguments:
    """The gradient on all data."""
    return {"full_grads": step.full_grad_fn(step.params)}
