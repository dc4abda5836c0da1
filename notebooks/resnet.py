"""Residual networks (He et al. 2016, arXiv 1512.03385), wide ones among them.

BatchNorm uses the whole batch of a step, or a whole group with m-sharpness: if the batch is split
over devices under ``jit``, its statistics span all of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Norm = Callable[..., Callable[[jax.Array], jax.Array]]

he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


def conv(channels: int, size: int, stride: int, dtype: DTypeLike) -> nn.Conv:
    """A convolution without biases that pads (size − 1)/2 zeros on each side."""
    kernel, padding = (size, size), (size - 1) // 2
    options: Any = {"use_bias": False, "dtype": dtype, "kernel_init": he_normal}
    return nn.Conv(channels, kernel, stride, padding, **options)


class Basic(nn.Module):
    """Two 3×3 convolutions, of ResNet-18 and ResNet-20.

    ``projection`` selects the shortcut where shapes change: a 1×1 convolution (the paper's option
    B), or every other pixel with zero channels appended (option A, without params).
    """

    channels: int
    stride: int
    projection: bool
    norm: Norm
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = conv(self.channels, 3, self.stride, self.dtype)(x)
        y = nn.relu(self.norm()(y))
        y = self.norm()(conv(self.channels, 3, 1, self.dtype)(y))
        return nn.relu(y + self._shortcut(x, self.channels))

    def _shortcut(self, x: jax.Array, channels: int) -> jax.Array:
        if x.shape[-1] == channels and self.stride == 1:
            return x
        if self.projection:
            return self.norm()(conv(channels, 1, self.stride, self.dtype)(x))
        x = x[:, :: self.stride, :: self.stride]
        missing = channels - x.shape[-1]
        return jnp.pad(
            x, ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2))
        )


class Bottleneck(Basic):
    """1×1, 3×3 and 1×1 convolutions, of ResNet-50; the 3×3 one has the stride."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(conv(self.channels, 1, 1, self.dtype)(x)))
        y = nn.relu(self.norm()(conv(self.channels, 3, self.stride, self.dtype)(y)))
        y = self.norm()(conv(4 * self.channels, 1, 1, self.dtype)(y))
        return nn.relu(y + self._shortcut(x, 4 * self.channels))


class PreActivation(Basic):
    """BatchNorm and ReLU before each of two 3×3 convolutions, of wide residual networks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(x))
        if x.shape[-1] != self.channels:  # the shortcut starts from the activations too
            x = conv(self.channels, 1, self.stride, self.dtype)(y)
        y = conv(self.channels, 3, self.stride, self.dtype)(y)
        y = nn.relu(self.norm()(y))
        return x + conv(self.channels, 3, 1, self.dtype)(y)


class ResNet(nn.Module):
    """``stages`` lists the residual blocks per stage; channels start at ``width`` and double.

    The stem is CIFAR's (3×3, full resolution) or ImageNet's (7×7 and pooling, a quarter), with
    BatchNorm and ReLU; before blocks that begin with these, it is 16 channels of CIFAR's without
    them, which then follow the last block.
    """

    classes: int
    stages: tuple[int, ...]
    block: type[Basic] = Basic
    width: int = 64
    stem: str = "cifar"
    projection: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        statistics: Any = {
            "use_running_average": not train,
            "momentum": 0.9,
            "epsilon": 1e-5,
        }
        norm = partial(nn.BatchNorm, dtype=self.dtype, **statistics)
        x, pre = x.astype(self.dtype), self.block is PreActivation
        if self.stem == "imagenet":
            x = nn.relu(norm()(conv(self.width, 7, 2, self.dtype)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        else:
            x = conv(16 if pre else self.width, 3, 1, self.dtype)(x)
            x = x if pre else nn.relu(norm()(x))
        for stage, blocks in enumerate(self.stages):
            for i in range(blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                channels = self.width * 2**stage
                x = self.block(channels, stride, self.projection, norm, self.dtype)(x)
        x = nn.relu(norm()(x)) if pre else x
        x = jnp.mean(x, (1, 2)).astype(jnp.float32)
        return nn.Dense(self.classes)(x)


def wide(depth: int, widen: int) -> Callable[..., ResNet]:
    """WRN-depth-widen (Zagoruyko & Komodakis 2016, arXiv 1605.07146).

    Three stages of (depth − 4)/6 blocks have 16 k, 32 k and 64 k channels, with k = ``widen``.
    """
    stages = ((depth - 4) // 6,) * 3
    return partial(ResNet, stages=stages, block=PreActivation, width=16 * widen)
