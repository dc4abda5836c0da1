"""Loss scaling, static and dynamic: scaled equals unscaled, and skipped steps change nothing."""

import flax.training.dynamic_scale as ds
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
PARAMS = {"kernel": jax.random.normal(KEY, (4, 3)), "bias": jnp.zeros(3)}
BATCHES = jax.random.normal(jax.random.key(1), (4, 8, 4))


def loss(params, x, compute_dtype=jnp.float32):
    params = jax.tree.map(lambda p: p.astype(compute_dtype), params)
    x = x.astype(compute_dtype)
    return jnp.mean(jnp.tanh(x @ params["kernel"] + params["bias"]).astype(jnp.float32) ** 2)


def train(tx, grad_of, batches=BATCHES):
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state, x):
        grad_fn = lambda p: grad_of(p, x)
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    for x in batches:
        params, state = step(params, state, x)
    return params, state


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("scale", [1024.0, 2.0**15])
@pytest.mark.fast("1024.0-sam", "1024.0-fsam")
def test_static_scale(name, scale):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), make(name, 0.1))
    plain = train(tx, jax.grad(loss))

    def scaled(params, x):
        grads = jax.grad(lambda p: scale * loss(p, x))(params)
        return jax.tree.map(lambda g: g / scale, grads)

    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(train(tx, scaled)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_scaled_gradient_that_is_not_unscaled_differs():
    """The control: F-SAM's average and the base optimizer would see the scale."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("fsam", 0.1))
    _, state = train(tx, jax.grad(loss))
    _, wrong = train(tx, lambda p, x: jax.grad(lambda p: 1024 * loss(p, x))(p))
    ema, wrong_ema = state.perturbation_state[0].ema, wrong.perturbation_state[0].ema
    assert np.abs(wrong_ema["kernel"]).max() > 100 * np.abs(ema["kernel"]).max()


def dynamic_step(tx):
    """One step with Flax's DynamicScale; ``fail`` says which pass overflows (0: none)."""

    @jax.jit
    def step(params, state, scale, x, fail):
        def loss_fn(p, number):
            factor = jnp.where(fail == number, jnp.inf, 1.0)
            return loss(p, x, jnp.float16) * factor

        new_scale, _, _, grads = scale.value_and_grad(lambda p: loss_fn(p, 1))(params)
        grad_fn = lambda p: scale.value_and_grad(lambda q: loss_fn(q, 2))(p)[3]
        updates, new_state = tx.update(grads, state, params, grad_fn=grad_fn)
        # Either pass may overflow: the step counts in `skipped` and the scale backs off.
        finite = new_state.skipped == state.skipped
        lower = scale.replace(
            fin_steps=jnp.zeros_like(scale.fin_steps), scale=scale.scale * scale.backoff_factor
        )
        new_scale = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new_scale, lower)
        return optax.apply_updates(params, updates), new_state, new_scale

    return step


@pytest.mark.parametrize("name", ["sam", "asam", "fsam"])
@pytest.mark.parametrize("failing_pass", [1, 2])
@pytest.mark.fast("*-sam")
def test_dynamic_scale_skips_a_step_that_overflows_in_either_pass(name, failing_pass):
    tx = sam_optax.sharpness_aware(optax.adam(0.1), make(name, 0.1), skip_nonfinite=True)
    step = dynamic_step(tx)
    scale = ds.DynamicScale(scale=jnp.float32(2.0**10), fin_steps=jnp.int32(0))
    params, state = PARAMS, tx.init(PARAMS)
    params, state, scale = step(params, state, scale, BATCHES[0], 0)
    after = step(params, state, scale, BATCHES[1], failing_pass)
    assert int(after[1].skipped) == 1
    assert float(after[2].scale) == 2.0**9
    before = (params, state.perturbation_state, state.base_state, state.step)
    same = (after[0], after[1].perturbation_state, after[1].base_state, after[1].step)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
    # And training goes on.
    params, state, scale = step(*after, BATCHES[2], 0)
    assert np.isfinite(params["kernel"]).all()
    assert int(state.skipped) == 1
    assert int(state.step) == 2


def test_dynamic_scale_equals_no_scale():
    """float16 compute on a float32 master; the scale is a power of two."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("sam", 0.1), skip_nonfinite=True)
    step = dynamic_step(tx)
    results = []
    for size in (1.0, 2.0**6):
        scale = ds.DynamicScale(scale=jnp.float32(size), fin_steps=jnp.int32(0))
        carry = (PARAMS, tx.init(PARAMS), scale)
        for x in BATCHES:
            carry = step(*carry, x, 0)
        results.append(carry[0]["kernel"])
    np.testing.assert_allclose(results[0], results[1], atol=2e-3)  # float16 underflow differs
