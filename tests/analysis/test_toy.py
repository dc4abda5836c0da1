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


def test_loss():
    points = jnp.array([[0.2, 0.05], [0.2, 0.2], [0.3, -1.0]])
    values = [float(analysis.toy_loss(w)) for w in points]
    np.testing.assert_allclose(values, [0.03, 0.0, 0.04], atol=1e-8)


def test_sam_converges_to_the_balanced_point():
    np.testing.assert_allclose(end(sam_optax.sam(0.05), FIRST), [0.2, 0.2], atol=0.01)


def test_sam_fails_from_the_second_start():
    """Its ascent step of length .05 ends where the loss is flat: there is no gradient."""
    np.testing.assert_allclose(end(sam_optax.sam(0.05), SECOND), SECOND, atol=1e-6)
    assert float(analysis.toy_loss(jnp.asarray(end(sam_optax.sam(0.02), SECOND)))) < 0.003


@pytest.mark.parametrize("start", [FIRST, SECOND])
def test_asam_reaches_the_valley_near_its_start(start):
    w = end(sam_optax.asam(0.5, eta=0.0), start)
    assert float(analysis.toy_loss(jnp.asarray(w))) < 0.003
    plain = analysis.toy_trajectory(sam_optax.sam(0.0), start)[-1]  # gradient descent's place
    assert np.linalg.norm(w - plain) < 0.02
    if start == FIRST:
        assert np.linalg.norm(end(sam_optax.sam(0.05), start) - plain) > 0.04


@pytest.mark.parametrize("start", [FIRST, SECOND])
def test_asam_converges_below_the_square_root_of_two(start):
    below = end(sam_optax.asam(1.4, eta=0.0), start, steps=5000)
    assert float(analysis.toy_loss(jnp.asarray(below))) < 0.003
    above = end(sam_optax.asam(1.45, eta=0.0), start, steps=5000)
    np.testing.assert_allclose(above, start, atol=1e-6)


def test_asam_drifts_along_the_valley_in_time():
    """The jumping gradient makes steps of constant length drift, less for shorter ones."""
    method = sam_optax.asam(0.5, eta=0.0)
    drift = [
        np.linalg.norm(
            end(method, SECOND, learning_rate=rate, steps=round(50 / rate))
            - end(method, SECOND, learning_rate=rate, steps=round(5 / rate))
        )
        for rate in (0.01, 0.002)
    ]
    assert drift[0] > 0.02
    assert drift[1] < drift[0] / 2


def test_errors():
    with pytest.raises(ValueError, match="learning_rate must be in"):
        analysis.toy_trajectory(sam_optax.sam(), learning_rate=-1.0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        analysis.toy_trajectory(sam_optax.sam(), steps=0)
