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


def batch_norm(train: bool, dtype: DTypeLike) -> Norm:
    """Makes BatchNorm layers, which use batch statistics in training."""
    return partial(
        nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=dtype
    )


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
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2)))


class Bottleneck(Basic):
    """1×1, 3×3 and 1×1 convolutions, of ResNet-50; the 3×3 one has the stride."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(conv(self.channels, 1, 1, self.dtype)(x)))
        y = nn.relu(self.norm()(conv(self.channels, 3, self.stride, self.dtype)(y)))
        y = self.norm()(conv(4 * self.channels, 1, 1, self.dtype)(y))
        return nn.relu(y + self._shortcut(x, 4 * self.channels))


class ResNet(nn.Module):
    """``stages`` lists the residual blocks per stage; channels start at ``width`` and double.

    The stem is CIFAR's (3×3, full resolution) or ImageNet's (7×7 and pooling, a quarter).
    """

    classes: int
    stages: tuple[int, ...]
    block: Callable[..., Basic] = Basic
    width: int = 64
    stem: str = "cifar"
    projection: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        norm = batch_norm(train, self.dtype)
        x = x.astype(self.dtype)
        large = self.stem == "imagenet"
        x = conv(self.width, 7 if large else 3, 2 if large else 1, self.dtype)(x)
        x = nn.relu(norm()(x))
        if large:
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.stages):
            for i in range(blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                channels = self.width * 2**stage
                x = self.block(channels, stride, self.projection, norm, self.dtype)(x)
        x = jnp.mean(x, (1, 2)).astype(jnp.float32)
        return nn.Dense(self.classes)(x)


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
    """WRN-depth-widen (Zagoruyko & Komodakis 2016, arXiv 1605.07146).

    Three groups of (depth − 4)/6 blocks, at 1, 1/2 and 1/4 of the resolution, have 16 k, 32 k and
    64 k channels, with k = ``widen``.
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
