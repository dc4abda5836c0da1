"""What training loops do around a step: loss scaling, dropout, accumulation, devices, resuming."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, batches, init_mlp, mlp_loss, vector
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)

# Loss scaling.


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.slow
def test_loss_scaling(name):
    params = init_mlp()
    x, y = (a[0] for a in batches(1))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), make(name, 0.5))

    def grad_fn(scale):
        def unscaled(p):
            return jax.tree.map(
                lambda g: g / scale, jax.grad(lambda p: scale * mlp_loss(p, x, y))(p)
            )

        return unscaled

    state = tx.init(params)
    plain, scaled = (
        tx.update(grad_fn(scale)(params), state, params, grad_fn=grad_fn(scale))[0]
        for scale in (1.0, 1024.0)
    )
    assert_close(scaled, plain, 1e-5)


# The same dropout key in both passes.


def test_dropout_with_one_key():
    w = jnp.array([1.0, 2.0, 3.0, 4.0])
    key = jax.random.key(3)
    grad_fn = jax.grad(lambda w: jnp.sum(jax.random.bernoulli(key, 0.5, w.shape) * w))
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.5))
    updates, _ = tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)
    assert_same(updates, -grad_fn(w))


# Accumulation inside grad_fn averages both passes.


def test_accumulation_inside_grad_fn():
    a = jnp.array([1.0, 3.0])
    grad_fn = lambda w: jnp.mean(a * w)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1))
    w = jnp.array(1.0)
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=grad_fn)
    assert float(updates) == pytest.approx(-2.2, rel=1e-6)


# Synchronized and per-device perturbation.


@pytest.mark.parametrize(("synchronized", "expected"), [(True, 1.1), (False, 1.0)])
def test_synchronized_and_per_device_perturbation(synchronized, expected):
    mean = lambda x: jax.lax.pmean(x, "device")
    average = optax.stateless(lambda g, p: mean(g))
    tx = sam_optax.sharpness_aware(optax.chain(average, optax.sgd(1.0)), sam_optax.sam(0.1))

    def step(c, w):
        grad_fn = lambda w: mean(w - c) if synchronized else w - c
        return tx.update(None, tx.init(w), w, grad_fn=grad_fn)[0]

    c, w = jnp.array([1.0, -3.0]), jnp.zeros(2)
    updates = jax.jit(jax.vmap(step, axis_name="device"))(c, w)
    np.testing.assert_allclose(updates, -expected, rtol=1e-6)


# Resuming.


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("fsam")
def test_resume_in_the_middle(name):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), make(name, 0.5))
    x, y = batches(10)

    @jax.jit
    def step(params, state, x, y):
        grad_fn = lambda p: jax.grad(mlp_loss)(p, x, y)
        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    straight = (init_mlp(), tx.init(init_mlp()))
    for i in range(10):
        if i == 5:
            saved = flax.serialization.to_bytes(straight)
        straight = step(*straight, x[i], y[i])
    resumed = flax.serialization.from_bytes((init_mlp(), tx.init(init_mlp())), saved)
    halfway = resumed
    for i in range(5, 10):
        resumed = step(*resumed, x[i], y[i])
    assert_same(resumed, straight)
    assert not np.array_equal(vector(resumed), vector(halfway))
