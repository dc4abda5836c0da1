"""Small things that the tests of the papers' experiments share."""

from typing import Any

import archives
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sam_optax.experiments.papers import architectures


@pytest.fixture(autouse=True)
def _compile_fast():
    """The programs are tiny and run a few times: optimizing them takes longer than running."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


class Flat(nn.Module):
    """BatchNorm and two dense layers, which compile fast."""

    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train):
        x = x.reshape(len(x), -1).astype(self.dtype)
        x = nn.Dense(8, dtype=self.dtype)(x)
        x = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x)
        return nn.Dense(self.classes)(nn.relu(x).astype(jnp.float32))


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    """``--model flat``."""
    flat = architectures.Architecture(Flat, "for tests")
    monkeypatch.setitem(architectures.ARCHITECTURES, "flat", flat)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of TFDS's: 48 and 21 images of 8×8 in three classes that differ in brightness."""
    rng = np.random.default_rng(0)

    def split(n):
        labels = np.arange(n) % 3
        noise = rng.normal(0, 20, (n, 8, 8, 3))
        bright = np.clip(noise + 40 + 80 * labels[:, None, None, None], 0, 255)
        return list(bright.astype(np.uint8)), labels

    path = tmp_path_factory.mktemp("tfds") / "bright" / "1.0.0"
    return archives.tfds(path, {"train": split(48), "test": split(21)}, 3, (8, 8, 3))
