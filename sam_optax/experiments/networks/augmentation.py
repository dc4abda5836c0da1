"""Augments a batch of images on the device, under ``jit``.

Every function is deterministic in its key and arguments. Images are (batch, height, width,
channels).
"""

import jax
import jax.numpy as jnp
import numpy as np


def crop(key: jax.Array, images: jax.Array, padding: int) -> jax.Array:
    """Pads each side with zeros and takes a random crop of the original size."""
    if not padding:
        return images
    n, *shape = images.shape
    padded = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    offsets = jax.random.randint(key, (n, 2), 0, 2 * padding + 1)

    def part(image: jax.Array, offset: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (*offset, 0), shape)

    return jax.vmap(part)(padded, offsets)


def flip(key: jax.Array, images: jax.Array) -> jax.Array:
    """Flips half of the images horizontally."""
    mirrored = jax.random.bernoulli(key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(mirrored, images[:, :, ::-1], images)


def cutout(key: jax.Array, images: jax.Array, size: int) -> jax.Array:
    """Sets a square to zero, the mean of normalized images (DeVries & Taylor 2017).

    Its centre is uniform over the image, so part of it may lie outside.
    """
    if not size:
        return images
    sides = images.shape[1:3]
    start = jax.random.randint(key, (len(images), 2), 0, jnp.array(sides)) - size // 2
    rows, columns = (
        (jnp.arange(side) >= first) & (jnp.arange(side) < first + size)
        for side, first in zip(sides, jnp.split(start, 2, axis=1), strict=True)
    )
    hole = rows[:, :, None] & columns[:, None, :]
    return jnp.where(hole[..., None], 0, images)


def mixup(
    key: jax.Array, images: jax.Array, labels: jax.Array, alpha: float
) -> tuple[jax.Array, jax.Array]:
    """Mixes each example with the next one of the batch (Zhang et al. 2018).

    Labels are distributions, (batch, classes); the whole batch has one share, Beta(α, α)
    distributed. The order of a batch is random, so the next example is a random other one, and
    devices that share a batch exchange only one image each.
    """
    if not alpha:
        return images, labels
    share = jax.random.beta(key, alpha, alpha)

    def mix(x: jax.Array) -> jax.Array:
        return (share * x + (1 - share) * jnp.roll(x, 1, axis=0)).astype(x.dtype)

    return mix(images), mix(labels)


def normalize(images: jax.Array, mean: np.ndarray, std: np.ndarray) -> jax.Array:
    """uint8 as float32, each channel with mean 0 and deviation 1 over the training set."""
    pixels = images.astype(jnp.float32) / 255
    return (pixels - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)
