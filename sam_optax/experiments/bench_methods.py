"""The methods of the benchmark, each as the library's step and as a hand-written one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

import sam_optax
from sam_optax.experiments import bench_handwritten as handwritten
from sam_optax.experiments.bench_handwritten import LEARNING_RATE, MOMENTUM, Loss, Step


class Method(NamedTuple):
    """A method to measure.

    Attributes:
      make: builds the perturbation.
      handwritten: the hand-written step of the same method for a loss, with the same settings.
    """

    make: Callable[[], sam_optax.Perturbation]
    handwritten: Callable[[Loss], Step]


# A new method joins by one line here.
METHODS = {
    "sam": Method(lambda: sam_optax.sam(0.05), handwritten.sam),
    "asam": Method(lambda: sam_optax.asam(0.5, 0.01), handwritten.asam),
    "fsam": Method(lambda: sam_optax.fsam(0.1, 1.0, 0.9), handwritten.fsam),
    "rsam": Method(lambda: sam_optax.rsam(0.05, 0.1, key=jax.random.key(0)), handwritten.rsam),
}


def base_tx() -> optax.GradientTransformation:
    """The base optimizer of every measured step."""
    return optax.sgd(LEARNING_RATE, momentum=MOMENTUM)


def base_step(loss: Loss) -> Step:
    """A step of the base optimizer alone."""
    tx = base_tx()

    def step(params: optax.Params, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)


def library_step(loss: Loss, method: sam_optax.Perturbation, **options: Any) -> Step:
    """A training step with ``sharpness_aware``, as a user writes it."""
    tx = sam_optax.sharpness_aware(base_tx(), method, **options)

    def step(params: optax.Params, state: Any, batch: Any) -> Any:
        grad_fn = jax.grad(lambda p: loss(p, batch))
        if method.has_start:  # does not use the gradient at the params
            value, grads = None, None
        else:
            value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)


def optax_contrib_step(loss: Loss, rho: float = 0.05) -> Step:
    """A SAM step with ``optax.contrib.sam``, as its documentation writes it."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(rho))
    tx = optax.contrib.sam(base_tx(), adversary, sync_period=2, opaque_mode=True)

    def step(params: optax.Params, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        grad_fn = jax.grad(lambda p, _: loss(p, batch))
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)
