"""Densely connected networks (Huang et al. 2017, arXiv 1608.06993)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sam_optax.experiments.networks.resnet import batch_norm, conv


class DenseNet(nn.Module):
    """DenseNet-BC with the stem for 32×32 images; ``blocks`` lists the layers per block.

    Each layer adds ``growth`` channels; between blocks, channels and resolution are halved.
    """

    classes: int
    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        norm = batch_norm(train, self.dtype)
        x = conv(2 * self.growth, 3, 1, self.dtype)(x.astype(self.dtype))
        for block, layers in enumerate(self.blocks):
            if block:
                x = conv(x.shape[-1] // 2, 1, 1, self.dtype)(nn.relu(norm()(x)))
                x = nn.avg_pool(x, (2, 2), (2, 2), "SAME", count_include_pad=False)
            for _ in range(layers):
                y = conv(4 * self.growth, 1, 1, self.dtype)(nn.relu(norm()(x)))
                y = conv(self.growth, 3, 1, self.dtype)(nn.relu(norm()(y)))
                x = jnp.concatenate([x, y], axis=-1)
        x = jnp.mean(nn.relu(norm()(x)), (1, 2)).astype(jnp.float32)
        return nn.Dense(self.classes)(x)
