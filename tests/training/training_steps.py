"""Small models, methods and hand-written steps that the tests of training states share."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sam_optax
from sam_optax.training import TrainState

# What a step of every method is compared on: name -> perturbation.
METHODS = {
    "sam": lambda: sam_optax.sam(rho=0.1),
    "asam": lambda: sam_optax.asam(rho=0.5),
    "fsam": lambda: sam_optax.fsam(rho=0.1, lmbda=0.6),
    "rsam": lambda: sam_optax.rsam(rho=0.1, gamma=0.2, key=jax.random.key(3)),
}


def params() -> Any:
    """One kernel and one bias."""
    return {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.1, -0.2])}


def batch(step: int) -> jax.Array:
    """Inputs of one step."""
    return jnp.asarray(np.random.default_rng(step).normal(size=(3, 2)), jnp.float32)


def loss(params: Any, x: jax.Array) -> jax.Array:
    """A loss whose gradient changes with the params."""
    return jnp.mean(jnp.square(jnp.tanh(x @ params["kernel"] + params["bias"]) - 0.3))


def create(tx: optax.GradientTransformation, **kwargs: Any) -> TrainState:
    """A training state of the params above."""
    return TrainState.create(apply_fn=loss, params=params(), tx=tx, **kwargs)


class Batches(TrainState):
    """A state with a further field."""

    batch_stats: Any


class DropoutNet(nn.Module):
    """BatchNorm and Dropout; the dropout key is given, so that NNX can draw the same one."""

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        x = nn.Dense(4, name="hidden")(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x)
        x = nn.Dropout(0.5, deterministic=False)(nn.tanh(x), rng=key)
        return nn.Dense(1, name="out")(x)
