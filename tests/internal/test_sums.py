"""Sums over the leaves of large trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sam_optax._internal import trees, vectors


@pytest.mark.parametrize("n", [0, 1, 32, 33, 1025])
def test_a_sum_of_any_number_of_scalars(n):
    terms = [jnp.float32(0.1 * i - 3) for i in range(n)]
    total = trees.sum_scalars(terms, jnp.float32)
    np.testing.assert_allclose(total, sum(0.1 * i - 3 for i in range(n)), rtol=1e-5, atol=1e-5)
    assert (total.dtype, total.shape) == (jnp.float32, ())


def test_no_kernel_reads_all_leaves():
    """The compile time of one that did would grow with the square of their number."""
    leaves = [jnp.ones(3) for _ in range(200)]
    text = jax.jit(vectors.norm).lower(leaves).compile().as_text()
    widths = [line.count("%") for line in text.splitlines() if " fusion(" in line]
    assert max(widths, default=0) < 64


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((jnp.float32, scale) for scale in (1.0, 1e-12, 1e12)),
        *((jnp.bfloat16, scale) for scale in (1.0, 1e-25, 1e25)),  # squares leave float32's range
    ],
)
def test_norms_and_cosine_of_two_trees(dtype, scale):
    rng = np.random.default_rng(0)
    a, b = ({"w": jnp.asarray(rng.normal(size=(4, 3)) * scale, dtype)} for _ in "ab")
    found = vectors.angle(a, b)
    x, y = (np.asarray(tree["w"], np.float64).ravel() for tree in (a, b))
    lengths = np.linalg.norm(x), np.linalg.norm(y)
    np.testing.assert_allclose(found.norm_a, lengths[0], rtol=1e-5)
    np.testing.assert_allclose(found.norm_b, lengths[1], rtol=1e-5)
    np.testing.assert_allclose(found.cosine, x @ y / np.prod(lengths), rtol=1e-4)


def test_a_tree_of_zeros_has_cosine_0():
    zero, one = {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
    assert vectors.angle(zero, one).cosine == vectors.angle(one, zero).cosine == 0
