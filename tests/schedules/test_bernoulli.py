"""SS-SAM: random steps, a function of the key in the state and of the training step."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family import BASE, as_tree, gap, gradient, plain, run
from helpers import RuntimeCounted, assert_close, assert_same, signature, vector

import sam_optax

KEY = jax.random.key(6)
SAM = sam_optax.sam(0.3)


def decisions(when, steps=20_000, state=None):
    state = when.init() if state is None else state
    return np.asarray(jax.jit(jax.vmap(lambda t: when.decide(t, state)))(jnp.arange(steps)))


def sharp(p, key=KEY, **options):
    when = sam_optax.bernoulli(p, key=key)
    return sam_optax.sharpness_aware(BASE, SAM, when=when, **options)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.slow
def test_frequency_and_independence(p):
    answers = decisions(sam_optax.bernoulli(p, key=KEY))
    spread = np.sqrt(p * (1 - p) / answers.size)
    assert abs(answers.mean() - p) < 4 * spread
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


@pytest.mark.parametrize("p", [0, 0.0, 1, 1.0, lambda t: 0.0, lambda t: 1.0])
def test_never_and_always(p):
    answers = decisions(sam_optax.bernoulli(p, key=KEY))
    assert np.all(answers == bool(p(0) if callable(p) else p))


@pytest.mark.slow
def test_p_0_is_the_base_optimizer_and_p_1_is_the_method():
    assert gap(run(sharp(0.0), 3)[0], plain(steps=3)) < 1e-15
    assert gap(run(sharp(1.0), 3)[0], run(sam_optax.sharpness_aware(BASE, SAM), 3)[0]) < 1e-15
    tx, params = sharp(0.0), as_tree(np.arange(9.0), jnp.float32)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=lambda p: p)
    assert_same(updates, BASE.update(params, BASE.init(params))[0])


def test_a_run_of_known_decisions():
    """It perturbs at the steps that decide says, and at no others; compiled and eagerly."""
    tx, when = sharp(0.5), sam_optax.bernoulli(0.5, key=KEY)
    expected = decisions(when, 6)
    assert 0 < expected.sum() < 6
    grad_fn = RuntimeCounted(lambda p: 2 * p)
    w = jnp.array([3.0, 4.0])
    eager = lambda s: tx.update(None, s, w, grad_fn=grad_fn)
    for step in (eager, jax.jit(eager)):
        state, evaluations = tx.init(w), []
        for _ in range(6):
            before = grad_fn.evaluations
            _, state = step(state)
            jax.effects_barrier()
            evaluations.append(grad_fn.evaluations - before)
        np.testing.assert_array_equal(np.array(evaluations) == 2, expected)
        assert_same(state.when_state, tx.init(w).when_state)


def test_resumes_to_the_bit():
    """The key is in the state: an optimizer built with another key goes on with the saved one."""
    points, states = run(sharp(0.5), 6, jnp.float32)
    tx = sharp(0.5, key=jax.random.key(99))
    params, state = as_tree(points[2], jnp.float32), states[2]
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(tx.init(params), data)
    assert_same(pickle.loads(pickle.dumps(restored)), restored)
    assert np.asarray(restored.when_state).dtype == np.uint32

    @jax.jit
    def step(params, state, t):
        updates, state = tx.update(None, state, params, grad_fn=lambda p: gradient(p, t))
        return optax.apply_updates(params, updates), state

    state = jax.tree.map(jnp.asarray, restored)
    for t in range(3, 6):
        params, state = step(params, state, jnp.asarray(t, jnp.int32))
        np.testing.assert_array_equal(vector(params), points[t])


def test_scan_and_no_retrace():
    tx = sharp(0.5)
    w = jnp.array([3.0, 4.0])
    step = jax.jit(lambda s, w: tx.update(None, s, w, grad_fn=lambda p: p))
    state = tx.init(w)
    for _ in range(4):
        _, new = step(state, w)
        assert signature(new) == signature(state)
        state = new
    assert step._cache_size() == 1
    scan = lambda s, _: (step(s, w)[1], step(s, w)[0])
    scanned, updates = jax.jit(lambda s: jax.lax.scan(scan, s, None, 4))(tx.init(w))
    assert_close(scanned, state, 1e-6)
    assert len(np.unique(np.asarray(updates), axis=0)) == 4


@pytest.mark.slow
def test_devices_decide_alike():
    tx = sharp(0.5, axis_name="batch")
    w = jnp.array([3.0, 4.0])
    step = jax.pmap(
        lambda c, s: tx.update(None, s, w, grad_fn=lambda p: p**3 - c),
        axis_name="batch",
        devices=jax.devices()[:2],
    )
    state = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(w))
    for _ in range(4):
        updates, state = step(jnp.array([1.0, -3.0]), state)
        for leaf in jax.tree.leaves((updates, state)):
            assert_same(leaf[0], leaf[1])


def test_alternating_takes_the_same_steps():
    when = sam_optax.bernoulli(0.5, key=KEY)
    base = optax.sgd(0.1)
    both = sam_optax.alternating(base, SAM, when=when)
    single = sam_optax.sharpness_aware(base, SAM, when=when)
    w = v = jnp.array([1.0, -2.0])
    state, single_state = both.init(w), single.init(v)
    for perturbed in decisions(when, 5):
        for _ in range(2 if perturbed else 1):
            updates, state = both.update(w**3, state, w)
            w = optax.apply_updates(w, updates)
        updates, single_state = single.update(None, single_state, v, grad_fn=lambda v: v**3)
        v = optax.apply_updates(v, updates)
        assert_close(sam_optax.eval_params(w, state), v, 1e-6)
    assert int(state.step) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"p": -0.1}, ValueError, ["p must be in [0, 1]", "-0.1"]),
        ({"p": 1.1}, ValueError, ["p must be in [0, 1]", "1.1"]),
        ({"p": "half"}, TypeError, ["p must be", "'half'"]),
        ({"p": 0.5, "key": 0.5}, TypeError, ["key", "PRNG"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        sam_optax.bernoulli(**{"key": KEY, **arguments})
    for word in words:
        assert word in str(caught.value)


def test_when_must_be_a_function():
    with pytest.raises(TypeError, match=r"when must be a function .* got 0.5"):
        sam_optax.sharpness_aware(BASE, SAM, when=0.5)
