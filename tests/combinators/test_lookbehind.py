"""Lookbehind-SAM: several ascents on one batch, with a step of the base optimizer after each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_close, signature, x64

import sam_optax
from sam_optax import lookbehind

W = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}
SGD, SAM = optax.sgd(0.1), sam_optax.sam(0.3)
ADAMW = optax.adamw(0.1)


def gradient(params):
    return jax.tree.map(lambda x: x**3, params)


def steps(tx, n=3, params=W):
    state = tx.init(params)
    for _ in range(n):
        updates, state = tx.update(None, state, params, grad_fn=gradient)
        params = optax.apply_updates(params, updates)
    return params, state


def test_one_ascent_and_the_whole_way_are_sam():
    found, _ = steps(lookbehind(ADAMW, SAM, 1, 1.0))
    assert_close(found, steps(sam_optax.sharpness_aware(ADAMW, SAM))[0], 1e-6)


def test_with_momentum_it_has_the_values_of_the_public_code():
    """Case 71. L = Σ cosh w, w₀ = (1, −0.5); momentum 0.9, rate 0.1, ρ = 0.3, k = 3, α = 0.5."""
    with x64():
        tx = lookbehind(optax.sgd(0.1, momentum=0.9), SAM, 3, 0.5)
        w = jnp.array([1.0, -0.5])
        state = tx.init(w)
        for _ in range(3):
            updates, state = tx.update(None, state, w, grad_fn=jnp.sinh)
            w = w + updates
        np.testing.assert_allclose(w, [-1.16512, 0.49962], atol=1e-5)


def test_a_schedule_of_alpha_counts_steps():
    alpha, moves = optax.linear_schedule(0.2, 1.0, 2), {}
    for share in (alpha, 1.0):
        tx = lookbehind(ADAMW, SAM, 3, share)
        state = tx.init(W)._replace(step=jnp.asarray(1))
        moves[share], _ = tx.update(None, state, W, grad_fn=gradient)
    assert_close(moves[alpha], jax.tree.map(lambda x: 0.6 * x, moves[1.0]), 1e-6)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("k", [1, 4])
def test_a_step_takes_k_more_gradients_than_are_given(given, k):
    counted, tx = Counted(gradient), lookbehind(SGD, SAM, k)
    tx.update(gradient(W) if given else None, tx.init(W), W, grad_fn=counted)
    assert counted.calls == k + (not given)


def test_under_jit_it_is_one_loop():
    tx = lookbehind(SGD, SAM, 5)
    jaxpr = jax.make_jaxpr(lambda s: tx.update(None, s, W, grad_fn=gradient))(tx.init(W))
    assert len([e for e in jaxpr.eqns if e.primitive.name in ("while", "scan")]) == 1


def test_perturbations_with_state_and_low_precision():
    params = {"w": jnp.ones(2, jnp.bfloat16), "none": None}
    tx = lookbehind(optax.sgd(0.1, momentum=0.9), sam_optax.fsam(0.3), 2)
    found, after = steps(tx, 1, params)
    assert signature((found, after)) == signature((params, tx.init(params)))
    assert after.perturbation_state[0].count == 2


TX = lookbehind(SGD, SAM, 2)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: lookbehind(SGD, SAM, 0), "k must be at least 1"),
        (lambda: lookbehind(SGD, SAM, 2, 1.5), r"alpha must be in \[0, 1\]"),
        (lambda: lookbehind(SGD, SAM, 2, "other"), "alpha must be"),
        (lambda: lookbehind(SGD, sam_optax.rsam(key=0)), "must not have a start"),
        (lambda: lookbehind(SAM, SGD), "Exchange the arguments"),
        (lambda: TX.update(jnp.ones(()), TX.init(W), W, grad_fn=gradient), "grads must"),
        (lambda: TX.update({"o": W["a"]}, TX.init(W), W, grad_fn=gradient), "grads must"),
    ],
)
def test_what_is_refused(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
