"""``sharpness_aware``: how often it evaluates the gradient, where, and that it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    Counted,
    RuntimeCounted,
    assert_close,
    assert_same,
    batches,
    init_mlp,
    mlp_loss,
    norm,
    same,
)
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
# Shared instances, so that what they compile is shared.
PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}


def gradient(p):
    return jax.tree.map(lambda x: 2 * x, p)


# ---------------------------------------------------------------- number of evaluations

# (name, grads given, ascent_steps) -> evaluations of grad_fn in one step.
EVALUATIONS = [
    ("sam", True, 1, 1),
    ("sam", False, 1, 2),
    ("asam", True, 1, 1),
    ("asam", False, 1, 2),
    ("fsam", True, 1, 1),
    ("fsam", False, 1, 2),
    ("rsam", True, 1, 2),
    ("rsam", False, 1, 2),
    ("only_sam", True, 1, 1),
    ("by_hand", False, 1, 2),
    ("sam", True, 3, 3),
    ("sam", False, 3, 4),
    ("rsam", True, 3, 4),
    ("rsam", False, 3, 4),
]


@pytest.mark.parametrize(("name", "given", "steps", "expected"), EVALUATIONS)
def test_evaluations_outside_of_jit(name, given, steps, expected):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name), ascent_steps=steps)
    grad_fn = Counted(gradient)
    grads = gradient(PARAMS) if given else None
    tx.update(grads, tx.init(PARAMS), PARAMS, grad_fn=grad_fn)
    assert grad_fn.calls == expected


@pytest.mark.parametrize(("name", "given", "steps", "expected"), EVALUATIONS)
@pytest.mark.fast("sam-*", "fsam-True-1-1", "rsam-False-1-2")
def test_evaluations_and_traces_under_jit(name, given, steps, expected):
    """The loss is traced once, however often the step evaluates its gradient."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name), ascent_steps=steps)
    grad_fn = RuntimeCounted(gradient)
    grads = gradient(PARAMS) if given else None
    step = jax.jit(lambda s, p, g: tx.update(g, s, p, grad_fn=grad_fn))
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = step(state, PARAMS, grads)
    jax.effects_barrier()
    assert grad_fn.evaluations == 2 * expected
    assert grad_fn.calls == 1


@pytest.mark.parametrize("name", ["sam", "rsam"])
def test_grads_are_the_ascent_gradient_but_for_random_starts(name):
    """Another batch's gradient directs SAM's ascent; R-SAM takes its own at its start."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name))
    state = tx.init(PARAMS)
    points = []

    def grad_fn(p):
        points.append(p)
        return gradient(p)

    other = {"a": jnp.array([0.0, 0.0]), "b": jnp.array(-5.0)}
    updates, _ = tx.update(other, state, PARAMS, grad_fn=grad_fn)
    own, _ = tx.update(None, state, PARAMS, grad_fn=gradient)
    if name == "sam":
        (point,) = points
        expected = {"a": PARAMS["a"], "b": jnp.array(2.7)}
        assert_close(point, expected, 1e-6)
        assert not same(updates, own)
    else:
        start = make(name).start_fn(PARAMS, state.perturbation_state)
        assert_close(points[0], start, 1e-7)
        assert_same(updates, own)


@pytest.mark.parametrize("name", [*FOUR, "only_sam", "by_hand"])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.slow
def test_grads_given_or_not_is_the_same_step(name, jit):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name))
    update = lambda g, s, p: tx.update(g, s, p, grad_fn=gradient)
    update = jax.jit(update) if jit else update
    given = update(gradient(PARAMS), tx.init(PARAMS), PARAMS)
    assert_close(update(None, tx.init(PARAMS), PARAMS), given, 1e-6)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["sam", "asam", "fsam", "rsam"])
@pytest.mark.fast("fsam")
def test_trains_under_scan(name):
    params = init_mlp()
    tx = sam_optax.sharpness_aware(optax.adam(0.03), make(name))
    x, y = (a[0] for a in batches(1))
    loss = lambda p: mlp_loss(p, x, y)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(None, state, params, grad_fn=jax.grad(loss))
        return (optax.apply_updates(params, updates), state), None

    (trained, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=100)
    assert float(loss(trained)) < 0.5 * float(loss(params))
    assert int(state.step) == 100
    assert int(state.skipped) == 0
    assert np.isfinite(norm(trained))
