"""Bits as numbers, to test what is random about them."""

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax._internal import noise


def planes(bits):
    """±1 for each of the 32 bits: an array (elements, 32)."""
    columns = (bits.ravel()[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return 2 * columns.astype(np.float32) - 1


WORDS = [noise.first_key(jax.random.key(seed)) for seed in range(2)] + [
    jnp.array(pair, jnp.uint32) for pair in ((0, 0), (0, 1), (2**32 - 1, 2**32 - 1))
]
SIZE = 2**16
