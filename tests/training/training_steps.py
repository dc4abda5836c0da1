"""Small models, methods and hand-written steps that the tests of training states share."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax

import sam_optax
from sam_optax.training import TrainState

# Options with which a step of a method differs visibly from another one's.
OPTIONS = {"sam": {}, "asam": {"rho": 0.5}, "fsam": {"lmbda": 0.6}, "rsam": {"gamma": 0.2}}


def perturbation_of(name: str) -> sam_optax.Perturbation:
    """A method of the table, with the radius and the options of these tests."""
    return methods.make(name, **{"rho": 0.1, **OPTIONS[name]})


def sgd_with(name: str, **options: Any) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum, with a method around it."""
    base = optax.sgd(0.1, momentum=0.9)
    return sam_optax.sharpness_aware(base, perturbation_of(name), **options)


def params() -> Any:
    """One kernel and one bias."""
    return {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.1, -0.2])}


def batch(step: int) -> jax.Array:
    """Inputs of one step."""
    return jnp.asarray(np.random.default_rng(step).normal(size=(3, 2)), jnp.float32)


def loss(params: Any, x: jax.Array) -> jax.Array:
    """A loss whose gradient changes with the params."""
    return jnp.mean(jnp.square(jnp.tanh(x @ params["kernel"] + params["bias"]) - 0.3))


def create(tx: optax.GradientTransformation) -> TrainState:
    """A training state of the params above."""
    return TrainState.create(apply_fn=loss, params=params(), tx=tx)


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
