"""VGG networks with BatchNorm (Simonyan & Zisserman 2015, arXiv 1409.1556) for 32×32 images."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sam_optax.experiments.networks.resnet import batch_norm, conv


class VGG(nn.Module):
    """Stages of 3×3 convolutions, each followed by pooling, and two hidden layers.

    The head is that of F-SAM's public code, two layers of 512 units, without its dropout.
    """

    classes: int
    stages: tuple[int, ...]
    width: int = 64
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        norm = batch_norm(train, self.dtype)
        x = x.astype(self.dtype)
        widest = 8 * self.width
        for stage, layers in enumerate(self.stages):
            channels = min(self.width * 2**stage, widest)
            for _ in range(layers):
                x = nn.relu(norm()(conv(channels, 3, 1, self.dtype, bias=True)(x)))
            x = nn.max_pool(x, (2, 2), (2, 2), "SAME")
        x = jnp.mean(x, (1, 2))  # a single pixel for 32×32 images
        for _ in range(2):
            x = nn.relu(nn.Dense(widest, dtype=self.dtype)(x))
        return nn.Dense(self.classes)(x.astype(jnp.float32))
