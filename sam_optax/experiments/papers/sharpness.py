"""Sharpness of a trained network on some of its training examples."""

from typing import Any

import jax
import jax.numpy as jnp

import sam_optax
from sam_optax.experiments.papers import feed
from sam_optax.experiments.papers.devices import Devices
from sam_optax.experiments.papers.plan import Plan
from sam_optax.experiments.papers.step import Problem, State, eval_step


def measure(
    problem: Problem, plan: Plan, devices: Devices, state: State, examples: int, rho: float
) -> float:
    """L(w + ε) − L(w) in nats, ε being SAM's for the gradient on all of the examples.

    The network is in evaluation mode, the images are not augmented, the labels clean: a number to
    compare runs by. One gradient step of length ρ is a lower bound of the worst rise within ρ.
    """
    some = plan.train[:: max(1, len(plan.train) // examples)][:examples]
    evaluate = eval_step(problem)

    @jax.jit
    def loss(params: Any, batch: feed.Batch) -> jax.Array:
        return evaluate(params, state.batch_stats, *batch)["loss"] / len(some)

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    total, grads = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
    for batch in feed.evaluation(problem.dataset.train, some, plan.batch_size, devices):
        value, more = value_and_grad(state.params, batch)
        total, grads = total + value, jax.tree.map(jnp.add, grads, more)
    sam = sam_optax.sam(rho)
    perturbed, _ = sam.perturb_fn(state.params, grads, sam.init(state.params))
    batches = feed.evaluation(problem.dataset.train, some, plan.batch_size, devices)
    return float(sum(loss(perturbed, batch) for batch in batches) - total)
