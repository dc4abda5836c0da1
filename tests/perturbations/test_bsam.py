"""The perturbation of bSAM, and the descent that shares its precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import vector

import sam_optax

W = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.ones((2, 2))}
OPTIONS = {"data_size": 40.0, "weight_decay": 0.1, "key": 0}


def sharp(method, combinator=sam_optax.sharpness_aware, **options):
    """Descent along the gradient divided by the method's precision."""
    descent = sam_optax.scale_by_precision()
    return combinator(optax.scale(-0.1), method, descent=descent, **options)


def gradient(params):
    return jax.tree.map(lambda x: x**3 - 0.5, params)


def test_noise_has_the_variance_of_the_posterior():
    wide = jnp.zeros(100_000)
    method = sam_optax.bsam(0.3, data_size=25.0, weight_decay=0.0, key=1, initial_precision=4.0)
    assert np.std(method.start_fn(wide, method.init(wide))) == pytest.approx(0.1, rel=0.02)


def test_groups_average_the_precision():
    """As the public code does, whose ρ g/s and noise are each group's own."""
    method = sam_optax.bsam(0.3, decay=0.0, damping=0.0, **{**OPTIONS, "data_size": 1e12})
    tx = sharp(method, groups=2)
    grad_fn = lambda p, i: jax.tree.map(lambda x: x * (1 + 2 * i), p)
    _, state = tx.update(None, tx.init(W), W, grad_fn=grad_fn)
    np.testing.assert_allclose(
        vector(state.perturbation_state.precision), 2 * np.abs(vector(W)) + 0.1, rtol=1e-4
    )


def test_without_bsam_there_is_no_precision():
    tx = sharp(sam_optax.sam(0.1))
    with pytest.raises(ValueError, match=r"needs the precision of bsam.*got the state EmptyState"):
        tx.update(None, tx.init(W), W, grad_fn=gradient)
    inside = optax.chain(sam_optax.scale_by_precision(), optax.scale(-0.1))
    tx = sam_optax.sharpness_aware(inside, sam_optax.bsam(**OPTIONS))
    with pytest.raises(ValueError, match=r"needs perturbation_state.*pass it as descent="):
        tx.update(None, tx.init(W), W, grad_fn=gradient)
