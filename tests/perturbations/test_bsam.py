"""The perturbation of bSAM, and the base optimizer that shares its precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, vector

import sam_optax

W = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.ones((2, 2))}
OPTIONS = {"data_size": 40.0, "weight_decay": 0.1, "key": 0}


def base(*last):
    return optax.chain(sam_optax.scale_by_precision(), optax.scale(-0.1), *last)


def gradient(params):
    return jax.tree.map(lambda x: x**3 - 0.5, params)


def test_noise_and_ε_follow_the_precision():
    method = sam_optax.bsam(0.3, **OPTIONS)
    state = method.init(W)
    start = vector(method.start_fn(W, state)) - vector(W)
    sharper = state._replace(precision=jax.tree.map(lambda s: 4 * s, state.precision))
    np.testing.assert_allclose(
        vector(method.start_fn(W, sharper)) - vector(W), start / 2, rtol=1e-3, atol=1e-6
    )
    eps, _ = method.update(gradient(W), state, W)
    assert_close(
        method.update(gradient(W), sharper, W)[0], jax.tree.map(lambda e: e / 4, eps), 1e-6
    )


def test_noise_has_the_variance_of_the_posterior():
    wide = jnp.zeros(100_000)
    method = sam_optax.bsam(0.3, data_size=25.0, weight_decay=0.0, key=1, initial_precision=4.0)
    assert np.std(method.start_fn(wide, method.init(wide))) == pytest.approx(0.1, rel=0.02)


def test_precision_is_learned_from_the_ascent_gradient():
    method = sam_optax.bsam(0.3, decay=0.5, damping=0.2, **OPTIONS)
    g = gradient(W)
    _, state = method.update(g, method.init(W), W)
    np.testing.assert_allclose(
        vector(state.precision), 0.5 + 0.5 * (np.abs(vector(g)) + 0.2 + 0.1), rtol=1e-6
    )


def test_the_precision_is_in_the_state_once():
    tx = sam_optax.sharpness_aware(base(), sam_optax.bsam(**OPTIONS))
    inexact = [x for x in jax.tree.leaves(tx.init(W)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    assert sum(x.size for x in inexact) == vector(W).size


def test_the_base_divides_by_the_precision_before_the_step():
    tx = sam_optax.sharpness_aware(base(), sam_optax.bsam(0.0, decay=0.0, **OPTIONS))
    state = tx.init(W)
    for _ in range(3):
        before = vector(state.perturbation_state.precision)
        updates, state = jax.jit(lambda s: tx.update(None, s, W, grad_fn=gradient))(state)
        np.testing.assert_allclose(vector(updates), -0.1 * vector(gradient(W)) / before, rtol=1e-6)


def test_groups_average_the_precision():
    """As the public code does, whose ρ g/s and noise are each group's own."""
    tx = sam_optax.sharpness_aware(
        base(),
        sam_optax.bsam(0.3, decay=0.0, damping=0.0, **{**OPTIONS, "data_size": 1e12}),
        groups=2,
    )
    grad_fn = lambda p, i: jax.tree.map(lambda x: x * (1 + 2 * i), p)
    _, state = tx.update(None, tx.init(W), W, grad_fn=grad_fn)
    np.testing.assert_allclose(
        vector(state.perturbation_state.precision), 2 * np.abs(vector(W)) + 0.1, rtol=1e-4
    )


def test_without_bsam_there_is_no_precision():
    tx = sam_optax.sharpness_aware(base(), sam_optax.sam(0.1))
    state = tx.init(W)
    with pytest.raises(ValueError, match=r"scale_by_precision needs the precision of bsam"):
        tx.update(None, state, W, grad_fn=gradient)


def test_alternating_does_not_have_the_state_of_the_beginning():
    tx = sam_optax.alternating(base(), sam_optax.bsam(0.1, **OPTIONS))
    step = jax.jit(lambda state: tx.update(gradient(W), state, W))
    state = tx.init(W)
    with pytest.raises(ValueError, match=r"scale_by_precision needs the precision of bsam"):
        step(state)


def test_only_a_base_that_asks_sees_the_state():
    seen = []

    def asks(updates, state, params=None, *, perturbation_state=None, **extra):
        seen.append(perturbation_state)
        return updates, state

    def does_not(updates, state, params=None):
        return updates, state

    empty = lambda params: optax.EmptyState()
    for one in (
        optax.GradientTransformationExtraArgs(empty, asks),
        optax.GradientTransformation(empty, does_not),
    ):
        tx = sam_optax.sharpness_aware(one, sam_optax.sam(optax.constant_schedule(0.1)))
        tx.update(None, tx.init(W), W, grad_fn=gradient)
    assert [s.step.item() for s in seen] == [0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rho": -1.0},
        {"data_size": 0.0},
        {"weight_decay": -1.0},
        {"decay": 1.0},
        {"damping": -1.0},
        {"initial_precision": 0.0},
    ],
)
def test_hyperparameters_out_of_range(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be in"):
        sam_optax.bsam(**{**OPTIONS, **wrong})
