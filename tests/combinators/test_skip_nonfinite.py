"""Steps whose gradient is not finite: ``skip_nonfinite``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, norm, vector
from methods import FOUR, make, often

import sam_optax

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0, jnp.float32)}
BASE = optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9)
careful = functools.partial(sam_optax.sharpness_aware, skip_nonfinite=True)


def gradient(p, scale=1.0):
    """The gradient of a parabola; one element of it is multiplied by ``scale``."""
    return jax.tree.map(lambda x: 2 * x, p) | {"a": 2 * p["a"] * jnp.array([1.0, scale])}


@functools.cache
def stepper(name, skip=True):
    """One step of a method, compiled once for all tests."""
    tx = sam_optax.sharpness_aware(BASE, make(name), skip_nonfinite=skip)

    @jax.jit
    def step(grads, state, params, scale):
        return tx.update(grads, state, params, grad_fn=lambda p: gradient(p, scale))

    return tx, step


def assert_skipped(params, before, updates, after):
    assert_same(optax.apply_updates(params, updates), params)
    assert_same(after._replace(skipped=before.skipped), before)
    assert int(after.skipped) == int(before.skipped) + 1


@pytest.mark.parametrize("name", often(FOUR, "fsam"))
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_skipped_step_leaves_everything_as_it_was(name, value):
    """The ascent gradient, the sharp one, or both are not finite."""
    tx, step = stepper(name)
    _, state = step(gradient(PARAMS), tx.init(PARAMS), PARAMS, 1.0)
    broken = {
        "ascent": (gradient(PARAMS, value), 1.0),
        "sharp": (gradient(PARAMS), value),
        "both": (gradient(PARAMS, value), value),
    }
    if name == "rsam":  # does not use the gradient that is given
        del broken["ascent"]
    for grads, scale in broken.values():
        assert_skipped(PARAMS, state, *step(grads, state, PARAMS, scale))


@pytest.mark.parametrize("broken_step", [0, 1])
def test_what_an_earlier_ascent_step_left_in_the_state_counts(broken_step):
    """The gradient is infinite at w or one ascent step away; the last ones are finite."""
    tx, w = careful(BASE, make("fsam"), ascent_steps=3), jnp.array([1.0, 2.0])

    def grad_fn(p):
        steps = jnp.linalg.norm(p - w) / 0.3
        return jnp.where(jnp.abs(steps - broken_step) < 0.1, jnp.inf, jnp.ones_like(p))

    state = tx.init(w)
    assert_skipped(w, state, *tx.update(None, state, w, grad_fn=grad_fn))


def test_a_skipped_step_keeps_the_sign_of_zero():
    """−0 + 0 is +0: the update that leaves every number as it is, is −0."""
    tx, step = stepper("sam")
    params = {"a": jnp.array([1.0, -0.0]), "b": jnp.array(-0.0, jnp.float32)}
    updates, _ = step(gradient(params), tx.init(params), params, jnp.nan)
    assert_same(optax.apply_updates(params, updates), params)


def test_finite_steps_are_as_without_the_option_and_others_are_taken_without_it():
    (tx, with_it), (_, without) = stepper("fsam"), stepper("fsam", False)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        updates, new_state = with_it(gradient(params), state, params, 1.0)
        assert_close((updates, new_state), without(gradient(params), state, params, 1.0), 1e-6)
        params, state = optax.apply_updates(params, updates), new_state
    updates, state = without(gradient(PARAMS), tx.init(PARAMS), PARAMS, jnp.nan)
    assert not np.all(np.isfinite(vector(updates)))
    assert (int(state.step), int(state.skipped)) == (1, 0)


@pytest.mark.parametrize("jit", [True, False])
def test_an_infinite_ascent_gradient_does_not_reach_the_average(jit):
    """Also where the sharp gradient does not show it: the gradient of a linear loss."""
    tx = careful(optax.sgd(0.1), make("fsam"))
    linear = lambda p: jax.tree.map(jnp.ones_like, p)
    step = lambda g, s, p: tx.update(g, s, p, grad_fn=linear)
    state = tx.init(PARAMS)
    step = jax.jit(step) if jit else step
    assert_skipped(PARAMS, state, *step(gradient(PARAMS, jnp.inf), state, PARAMS))


def test_schedules_count_skipped_steps():
    """``when`` and those of perturbation and descent; the base optimizer knows of no such step."""
    points, asked, seen = [], [], []
    tx = careful(
        optax.scale_by_schedule(lambda t: t),
        sam_optax.sam(lambda t: 0.1 * (t + 1)),
        descent=optax.GradientTransformationExtraArgs(
            lambda params: (),
            lambda g, s, p, *, training_step, **extra: seen.append(int(training_step)) or (g, s),
        ),
        when=lambda t: asked.append(int(t)) or True,
    )
    state = tx.init(PARAMS)
    for t, scale in enumerate([1.0, jnp.nan, jnp.nan, 1.0]):
        grad_fn = lambda p, scale=scale: points.append(p) or gradient(p, scale)
        _, state = tx.update(gradient(PARAMS), state, PARAMS, grad_fn=grad_fn)
        moved = norm(jax.tree.map(jnp.subtract, points[-1], PARAMS))
        assert moved == pytest.approx(0.1 * (t + 1), rel=1e-5)
    assert asked == [0, 1, 2, 3]
    assert (seen[0], seen[-1]) == (0, 3)
    assert (int(state.step), int(state.skipped), int(state.base_state[1].count)) == (2, 2, 2)


def test_steps_that_do_not_perturb_are_skipped_too():
    tx = careful(BASE, make("sam"), when=sam_optax.after(5))
    step = jax.jit(lambda s, p: tx.update(None, s, p, grad_fn=lambda p: gradient(p, jnp.nan)))
    state = tx.init(PARAMS)
    assert_skipped(PARAMS, state, *step(state, PARAMS))


@pytest.mark.parametrize(("value", "skipped"), [(1.0, 0), (np.inf, 1)])
def test_integer_leaves_and_gradients_that_are_python_numbers(value, skipped):
    params = {"w": jnp.array([1.0, 2.0]), "x": jnp.array(1.0), "n": jnp.array(1)}
    base = optax.masked(optax.sgd(0.1), {"w": True, "x": True, "n": False})
    tx = careful(base, make("sam"))
    slope = jax.grad(lambda p: value * jnp.sum(p["w"] ** 2), allow_int=True)
    step = lambda s, p: tx.update(None, s, p, grad_fn=lambda p: slope(p) | {"x": 1.0})
    for run in (step, jax.jit(step)):
        updates, state = run(tx.init(params), params)
        assert int(state.skipped) == skipped
        assert updates["n"].dtype == jax.dtypes.float0
        assert float(updates["x"]) == pytest.approx(0 if skipped else -0.1)
