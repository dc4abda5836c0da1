"""Gradients along several ascent steps, averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_close, assert_same, vector

import sam_optax

W = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}


def gradient(params):
    return jax.tree.map(lambda x: x**3, params)


def step(k, method, **options):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), method, **options)
    grad_fn = sam_optax.lookbehind(gradient, method, k)
    return tx.update(None, tx.init(W), W, grad_fn=grad_fn, ascent_grad_fn=gradient)[0]


def test_one_gradient_is_sam():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.3))
    sam, _ = tx.update(None, tx.init(W), W, grad_fn=gradient)
    assert_same(step(1, sam_optax.sam(0.3)), sam)


def test_it_is_the_mean_of_sam_with_more_and_more_ascent_steps():
    sam = sam_optax.asam(0.3)
    found = []
    for n in (1, 2, 3):
        tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam, ascent_steps=n)
        found.append(vector(tx.update(None, tx.init(W), W, grad_fn=gradient)[0]))
    np.testing.assert_allclose(vector(step(3, sam)), np.mean(found, axis=0), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_step_takes_k_plus_one_gradients(k):
    counted = Counted(gradient)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.3))
    grad_fn = sam_optax.lookbehind(counted, sam_optax.sam(0.3), k)
    tx.update(None, tx.init(W), W, grad_fn=grad_fn, ascent_grad_fn=counted)
    assert counted.calls == k + 1


def test_under_jit_it_is_one_loop():
    grad_fn = sam_optax.lookbehind(gradient, sam_optax.sam(0.3), 5)
    assert_close(jax.jit(grad_fn)(W), grad_fn(W), 1e-6)
    loops = [e for e in jax.make_jaxpr(grad_fn)(W).eqns if e.primitive.name in ("while", "scan")]
    assert len(loops) == 1


def test_low_precision_is_summed_in_float32():
    grad_fn = sam_optax.lookbehind(lambda p: p, optax.scale(0.0), 200)
    one = jnp.array(1.0, jnp.bfloat16)
    assert grad_fn(one) == 1
    assert grad_fn(one).dtype == jnp.bfloat16


def test_a_start_is_refused():
    with pytest.raises(ValueError, match=r"neither .* has a start: lookbehind"):
        sam_optax.lookbehind(gradient, sam_optax.rsam(key=0), 2)


def test_k_out_of_range():
    with pytest.raises(ValueError, match="k must be at least 1"):
        sam_optax.lookbehind(gradient, sam_optax.sam(), 0)
