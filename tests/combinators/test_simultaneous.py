"""Two gradients at once, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_close, assert_same, signature, x64

import sam_optax
from sam_optax import simultaneous

SGD, SAM = optax.sgd(0.1), sam_optax.sam(0.3)
W = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}


def gradient(params):
    return jax.tree.map(lambda x: x**3 if jnp.issubdtype(x.dtype, jnp.inexact) else 0 * x, params)


BOTH = {"grad_fn": gradient, "previous_grad_fn": gradient}


def update(tx, params=W, grads=None, **functions):
    return tx.update(grads, tx.init(params), params, **(functions or BOTH))


def test_the_values_of_the_public_code():
    """Case 67. L_t = ½(a_t · w − 1)², w₀ = (1, 1), λ = 0.2, learning rate 0.05, ρ = 0.3."""
    with x64():
        tx = simultaneous(optax.sgd(0.05), SAM, 0.2)
        on = lambda a: jax.grad(lambda w: 0.5 * (jnp.array(a) @ w - 1) ** 2)
        w = jnp.ones(2)
        state, previous = tx.init(w), on((3.0, 0.0))
        for a in ((3.0, 0.0), (0.0, 1.0), (1.0, 2.0)):
            functions = {"grad_fn": on(a), "previous_grad_fn": previous}
            updates, state = tx.update(None, state, w, **functions)
            w, previous = w + updates, on(a)
        np.testing.assert_allclose(w, [0.44540, 0.97080], atol=1e-5)


def test_the_first_step_is_the_base_optimizers():
    """Whatever λ is: y₁ = w₀ although the base decays weights, and only the descent moves it."""
    base = optax.adamw(0.1, weight_decay=0.5)
    for lmbda in (0.0, 0.2, 1.0):
        updates, state = update(simultaneous(base, SAM, lmbda))
        expected = base.update(gradient(W), base.init(W), W)
        assert_close((updates, state.base_state), expected, 1e-6)


def test_a_step_evaluates_two_gradients_and_uses_no_other():
    counted, tx = Counted(gradient), simultaneous(SGD, SAM)
    given = update(tx, grads=W, grad_fn=counted, previous_grad_fn=counted)
    assert counted.calls == 2
    assert_same(given, update(tx))


def test_the_state_keeps_its_form_and_dtypes():
    params = {"a": jnp.ones(2, jnp.bfloat16), "n": jnp.array(1)}
    tx = simultaneous(optax.sgd(1e-2), SAM, optax.constant_schedule(0.5))
    updates, after = update(tx, params)
    assert signature(after) == signature(tx.init(params))
    assert updates["a"].dtype == jnp.bfloat16


def test_schedules_count_steps():
    asked = []
    lmbda = lambda step: asked.append(int(step)) or 0.5
    tx = simultaneous(SGD, sam_optax.sam(lambda step: 0.1 * step), lmbda)
    state = tx.init(W)
    for _ in range(3):
        _, state = tx.update(None, state, W, **BOTH)
    assert asked == [0, 1, 2]
    assert state.step == state.perturbation_state.step == 3


TX = simultaneous(SGD, SAM)
OTHER = sam_optax.sharpness_aware(SGD, SAM)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: TX.update(None, TX.init(W)), "simultaneous needs the params"),
        (lambda: update(TX, previous_grad_fn=gradient), "needs a gradient function"),
        (lambda: update(TX, grad_fn=gradient), "simultaneous needs previous_grad_fn"),
        (lambda: TX.update(None, OTHER.init(W), W, **BOTH), "SimultaneousState"),
        (lambda: simultaneous(SGD, SAM, 1.5), r"lmbda must be in \[0, 1\], got 1\.5"),
        (lambda: simultaneous(SGD, sam_optax.rsam(key=0)), "the perturbation has a start"),
        (lambda: simultaneous(0.1, SAM), "base_tx"),
    ],
)
def test_what_is_missing_or_out_of_range(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
