"""RandAugment around a network; networks.py, in this folder, has one for the command."""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp


class RandAugment(nn.Module):
    """Augments the images of any network in training (Cubuk et al. 2020).

    Each image passes through ``n`` of 14 operations, drawn anew. ``magnitude`` is of 10; larger
    ones continue the scale. Sides that come into the image are grey.

    It works on pixels in [0, 1]. Images that are normalized, as those of --dataset hf: are, need
    the ``mean`` and ``std`` of the channels, which are undone before and done again after.
    """

    network: nn.Module
    n: int = 2
    magnitude: float = 9
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    @nn.compact
    def __call__(self, x, *, train):
        if train:
            keys = jax.random.split(self.make_rng("dropout"), len(x))
            mean, std = jnp.array(self.mean, x.dtype), jnp.array(self.std, x.dtype)
            pixels = jax.vmap(
                partial(augmented, n=self.n, strength=self.magnitude / 10)
            )
            x = (pixels(keys, jnp.clip(x * std + mean, 0, 1)) - mean) / std
        return self.network(x, train=train)


def augmented(key, image, n, strength):
    """An image after ``n`` operations, each with a strength of random sign."""
    for step in jax.random.split(key, n):
        which, sign = jax.random.split(step)
        signed = strength * jax.random.rademacher(sign, (), image.dtype)
        i = jax.random.randint(which, (), 0, len(OPERATIONS))
        image = jax.lax.switch(i, OPERATIONS, image, signed)
    return image


def warped(image, matrix, shift=(0.0, 0.0)):
    """Takes each pixel from matrix · (row, column) from the centre, and a shift in sides."""
    size = jnp.array(image.shape[:2])
    centre = (size - 1) / 2
    place = jnp.stack(jnp.mgrid[: image.shape[0], : image.shape[1]], axis=-1) - centre
    source = place @ jnp.array(matrix).T + jnp.array(shift) * size + centre
    where = [source[..., 0], source[..., 1]]
    take = lambda channel: jax.scipy.ndimage.map_coordinates(
        channel, where, 1, cval=0.5
    )
    return jax.vmap(take, -1, -1)(image)


def rotated(image, s):
    """By up to 30°."""
    cos, sin = jnp.cos(s * jnp.pi / 6), jnp.sin(s * jnp.pi / 6)
    return warped(image, [[cos, -sin], [sin, cos]])


def blended(image, s, other):
    """Away from another image, or towards it."""
    return jnp.clip(other + jnp.maximum(1 + 0.9 * s, 0) * (image - other), 0, 1)


def smooth(image):
    """Each pixel averaged with its neighbours, with a weight of five."""
    mean = nn.avg_pool(image, (3, 3), (1, 1), "SAME", count_include_pad=False)
    return (9 * mean + 4 * image) / 13


def stretched(image, s):
    """Each channel from 0 to 1."""
    low, high = jnp.min(image, (0, 1)), jnp.max(image, (0, 1))
    return jnp.where(high > low, (image - low) / jnp.maximum(high - low, 1e-6), image)


def equalized(image, s):
    """Each pixel as its rank: the share of darker ones among those below the channel's maximum."""
    pixels = image.reshape(-1, image.shape[-1])
    order = jnp.sort(pixels, 0)
    darker = jax.vmap(jnp.searchsorted, -1, -1)(order, pixels).reshape(image.shape)
    below = jnp.sum(order < order[-1], 0)
    return jnp.where(below > 0, darker / jnp.maximum(below, 1), image)


def posterized(image, s):
    """From 8 bits down to 4."""
    step = 2.0 ** jnp.round(4 * jnp.minimum(jnp.abs(s), 1))
    return step * jnp.floor(jnp.round(255 * image) / step) / 255


OPERATIONS = [
    lambda image, s: image,
    stretched,
    equalized,
    rotated,
    lambda image, s: jnp.where(image < 1 - jnp.abs(s), image, 1 - image),  # solarize
    posterized,
    lambda image, s: blended(image, s, image.mean(-1, keepdims=True)),  # color
    lambda image, s: blended(image, s, jnp.mean(image)),  # contrast
    lambda image, s: blended(image, s, 0),  # brightness
    lambda image, s: blended(image, s, smooth(image)),  # sharpness
    lambda image, s: warped(image, [[1, 0], [0.3 * s, 1]]),  # shear
    lambda image, s: warped(image, [[1, 0.3 * s], [0, 1]]),
    lambda image, s: warped(image, jnp.eye(2), [0, 0.45 * s]),  # translate
    lambda image, s: warped(image, jnp.eye(2), [0.45 * s, 0]),
]
