"""The toy example of the ASAM paper: what section 5.1 says about it."""

import jax.numpy as jnp
import numpy as np
import pytest

import sam_optax
from sam_optax import analysis

FIRST, SECOND = (0.2, 0.05), (0.3, 0.033)


def end(method, start, **options):
    path = analysis.toy_trajectory(method, start, **options)
    assert path.shape == (options.get("steps", 1000) + 1, 2)
    np.testing.assert_allclose(path[0], start, rtol=1e-6)
    return np.asarray(path[-1])


def loss(w):
    return float(analysis.toy_loss(jnp.asarray(w)))


def test_loss():
    values = [loss(w) for w in ([0.2, 0.05], [0.2, 0.2], [0.3, -1.0])]
    np.testing.assert_allclose(values, [0.03, 0.0, 0.04], atol=1e-8)


def test_sam_converges_to_the_balanced_point_from_one_start_only():
    """From the other, its ascent step of length .05 ends where the loss is flat."""
    np.testing.assert_allclose(end(sam_optax.sam(0.05), FIRST), [0.2, 0.2], atol=0.01)
    np.testing.assert_allclose(end(sam_optax.sam(0.05), SECOND), SECOND, atol=1e-6)
    assert loss(end(sam_optax.sam(0.02), SECOND)) < 0.003


@pytest.mark.parametrize("start", [FIRST, SECOND])
def test_asam_reaches_the_valley_near_its_start(start):
    w = end(sam_optax.asam(0.5, eta=0.0), start)
    assert loss(w) < 0.003
    assert np.linalg.norm(w - end(sam_optax.sam(0.0), start)) < 0.02  # gradient descent's place
