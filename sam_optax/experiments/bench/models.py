"""Networks for measuring training steps: an MLP, a small CNN and a small vision transformer."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from sam_optax.experiments.networks.vit import VisionTransformer
from sam_optax.experiments.types import PyTree

CLASSES = 10
IMAGE_SHAPE = (28, 28, 1)


class Problem(NamedTuple):
    """A network with its loss and one batch of random data."""

    params: optax.Params
    losses: Callable[[optax.Params, PyTree], jax.Array]  # (params, batch) -> one loss per example
    batch: PyTree

    def loss(self, params: optax.Params, batch: PyTree) -> jax.Array:
        """The mean loss."""
        return jnp.mean(self.losses(params, batch))


def mlp(batch_size: int) -> Problem:
    """Four 1024 × 1024 layers with biases, for regression; memory-bound for small batches."""
    return _dense(batch_size, width=1024, layers=4)


def deep(batch_size: int, leaves: int) -> Problem:
    """Kernels and biases of 32 × 32 layers with the given number of leaves: slow to compile."""
    return _dense(batch_size, width=32, layers=leaves // 2)


def _dense(batch_size: int, width: int, layers: int) -> Problem:
    rng = np.random.default_rng(0)

    def layer() -> dict[str, jax.Array]:
        kernel = rng.standard_normal((width, width), np.float32) * (2 / width) ** 0.5
        return {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(width)}

    def losses(params: optax.Params, batch: PyTree) -> jax.Array:
        x, y = batch
        for i in range(layers):
            x = x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"]
            x = nn.relu(x) if i < layers - 1 else x
        return jnp.mean(jnp.square(x - y), axis=-1)

    x, y = (jnp.asarray(rng.standard_normal((batch_size, width), np.float32)) for _ in "xy")
    return Problem({f"layer_{i}": layer() for i in range(layers)}, losses, (x, y))


class _Cnn(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        del train
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(CLASSES)(x)


def _image_classifier(model: nn.Module, batch_size: int) -> Problem:
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.standard_normal((batch_size, *IMAGE_SHAPE), np.float32))
    labels = jnp.asarray(rng.integers(CLASSES, size=batch_size))

    def losses(params: optax.Params, batch: PyTree) -> jax.Array:
        x, y = batch
        logits = model.apply({"params": params}, x, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    init = jax.jit(functools.partial(model.init, train=True))
    return Problem(init(jax.random.key(0), images[:1])["params"], losses, (images, labels))


def cnn(batch_size: int) -> Problem:
    """Two 3 × 3 convolutions and two dense layers on 28 × 28 images."""
    return _image_classifier(_Cnn(), batch_size)


def vit(batch_size: int, blocks: int = 4) -> Problem:
    """A vision transformer of blocks of width 64 on 28 × 28 images in 4 × 4 patches."""
    model = VisionTransformer(CLASSES, width=64, depth=blocks, heads=4, patch=4)
    return _image_classifier(model, batch_size)


class Model(NamedTuple):
    """A network of the benchmark and its usual batch size."""

    make: Callable[[int], Problem]
    batch_size: int


MODELS = {
    "mlp": Model(mlp, 256),
    "mlp-small-batch": Model(mlp, 32),
    "cnn": Model(cnn, 64),
    "vit": Model(vit, 32),
}
