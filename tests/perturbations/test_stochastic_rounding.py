"""`stochastic_rounding`: neighbours on the grid, right in the mean, and what that is good for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, same

import sam_optax
from sam_optax._perturbations.stochastic_rounding import (
    StochasticRoundingState,
    round_to,
    stochastic_rounding,
)

KEY = jax.random.key(11)
LOW = [jnp.bfloat16, jnp.float16]
DRAWS = 2000


def exact(array):
    return np.asarray(array).astype(np.float64)


@functools.cache
def draws(dtype):
    """Params, ε (in float32) and many rounded points: all scales, signs, zero, powers of two."""
    rng = np.random.default_rng(0)
    spread = rng.normal(size=60) * np.exp(rng.uniform(-14, 3, 60))
    offsets = rng.normal(size=60) * np.exp(rng.uniform(-12, -2, 60))
    # Zero, powers of two, and what float16 has below its normal range.
    params = jnp.asarray([0, 1, -1, 2, -0.25, 0, 2e-5, *spread], dtype)
    eps = jnp.asarray([1e-3, -1e-3, 1e-3, -1e-5, 1e-5, 2e-8, -2e-8, *offsets], jnp.float32)
    method = stochastic_rounding(optax.identity(), key=KEY)

    @jax.jit
    def draw(state, _):
        perturbed, state = method.perturb_fn(params, eps, state)
        return state, perturbed

    _, points = jax.lax.scan(lambda s, x: draw(s, x), method.init(params), length=DRAWS)
    return exact(params), exact(eps), exact(points)


def neighbours(target, dtype):
    """The number of ``dtype`` nearest to each target, and the next on the target's other side."""
    near = exact(target.astype(dtype))
    toward = np.where(target > near, np.inf, -np.inf)
    return near, exact(np.nextafter(near.astype(dtype), toward.astype(dtype)))


@pytest.mark.parametrize("dtype", LOW)
def test_points_are_the_two_neighbours_and_their_mean_is_the_perturbed_point(dtype):
    """Within 4.5 standard deviations (and three draws, where few go the rarer way)."""
    params, eps, points = draws(dtype)
    target = params + eps
    near, other = neighbours(target.astype(np.float32), dtype)
    rounded = near != target.astype(np.float32)
    assert np.all((points == near) | ((points == other) & rounded))
    deviation = np.sqrt(np.abs((target - near) * (other - target)) / DRAWS)
    bound = 4.5 * deviation + 3 * np.abs(other - near) / DRAWS
    bound += 2.0**-23 * np.abs(target)  # the digits of w + ε itself
    assert np.all(np.abs(points.mean(axis=0) - target) < bound)
    assert np.mean(np.abs(near - target) > 3 * bound) > 0.3  # rounding to nearest would fail


def test_float32_and_other_leaves_are_the_inner_perturbations():
    params = {"w": jnp.array([3.0, 4.0]), "z": jnp.array([1 + 2j]), "n": jnp.arange(2), "x": None}
    grads = {**params, "n": jnp.zeros(2, int)}
    inner, method = sam_optax.sam(0.1), stochastic_rounding(sam_optax.sam(0.1), key=KEY)
    eps, state = method.update(grads, method.init(params), params)
    assert_same(eps, inner.update(grads, inner.init(params), params)[0])
    assert isinstance(state, StochasticRoundingState)


def test_each_step_and_each_leaf_has_draws_of_its_own():
    params = {"a": jnp.linspace(1, 2, 100, dtype=jnp.bfloat16)}
    params["b"] = params["a"]
    method = stochastic_rounding(sam_optax.sam(0.05), key=KEY)
    eps, state = jax.jit(method.update)(params, method.init(params), params)
    assert_same(eps, method.update(params, method.init(params), params)[0])
    assert not same(eps, method.update(params, state, params)[0])
    assert not same(eps["a"], eps["b"])


def test_around_a_random_start_and_inside_wrappers():
    params = {"a": jnp.ones(50, jnp.bfloat16), "b": jnp.ones(50, jnp.bfloat16)}
    grads = jax.tree.map(lambda w: 0.5 * w, params)
    rsam = sam_optax.rsam(0.05, 0.1, key=KEY)
    method = stochastic_rounding(rsam, key=KEY)
    assert method.has_start
    state = method.init(params)
    assert_same(method.start_fn(params, state), rsam.start_fn(params, rsam.init(params)))
    only = sam_optax.perturb_only(method, {"a": True, "b": False})
    point, _ = only.perturb_fn(params, grads, only.init(params))
    assert_same(point["b"], params["b"])
    assert not same(point["a"], params["a"])
    lost = sam_optax.as_perturbation(optax.chain(method))
    with pytest.raises(ValueError, match="random start"):
        lost.init(params)


@pytest.mark.parametrize("dtype", [*LOW, jnp.float32])
def test_round_to_is_the_cast(dtype):
    rng = np.random.default_rng(3)
    x = (rng.normal(size=10**5) * np.exp(rng.uniform(-25, 9, 10**5))).astype(np.float32)
    rounded = np.asarray(jax.jit(lambda x: round_to(x, dtype))(x))
    np.testing.assert_array_equal(rounded, x.astype(dtype).astype(np.float32))


def test_errors():
    method = stochastic_rounding(sam_optax.sam(), key=KEY)
    with pytest.raises(ValueError, match="needs the params"):
        method.update(jnp.ones(2), method.init(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"use perturb_dtype=jnp\.float32 without it"):
        stochastic_rounding(sam_optax.low_pass(key=KEY), key=KEY)
    assert stochastic_rounding(sam_optax.sam(), key=KEY).init({}).inner_state == ()
