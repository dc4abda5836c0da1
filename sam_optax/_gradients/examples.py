"""Helpers of gradient functions that choose among examples."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from chex import Array
from optax import Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.types import PyTree

LossesFn: TypeAlias = Callable[[Params, PyTree], Array]
"""``(params, batch) -> losses``, one per example, of shape (batch,)."""


def gradient(loss: Callable[[Params], Array], params: Params) -> Updates:
    """The gradient in optax's convention, which for complex params is the conjugate of JAX's."""
    return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, jax.grad(loss)(params))


def sizes(batch: PyTree, fraction: float) -> tuple[int, int]:
    """The number of examples of a batch, and of a fraction of them."""
    hp.check_number("fraction", fraction, lower=0, upper=1, lower_allowed=False, upper_allowed=True)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    found = {shape[0] if shape else 0 for shape in shapes}
    if len(found) != 1 or 0 in found:
        raise ValueError(
            "batch must be a pytree of arrays with the same number of examples, at least one, "
            f"along their first axis, got shapes {shapes}."
        )
    n = int(found.pop())
    return n, max(1, round(float(fraction) * n))


def losses_of(losses_fn: LossesFn, params: Params, batch: PyTree, n: int) -> Array:
    losses = losses_fn(params, batch)
    if jnp.shape(losses) != (n,):
        raise ValueError(
            f"losses_fn must return one loss for each of the {n} examples, shape ({n},), got shape "
            f"{jnp.shape(losses)}: leave the mean out."
        )
    return losses
