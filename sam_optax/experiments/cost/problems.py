"""What to train: a network, its loss, and the shapes of a batch."""

import re
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from sam_optax.experiments.networks import registry
from sam_optax.experiments.networks.small import MLP
from sam_optax.experiments.networks.vit import VisionTransformer
from sam_optax.experiments.types import PyTree

Losses = Callable[[optax.Params, PyTree], jax.Array]
"""One loss per example, from (params, batch)."""


class Problem(NamedTuple):
    """A network with its loss; ``batch`` has shapes only, so that large networks can be built."""

    init: Callable[[], optax.Params]
    losses: Losses
    batch: PyTree


def make(name: str, size: int, dtype: DTypeLike = jnp.float32) -> Problem:
    """A network on ``size`` examples."""
    if found := re.fullmatch(r"mlp:([1-9]\d*)x([1-9]\d*)", name):
        depth, width = int(found[1]), int(found[2])
        return classification(MLP(width, width, depth - 1, dtype), size, (width,))
    if name == "vit":
        vit = VisionTransformer(10, width=64, depth=4, heads=4, patch=4, dtype=dtype)
        return classification(vit, size, (28, 28, 1))
    text = name in registry.ARCHITECTURES and registry.ARCHITECTURES[name].needs == "text"
    shape, classes = ((128,), 256) if text else ((32, 32, 3), 10)
    module = registry.build(name, shape, classes, dtype, text)
    return classification(module, size, shape, jnp.int32 if text else jnp.float32)


def classification(
    module: nn.Module, size: int, shape: tuple[int, ...], kind: DTypeLike = jnp.float32
) -> Problem:
    """Of examples, or of each token of a text. BatchNorm keeps no averages of its statistics."""
    x = jax.ShapeDtypeStruct((size, *shape), kind)
    init = jax.jit(lambda x: module.init(jax.random.key(0), x, train=True))
    variables = jax.eval_shape(init, x)
    state = [name for name in variables if name != "params"]

    def logits(params: optax.Params, x: jax.Array) -> jax.Array:
        zeros = {name: jax.tree.map(jnp.zeros_like, variables[name]) for name in state}
        return module.apply({"params": params, **zeros}, x, train=True, mutable=state)[0]

    def losses(params: optax.Params, batch: PyTree) -> jax.Array:
        x, y = batch
        found = optax.softmax_cross_entropy(logits(params, x), y)
        return jnp.mean(found, axis=tuple(range(1, found.ndim)))

    y = jax.eval_shape(logits, variables["params"], x)  # probabilities of the classes
    return Problem(lambda: init(jnp.zeros((1, *shape), kind))["params"], losses, (x, y))
