"""SS-SAM: random steps, a function of the key in the state and of the training step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RuntimeCounted, assert_same

import sam_optax

KEY = jax.random.key(6)
SAM = sam_optax.sam(0.3)
W = jnp.array([3.0, 4.0])


def decisions(when, steps=20_000):
    state = when.init()
    return np.asarray(jax.jit(jax.vmap(lambda t: when.decide(t, state)))(jnp.arange(steps)))


def sharp(p, key=KEY, **options):
    when = sam_optax.bernoulli(p, key=key)
    return sam_optax.sharpness_aware(optax.sgd(0.1), SAM, when=when, **options)


def test_frequency_and_independence():
    p = 0.3
    answers = decisions(sam_optax.bernoulli(p, key=KEY))
    assert abs(answers.mean() - p) < 4 * np.sqrt(p * (1 - p) / answers.size)
    centred = (answers - p) / np.sqrt(p * (1 - p))
    for lag in (1, 2, 3, 7, 64):
        correlation = (centred[lag:] * centred[:-lag]).mean()
        assert abs(correlation) < 4 / np.sqrt(answers.size)
    other = decisions(sam_optax.bernoulli(p, key=jax.random.key(7)))
    assert abs((centred * (other - p)).mean()) < 4 / np.sqrt(answers.size)


def test_schedule_of_the_probability():
    when = sam_optax.bernoulli(lambda t: jnp.where(t < 10_000, 0.2, 0.8), key=KEY)
    answers = decisions(when)
    assert answers[:10_000].mean() == pytest.approx(0.2, abs=0.02)
    assert answers[10_000:].mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("p", [0, 1, 1.0, lambda t: 0.0, lambda t: 1.0])
def test_never_and_always(p):
    answers = decisions(sam_optax.bernoulli(p, key=KEY))
    assert np.all(answers == bool(p(0) if callable(p) else p))


def test_a_run_of_known_decisions():
    """It perturbs at the steps that decide says, and at no others; and the key stays."""
    tx, expected = sharp(0.5), decisions(sam_optax.bernoulli(0.5, key=KEY), 6)
    assert 0 < expected.sum() < 6
    grad_fn = RuntimeCounted(lambda p: 2 * p)
    step = jax.jit(lambda s: tx.update(None, s, W, grad_fn=grad_fn))
    state, evaluations = tx.init(W), []
    for _ in range(6):
        before = grad_fn.evaluations
        _, state = step(state)
        jax.effects_barrier()
        evaluations.append(grad_fn.evaluations - before)
    np.testing.assert_array_equal(np.array(evaluations) == 2, expected)
    assert_same(state.when_state, tx.init(W).when_state)


def test_the_key_of_the_state_decides():
    """An optimizer built with another key goes on with the saved one."""
    mine, other = sharp(0.5), sharp(0.5, key=jax.random.key(99))
    state = mine.init(W)
    assert np.asarray(state.when_state).dtype == np.uint32
    for step in range(8):
        state = state._replace(step=jnp.asarray(step, jnp.int32))
        assert_same(*(tx.update(None, state, W, grad_fn=lambda p: p)[0] for tx in (mine, other)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"p": -0.1}, ValueError, r"p must be in \[0, 1\], got -0.1"),
        ({"p": 1.1}, ValueError, r"p must be in \[0, 1\], got 1.1"),
        ({"p": "half"}, TypeError, "p must be .*'half'"),
        ({"p": 0.5, "key": 0.5}, TypeError, "key .*PRNG"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        sam_optax.bernoulli(**{"key": KEY, **arguments})
