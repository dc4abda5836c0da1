"""A transformer for text (Vaswani et al. 2017), with a decoder alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sam_optax.experiments.data.text import SEPARATOR
from sam_optax.experiments.networks.vit import Block


class Transformer(nn.Module):
    """The logits of the token after each one, (n, length, classes), with learned positions.

    Attention is causal. If there is a separator, the tokens up to it also see each other, as in
    a prefix language model (Raffel et al. 2020). There is no dropout.
    """

    classes: int
    width: int = 128
    depth: int = 2
    heads: int = 4
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        del train
        source = jnp.cumsum(x[:, ::-1] == SEPARATOR, axis=1)[:, ::-1] > 0
        mask = nn.make_causal_mask(x, dtype=bool) | source[:, None, None]
        shape = (1, x.shape[1], self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        x = nn.Embed(self.classes, self.width, dtype=self.dtype)(x) + positions.astype(self.dtype)
        for _ in range(self.depth):
            x = Block(self.heads, self.dtype)(x, mask)
        x = nn.LayerNorm(dtype=self.dtype)(x).astype(jnp.float32)
        return nn.Dense(self.classes)(x)
