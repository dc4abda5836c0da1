"""Wide residual networks (Zagoruyko & Komodakis 2016, arXiv 1605.07146)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sam_optax.experiments.networks.resnet import Norm, batch_norm, conv


class PreActivation(nn.Module):
    """BatchNorm and ReLU before each of two 3×3 convolutions."""

    channels: int
    stride: int
    norm: Norm
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(x))
        if x.shape[-1] != self.channels:  # the shortcut starts from the activations too
            x = conv(self.channels, 1, self.stride, self.dtype)(y)
        y = conv(self.channels, 3, self.stride, self.dtype)(y)
        y = nn.relu(self.norm()(y))
        return x + conv(self.channels, 3, 1, self.dtype)(y)


class WideResNet(nn.Module):
    """WRN-depth-widen: three groups of (depth − 4)/6 blocks, at 1, 1/2 and 1/4 of the resolution.

    They have 16 k, 32 k and 64 k channels, with k = ``widen``.
    """

    classes: int
    depth: int
    widen: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        norm = batch_norm(train, self.dtype)
        x = conv(16, 3, 1, self.dtype)(x.astype(self.dtype))
        for group in range(3):
            for i in range((self.depth - 4) // 6):
                stride = 2 if group > 0 and i == 0 else 1
                channels = 16 * self.widen * 2**group
                x = PreActivation(channels, stride, norm, self.dtype)(x)
        x = nn.relu(norm()(x))
        x = jnp.mean(x, (1, 2)).astype(jnp.float32)
        return nn.Dense(self.classes)(x)
