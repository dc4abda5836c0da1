"""Two gradients at once, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_close, assert_same, signature, vector, x64

import sam_optax

W = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]]), "step": jnp.array(3)}
SAM = sam_optax.sam(0.3)


def gradient(params):
    return jax.tree.map(
        lambda x: x**3 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.zeros_like(x), params
    )


BOTH = {"grad_fn": gradient, "previous_grad_fn": gradient}


def steps(tx, n=4, **functions):
    params, state = W, tx.init(W)
    functions = functions or BOTH

    @jax.jit
    def step(params, state):
        updates, state = tx.update(None, state, params, **functions)
        return optax.apply_updates(params, updates), state

    for _ in range(n):
        params, state = step(params, state)
    return params, state


def test_a_first_step_is_the_base_optimizers():
    tx = sam_optax.simultaneous(optax.sgd(0.1), SAM)
    params, _ = steps(tx, 1)
    assert_close(params, jax.tree.map(lambda w, g: w - 0.1 * g, W, gradient(W)), 1e-6)


def test_λ_is_1_and_the_radius_0_is_the_gradient_ahead():
    """Then it is optimistic gradient descent: w − η ∇L(w − η ∇L(y))."""
    params, _ = steps(sam_optax.simultaneous(optax.sgd(0.1), sam_optax.sam(0.0), 1.0))
    w, ahead = vector({k: W[k] for k in "ab"}), 0.0
    for _ in range(4):
        ahead = (w - 0.1 * ahead) ** 3
        w = w - 0.1 * ahead
    np.testing.assert_allclose(vector({k: params[k] for k in "ab"}), w, rtol=1e-5)


def test_only_the_descent_changes_the_momentum():
    base = optax.sgd(0.1, momentum=0.9)
    _, state = steps(sam_optax.simultaneous(base, SAM, 0.0), 1)
    assert_close(state.base_state[0].trace["a"], gradient(W)["a"], 1e-6)


def test_each_gradient_is_on_its_batch():
    """With λ = 1 and no radius only the gradient ahead is seen, with λ = 0 only the other."""
    half = lambda p: jax.tree.map(lambda g: g // 2 if g.dtype == int else g / 2, gradient(p))
    for lmbda, name in ((1.0, "grad_fn"), (0.0, "previous_grad_fn")):
        tx = sam_optax.simultaneous(optax.sgd(0.1), sam_optax.sam(0.0), lmbda)
        found = steps(tx, **{**BOTH, name: half})[0]
        other = sam_optax.simultaneous(optax.sgd(0.05), sam_optax.sam(0.0), lmbda)
        if lmbda == 0:  # where y, which uses the other gradient, is not seen
            assert_close(found, steps(other)[0], 1e-6)
        assert np.abs(vector(found["a"]) - vector(steps(tx)[0]["a"])).max() > 1e-3


def test_the_values_of_the_public_code():
    """L_t = ½(a_t · w − 1)², w₀ = (1, 1), λ = 0.2, learning rate 0.05, ρ = 0.3."""
    with x64():
        tx = sam_optax.simultaneous(optax.sgd(0.05), SAM, 0.2)
        on = lambda a: jax.grad(lambda w: 0.5 * (jnp.array(a) @ w - 1) ** 2)
        w = jnp.ones(2)
        state, previous = tx.init(w), on((3.0, 0.0))
        for a in ((3.0, 0.0), (0.0, 1.0), (1.0, 2.0)):
            functions = {"grad_fn": on(a), "previous_grad_fn": previous}
            updates, state = tx.update(None, state, w, **functions)
            w, previous = w + updates, on(a)
        np.testing.assert_allclose(w, [0.44540, 0.97080], atol=1e-5)


def test_a_step_evaluates_two_gradients():
    counted = Counted(gradient)
    tx = sam_optax.simultaneous(optax.sgd(0.1), SAM)
    tx.update(None, tx.init(W), W, grad_fn=counted, previous_grad_fn=counted)
    assert counted.calls == 2


def test_the_state_keeps_its_form_and_dtypes():
    half = {"a": jnp.ones(2, jnp.bfloat16)}
    for base, params in ((optax.adamw(1e-2), half), (optax.sgd(1e-2), {**half, "b": jnp.array(1)})):
        tx = sam_optax.simultaneous(base, SAM, optax.constant_schedule(0.5))
        state = tx.init(params)
        updates, after = tx.update(None, state, params, **BOTH)
        assert signature(after) == signature(state)
        assert updates["a"].dtype == jnp.bfloat16


def test_the_loss_does_in_place_of_its_gradient():
    w = {"a": W["a"]}
    tx = sam_optax.simultaneous(optax.sgd(0.1), SAM)
    loss = lambda p: jnp.sum(p["a"] ** 4) / 4
    found, _ = tx.update(None, tx.init(w), w, value_fn=loss, previous_grad_fn=gradient)
    assert_close(found, tx.update(None, tx.init(w), w, **BOTH)[0], 1e-6)


def test_schedules_of_the_perturbation_count_steps():
    tx = sam_optax.simultaneous(optax.sgd(0.1), sam_optax.sam(lambda step: 0.1 * step))
    _, state = steps(tx, 3)
    assert state.step == 3
    assert state.perturbation_state.step == 3


def test_what_is_missing_or_out_of_range():
    tx = sam_optax.simultaneous(optax.sgd(0.1), SAM)
    with pytest.raises(ValueError, match="simultaneous needs the params"):
        tx.update(None, tx.init(W))
    with pytest.raises(ValueError, match="needs a gradient function"):
        tx.update(None, tx.init(W), W, previous_grad_fn=gradient)
    with pytest.raises(ValueError, match="simultaneous needs previous_grad_fn"):
        tx.update(None, tx.init(W), W, grad_fn=gradient)
    with pytest.raises(ValueError, match=r"lmbda must be in \[0, 1\], got 1.5"):
        sam_optax.simultaneous(optax.sgd(0.1), SAM, 1.5)
    with pytest.raises(ValueError, match="the perturbation has a start"):
        sam_optax.simultaneous(optax.sgd(0.1), sam_optax.rsam(key=0))
    with pytest.raises(TypeError, match="base_tx"):
        sam_optax.simultaneous(0.1, SAM)
    other = sam_optax.sharpness_aware(optax.sgd(0.1), SAM)
    with pytest.raises((TypeError, ValueError), match="SimultaneousState"):
        tx.update(None, other.init(W), W, grad_fn=gradient)


def test_grads_are_not_used():
    tx = sam_optax.simultaneous(optax.sgd(0.1), SAM)
    given = tx.update(jax.tree.map(jnp.ones_like, W), tx.init(W), W, **BOTH)
    assert_same(given, tx.update(None, tx.init(W), W, **BOTH))
