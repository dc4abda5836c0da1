"""LE-SAM's radius against its formula and its limits."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, vector

import sam_optax

GRADS = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([[0.1, 0.2], [0.0, -0.3]])}
PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[0.5, -0.2], [0.3, 1.0]])}


def displacement(method, grads=GRADS, **extra):
    eps, _ = method.update(grads, method.init(PARAMS), PARAMS, **extra)
    return eps


@pytest.mark.parametrize(("tau", "rho"), [(0.2, 1.0), (0.2, 0.01), (5.0, 2.0)])
def test_around_sam_it_is_le_sam(tau, rho):
    """ρ_t = min(σ/‖g‖, ρ_max), ε = ρ_t g/‖g‖ (section 4 of the paper)."""
    g = vector(GRADS)
    expected = min(tau / np.linalg.norm(g), rho) * g / np.linalg.norm(g)
    found = displacement(sam_optax.limit_rise(sam_optax.sam(rho), tau))
    np.testing.assert_allclose(vector(found), expected, rtol=1e-6)


def test_the_linearized_rise_is_the_budget():
    method = sam_optax.asam(1.0)
    eps = displacement(sam_optax.limit_rise(method, 0.3))
    assert vector(GRADS) @ vector(eps) == pytest.approx(0.3, rel=1e-5)
    direction = vector(displacement(method))
    np.testing.assert_allclose(
        vector(eps) * np.linalg.norm(direction) / np.linalg.norm(vector(eps)), direction, rtol=1e-5
    )


def test_within_the_budget_nothing_changes():
    method = sam_optax.asam(0.1)
    assert_same(displacement(sam_optax.limit_rise(method, 100.0)), displacement(method))


def test_a_descent_direction_has_no_limit():
    down = optax.scale(-1.0)
    assert_same(displacement(sam_optax.limit_rise(down, 0.01)), displacement(down))


def test_the_gradient_is_the_one_the_step_has_evaluated():
    """In a chain a piece before it may have changed what it is given."""
    halved = optax.chain(optax.scale(0.5), sam_optax.limit_rise(optax.scale(1.0), 0.3))
    method = sam_optax.as_perturbation(halved)
    moved, _ = method.perturb_fn(PARAMS, GRADS, method.init(PARAMS))
    eps = vector(moved) - vector(PARAMS)
    assert vector(GRADS) @ eps == pytest.approx(0.3, rel=1e-4)


def test_what_it_wraps_gets_the_step_and_the_gradient():
    seen = {}

    def update(updates, state, params=None, *, ascent_grads, training_step, **extra):
        seen.update(ascent_grads=ascent_grads, training_step=training_step)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    displacement(sam_optax.limit_rise(inner, 0.1), training_step=7)
    assert seen == {"ascent_grads": GRADS, "training_step": 7}
    displacement(sam_optax.limit_rise(inner, 0.1), ascent_grads=PARAMS, training_step=8)
    assert seen == {"ascent_grads": PARAMS, "training_step": 8}


def test_a_random_start_stays():
    rsam = sam_optax.rsam(1.0, key=0)
    limited = sam_optax.limit_rise(rsam, 1e-3)
    start = limited.start_fn(PARAMS, limited.init(PARAMS))
    assert_same(start, rsam.start_fn(PARAMS, rsam.init(PARAMS)))


def test_a_start_that_is_the_perturbed_point_is_refused():
    with pytest.raises(ValueError, match="put limit_rise inside"):
        sam_optax.limit_rise(sam_optax.momentum_start(sam_optax.sam()), 0.1)
