"""Weighted sums of both gradients: limits and numerics. (Whole runs: ``test_catalogue``.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family import BASE, LR
from helpers import assert_close, assert_same, vector

import sam_optax

RHO = 0.3
G, G_S = jnp.array([1.0, -0.3, 0.1]), jnp.array([0.7, 0.2, -1e-9])


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(weight, g, g_s, perturbed=True):
    """What it makes of an ascent gradient and a sharp one."""
    tx = sam_optax.mix_gradients(weight)
    return tx.update(g_s, (), ascent_grads=g, perturbed=perturbed)[0]


@pytest.mark.parametrize(("weight", "expected"), [(0.0, G), (1.0, G_S)])
def test_at_the_limits_a_gradient_is_handed_on_as_it_is(weight, expected):
    assert_same(apply(weight, G, G_S), expected)


def test_without_a_rise_the_decoupled_form_is_its_base_to_the_bit():
    tx = sam_optax.decoupled_sharpness(BASE, LR, 4.0)
    updates, _ = tx.update(G, tx.init(G), G, ascent_grads=G)
    assert_same(updates, BASE.update(G, BASE.init(G))[0])


def test_a_step_that_does_not_perturb_is_the_base_optimizers():
    """Also where a piece before has changed the sharp gradient, which is the ascent gradient."""
    tx = optax.chain(optax.scale(0.5), sam_optax.decoupled_sharpness(optax.sgd(1.0), 1.0, 4.0))
    g = {"a": jnp.array([1.0, 2.0])}
    updates, _ = tx.update(g, tx.init(g), g, ascent_grads=g, perturbed=False)
    assert_same(updates, {"a": -g["a"]})


def test_weight_decay_and_adam_of_the_decoupled_form():
    """Adam's moments see the plain gradient alone."""
    base = optax.adamw(LR, weight_decay=0.1)
    descent = sam_optax.decoupled_sharpness(base, LR, 2.0)
    tx = sam_optax.sharpness_aware(optax.identity(), sam_optax.sam(RHO), descent=descent)
    w = jnp.array([3.0, -4.0])
    updates, state = tx.update(None, tx.init(w), w, grad_fn=lambda w: w**3)
    alone, alone_state = base.update(w**3, base.init(w), w)
    assert_same(state.base_state, (alone_state, optax.EmptyState()))
    rise = (w + RHO * w**3 / jnp.linalg.norm(w**3)) ** 3 - w**3
    assert_close(updates, alone - LR * 2.0 * rise, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes_are_kept_and_sums_are_wide(dtype):
    """3 g_s − 2 g of numbers near float16's largest."""
    g, g_s = jnp.array([60_000, 1], dtype), jnp.array([50_000, 1], dtype)
    out = apply(3.0, g, g_s)
    assert out.dtype == dtype
    expected = -2 * vector(g) + 3 * vector(g_s)
    np.testing.assert_allclose(vector(out), expected, rtol=2.0**-7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sam_optax.mix_gradients(-1.0), ValueError, r"weight must be in \[0, inf\).*-1.0"),
        (lambda: sam_optax.mix_gradients("1"), TypeError, "weight must be .*'1'"),
        (lambda: sam_optax.decoupled_sharpness(0.1, 0.1, 1.0), TypeError, "base_tx must be .*0.1"),
        (lambda: sam_optax.decoupled_sharpness(BASE, -0.1, 1.0), ValueError, "learning_rate must"),
        (lambda: sam_optax.decoupled_sharpness(BASE, 0.1, -1.0), ValueError, "weight must be .*-1"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
