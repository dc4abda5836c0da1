"""What to train: a network, its loss, and the shapes of a batch."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from sam_optax.experiments.cost.handwritten import Loss
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks import own, registry
from sam_optax.experiments.networks.small import MLP
from sam_optax.experiments.types import PyTree


class Problem(NamedTuple):
    """A network with the loss of each example; ``batch`` has shapes only, so it may be large."""

    init: Callable[[], optax.Params]
    losses: Loss
    batch: PyTree


def make(
    name: str, size: int, dtype: DTypeLike = jnp.float32, shape: tuple[int, ...] = (32, 32, 3)
) -> Problem:
    """A network on ``size`` examples of a shape; mlp:DEPTHxWIDTH is of vectors of its width."""
    if found := re.fullmatch(r"mlp:([1-9]\d*)x([1-9]\d*)", name):
        depth, width = int(found[1]), int(found[2])
        return classification(MLP(width, width, depth - 1, dtype), size, (width,))
    module = registry.build(name, shape, 10, dtype)
    if own.is_spec(name):
        try:
            own.check(module, name, jnp.zeros((1, *shape)), None)
        except UserError as error:
            raise UserError(f"{error} --shape gives the shape of an example.") from error
    return classification(module, size, shape)


def classification(module: Any, size: int, shape: tuple[int, ...]) -> Problem:
    """Of examples. BatchNorm keeps no averages of its statistics, and dropout one mask."""
    x = jax.ShapeDtypeStruct((size, *shape), jnp.float32)
    init = jax.jit(lambda x: module.init(jax.random.key(0), x, train=True))
    shapes = jax.eval_shape(init, x)
    state = [name for name in shapes if name != "params"]

    def logits(params: optax.Params, x: jax.Array) -> jax.Array:
        zeros = {name: jax.tree.map(jnp.zeros_like, shapes[name]) for name in state}
        streams = dict.fromkeys(("params", "dropout"), jax.random.key(1))
        variables = {"params": params, **zeros}
        return module.apply(variables, x, train=True, mutable=state, rngs=streams)[0]

    def losses(params: optax.Params, batch: PyTree) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy(logits(params, x), y)

    y = jax.eval_shape(logits, shapes["params"], x)  # probabilities of the classes
    return Problem(lambda: init(jnp.zeros((1, *shape)))["params"], losses, (x, y))
