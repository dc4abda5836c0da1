"""VaSSO: known values, its limits and its numerics. (Whole runs: ``test_catalogue``.)"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, norm

import sam_optax

RHO = 0.3


def vasso(decay, **options):
    return optax.chain(sam_optax.smooth_gradient(decay, **options), sam_optax.sam(RHO))


@pytest.mark.parametrize(
    ("start", "first", "expected"),
    [
        ("first_gradient", 1, (0.8, 0.2)),
        ("zero", 0.2, (0.16, 0.2)),
        ("bias_corrected", 1, (4 / 9, 5 / 9)),
    ],
)
def test_by_hand(start, first, expected):
    """g₁ = (1, 0) and g₂ = (0, 1); from 0, the weights 0.16 and 0.2 add up to 0.36."""
    method = sam_optax.smooth_gradient(0.8, ema_start=start)
    g = jnp.array([1.0, 0.0])
    d, state = method.update(g, method.init(g))
    np.testing.assert_allclose(d, first * g, rtol=1e-6)
    d, _ = method.update(jnp.flip(g), state)
    np.testing.assert_allclose(d, expected, rtol=1e-6)


def test_decay_0_is_sam_to_the_bit():
    gs = [jnp.array([1.0, -2.0, 0.1]), jnp.array([0.3, 0.0, -7.0])]
    method = sam_optax.smooth_gradient(0.0)
    state = method.init(gs[0])
    for g in gs:
        d, state = method.update(g, state)
        assert_same(d, g)


def test_zero_gradients_shrink_the_average_and_a_zero_average_is_no_direction():
    method = sam_optax.as_perturbation(vasso(0.5))
    zero = jnp.zeros(2)
    eps, state = method.update(zero, method.init(zero))
    assert norm(eps) == 0
    _, state = method.update(jnp.array([3.0, 4.0]), state)  # the second: its weight is ½
    eps, state = method.update(zero, state)
    np.testing.assert_allclose(eps, RHO * np.array([0.6, 0.8]), rtol=1e-6)
    np.testing.assert_allclose(state[0].ema, [0.75, 1.0])


def test_a_leaf_without_a_gradient_keeps_its_average():
    params = {"w": jnp.ones(2), "i": jnp.arange(2)}
    method = sam_optax.smooth_gradient(0.75)
    _, state = method.update(params, method.init(params))
    d, later = method.update({"w": None, "i": None}, state)
    assert_same(later.ema, state.ema)
    assert d["w"] is later.ema["i"] is None
