"""Vision transformers (Dosovitskiy et al. 2021, arXiv 2010.11929)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Block(nn.Module):
    """Self-attention and an MLP, each preceded by a LayerNorm and with a residual connection."""

    heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        width, xavier = x.shape[-1], nn.initializers.xavier_uniform()
        options: Any = {"dtype": self.dtype, "kernel_init": xavier}
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, **options)(y, y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, **options)(y))
        return x + nn.Dense(width, **options)(y)


class VisionTransformer(nn.Module):
    """Patches, a class token and learned positions; logits from the class token.

    It has neither dropout nor stochastic depth. ``patch`` is the side of a patch in pixels.
    """

    classes: int
    width: int
    depth: int
    heads: int
    patch: int = 16
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        del train
        height, width = x.shape[1:3]
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"images of {height}×{width} cannot be cut into patches of {self.patch} pixels; "
                "--image-size resizes those of --dataset hf:NAME_OR_PATH"
            )
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, padding="VALID", dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width))
        token = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, self.width))
        x = jnp.concatenate([token, x], axis=1)
        shape = (1, *x.shape[1:])
        x = x + self.param("positions", nn.initializers.normal(0.02), shape).astype(
            x.dtype
        )
        for _ in range(self.depth):
            x = Block(self.heads, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)[:, 0].astype(jnp.float32)
        return nn.Dense(self.classes, kernel_init=nn.initializers.zeros)(x)
