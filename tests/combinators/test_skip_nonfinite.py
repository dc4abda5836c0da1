"""Steps whose gradient is not finite: ``skip_nonfinite``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, norm, vector
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0, jnp.float32)}
BASE = optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9)


def gradient(p, scale=1.0):
    """The gradient of a parabola; one element of it is multiplied by ``scale``."""
    return jax.tree.map(lambda x: 2 * x, p) | {"a": 2 * p["a"] * jnp.array([1.0, scale])}


@functools.cache
def stepper(name, jit, skip=True):
    """One step of a method, compiled once for all tests."""
    tx = sam_optax.sharpness_aware(BASE, make(name), skip_nonfinite=skip)

    def step(grads, state, params, scale):
        return tx.update(grads, state, params, grad_fn=lambda p: gradient(p, scale))

    return tx, jax.jit(step) if jit else step


def broken(kind):
    """(grads, scale) of a step with something that is not finite."""
    where, what = kind.split()
    value = float(what)
    if where == "ascent":
        return gradient(PARAMS, value), 1.0
    if where == "sharp":
        return gradient(PARAMS), value
    return None, value  # both


SHARP = [f"{where} {what}" for where in ("sharp", "both") for what in ("nan", "inf")]
CASES = [(name, kind) for name in FOUR for kind in SHARP]
# A random start does not use the gradient that is given.
CASES += [(name, f"ascent {what}") for name in FOUR for what in ("nan", "inf") if name != "rsam"]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.fast("True-sam-*", "True-fsam-*")
def test_skipped_step_leaves_everything_as_it_was(name, jit, kind):
    tx, step = stepper(name, jit)
    _, state = step(gradient(PARAMS), tx.init(PARAMS), PARAMS, 1.0)
    grads, scale = broken(kind)
    updates, skipped = step(grads, state, PARAMS, scale)
    assert_same(optax.apply_updates(PARAMS, updates), PARAMS)
    assert_same(skipped._replace(skipped=state.skipped), state)
    assert int(skipped.skipped) == 1


@pytest.mark.parametrize("broken_step", [0, 1])
def test_what_an_earlier_ascent_step_left_in_the_state_counts(broken_step):
    """The gradient is infinite at w or one ascent step away; the last ones are finite."""
    tx = sam_optax.sharpness_aware(BASE, make("fsam"), ascent_steps=3, skip_nonfinite=True)
    w = jnp.array([1.0, 2.0])
    state = tx.init(w)

    def grad_fn(p):
        steps = jnp.linalg.norm(p - w) / 0.3
        return jnp.where(jnp.abs(steps - broken_step) < 0.1, jnp.inf, jnp.ones_like(p))

    updates, skipped = tx.update(None, state, w, grad_fn=grad_fn)
    assert_same(optax.apply_updates(w, updates), w)
    assert_same(skipped._replace(skipped=state.skipped), state)
    assert int(skipped.skipped) == 1


@pytest.mark.parametrize("jit", [True, False])
def test_skipped_step_keeps_the_sign_of_zero(jit):
    """−0 + 0 is +0: the update that leaves every number as it is, is −0."""
    tx, step = stepper("sam", jit)
    params = {"a": jnp.array([1.0, -0.0]), "b": jnp.array(-0.0, jnp.float32)}
    updates, _ = step(None, tx.init(params), params, jnp.nan)
    assert_same(optax.apply_updates(params, updates), params)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("sam-*", "fsam-False", "rsam-False")
def test_finite_steps_are_as_without_the_option(name, jit):
    (tx, careful), (_, plain) = stepper(name, jit, True), stepper(name, jit, False)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        updates, new_state = careful(gradient(params), state, params, 1.0)
        expected = plain(gradient(params), state, params, 1.0)
        assert_close((updates, new_state), expected, 1e-6)
        params, state = optax.apply_updates(params, updates), new_state
    assert int(state.skipped) == 0


@pytest.mark.parametrize("jit", [True, False])
def test_without_the_option_the_step_is_taken(jit):
    """Negative control."""
    tx, step = stepper("fsam", jit, skip=False)
    updates, state = step(None, tx.init(PARAMS), PARAMS, jnp.nan)
    assert not np.all(np.isfinite(vector(updates)))
    assert not np.all(np.isfinite(vector(state)))
    assert (int(state.step), int(state.skipped)) == (1, 0)


@pytest.mark.parametrize("jit", [True, False])
def test_an_infinite_ascent_gradient_does_not_reach_the_average(jit):
    """Also where the sharp gradient does not show it: the gradient of a linear loss."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("fsam"), skip_nonfinite=True)
    linear = lambda p: jax.tree.map(jnp.ones_like, p)
    step = lambda g, s, p: tx.update(g, s, p, grad_fn=linear)
    grads = gradient(PARAMS, jnp.inf)
    updates, state = (jax.jit(step) if jit else step)(grads, tx.init(PARAMS), PARAMS)
    assert np.all(np.isfinite(vector(updates)))
    assert np.all(np.isfinite(vector(state)))


def test_schedules_count_skipped_steps():
    """Those of the perturbation, and ``when``; the base optimizer knows of no skipped step."""
    points, asked = [], []

    def when(t):
        asked.append(int(t))
        return True

    tx = sam_optax.sharpness_aware(
        optax.scale_by_schedule(lambda t: t),
        sam_optax.sam(lambda t: 0.1 * (t + 1)),
        skip_nonfinite=True,
        when=when,
    )
    state = tx.init(PARAMS)
    for t, scale in enumerate([1.0, jnp.nan, jnp.nan, 1.0]):

        def grad_fn(p, scale=scale):
            points.append(p)
            return gradient(p, scale)

        _, state = tx.update(gradient(PARAMS), state, PARAMS, grad_fn=grad_fn)
        moved = norm(jax.tree.map(jnp.subtract, points[-1], PARAMS))
        assert moved == pytest.approx(0.1 * (t + 1), rel=1e-5)
    assert asked == [0, 1, 2, 3]
    assert (int(state.step), int(state.skipped)) == (2, 2)
    assert int(state.base_state.count) == 2


def test_steps_that_do_not_perturb_are_skipped_too():
    tx = sam_optax.sharpness_aware(BASE, make("sam"), skip_nonfinite=True, when=sam_optax.after(5))
    step = jax.jit(lambda s, p: tx.update(None, s, p, grad_fn=lambda p: gradient(p, jnp.nan)))
    state = tx.init(PARAMS)
    updates, skipped = step(state, PARAMS)
    assert norm(updates) == 0
    assert_same(skipped._replace(skipped=state.skipped), state)
    assert int(skipped.skipped) == 1


def test_each_lane_of_a_vmap_skips_for_itself():
    tx, step = stepper("fsam", True)
    lanes = jax.vmap(step, in_axes=(None, None, None, 0))
    updates, states = lanes(None, tx.init(PARAMS), PARAMS, jnp.array([1.0, jnp.nan]))
    np.testing.assert_array_equal(states.skipped, [0, 1])
    np.testing.assert_array_equal(states.step, [1, 0])
    assert norm(jax.tree.map(lambda u: u[1], updates)) == 0
    assert norm(jax.tree.map(lambda u: u[0], updates)) > 0
    assert np.all(np.isfinite(vector(states)))


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize(("value", "skipped"), [(1.0, 0), (np.inf, 1)])
def test_integer_leaves(jit, value, skipped):
    params = {"w": jnp.array([1.0, 2.0]), "n": jnp.array(1)}
    base = optax.masked(optax.sgd(0.1), {"w": True, "n": False})
    tx = sam_optax.sharpness_aware(base, make("sam"), skip_nonfinite=True)
    grad_fn = jax.grad(lambda p: value * jnp.sum(p["w"] ** 2), allow_int=True)
    step = lambda s, p: tx.update(None, s, p, grad_fn=grad_fn)
    updates, state = (jax.jit(step) if jit else step)(tx.init(params), params)
    assert int(state.skipped) == skipped
    assert updates["n"].dtype == jax.dtypes.float0


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.slow
def test_gradients_that_are_python_numbers(jit):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("sam"), skip_nonfinite=True)
    step = lambda s, p: tx.update(None, s, p, grad_fn=lambda p: p | {"b": 1.0})
    updates, state = (jax.jit(step) if jit else step)(tx.init(PARAMS), PARAMS)
    assert int(state.step) == 1
    assert float(updates["b"]) == pytest.approx(-0.1)
