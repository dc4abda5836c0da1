"""`stochastic_rounding`: neighbours on the grid, right in the mean, and what that is good for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, same, signature, vector

import sam_optax
from sam_optax._perturbations.perturbation_survival import perturbation_survival
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
@pytest.mark.slow
def test_points_are_the_two_neighbours(dtype):
    params, eps, points = draws(dtype)
    target = (params + eps).astype(np.float32)
    near, other = neighbours(target, dtype)
    assert np.all((points == near) | ((points == other) & (near != target)))
    assert np.mean(points == near) < 0.95


@pytest.mark.parametrize("dtype", LOW)
def test_mean_is_the_perturbed_point(dtype):
    """Within 4.5 standard deviations (and three draws, where few go the rarer way)."""
    params, eps, points = draws(dtype)
    target = params + eps
    near, other = neighbours(target.astype(np.float32), dtype)
    deviation = np.sqrt(np.abs((target - near) * (other - target)) / DRAWS)
    bound = 4.5 * deviation + 3 * np.abs(other - near) / DRAWS
    bound += 2.0**-23 * np.abs(target)  # the digits of w + ε itself
    assert np.all(np.abs(points.mean(axis=0) - target) < bound)
    assert np.mean(np.abs(near - target) > 3 * bound) > 0.3  # rounding to nearest would fail


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.fast("bfloat16")
def test_a_lost_perturbation_is_kept_on_average(dtype):
    rng = np.random.default_rng(1)
    params = jnp.asarray(rng.uniform(1, 2, size=200_000), dtype)
    grads = jnp.asarray(rng.normal(size=params.shape), dtype)
    nearest, rounded = sam_optax.sam(0.005), stochastic_rounding(sam_optax.sam(0.005), key=KEY)
    point, _ = nearest.perturb_fn(params, grads, nearest.init(params))
    assert_same(point, params)
    # The quotient's denominator is the wanted ε, that of the plain method.
    eps = exact(nearest.update(grads.astype(jnp.float32), nearest.init(params))[0])
    point, _ = rounded.perturb_fn(params, grads, rounded.init(params))
    spacing = 2.0 ** -jnp.finfo(dtype).nmant
    error = (exact(point) - exact(params)) @ eps / (eps @ eps) - 1
    assert abs(error) < 4 * np.sqrt(np.sum(np.abs(eps) ** 3 * spacing)) / (eps @ eps)
    assert abs(error) < 0.7


def test_restores_the_difference_that_the_ascent_makes():
    """L = ½ wᵀHw, so ∇L(w + ε) − ∇L(w) = Hε; rounding to nearest leaves 0 of it."""
    rng = np.random.default_rng(2)
    factor = rng.normal(size=(16, 32)) / 4
    hessian = jnp.asarray(factor.T @ factor, jnp.float32)
    params = jnp.asarray(rng.choice([-1, 1], 32) * rng.uniform(4, 8, 32), jnp.bfloat16)
    grad_fn = lambda w: hessian @ w.astype(jnp.float32)
    clean = grad_fn(params)

    def differences(method, steps):
        tx = sam_optax.sharpness_aware(optax.identity(), method)

        def step(state, _):
            sharp, state = tx.update(clean, state, params, grad_fn=grad_fn)
            return state, sharp - clean

        return exact(jax.lax.scan(step, tx.init(params), length=steps)[1])

    wanted = exact(hessian @ sam_optax.sam(0.03).update(clean, optax.EmptyState())[0])
    assert not np.any(differences(sam_optax.sam(0.03), 1))
    mean = differences(stochastic_rounding(sam_optax.sam(0.03), key=KEY), DRAWS).mean(axis=0)
    assert mean @ wanted / np.linalg.norm(mean) / np.linalg.norm(wanted) > 0.9


def test_float32_and_other_leaves_are_the_inner_perturbations():
    params = {"w": jnp.array([3.0, 4.0]), "z": jnp.array([1 + 2j]), "n": jnp.arange(2), "x": None}
    grads = {**params, "n": jnp.zeros(2, int)}
    inner, method = sam_optax.sam(0.1), stochastic_rounding(sam_optax.sam(0.1), key=KEY)
    eps, state = method.update(grads, method.init(params), params)
    assert_same(eps, inner.update(grads, inner.init(params), params)[0])
    assert isinstance(state, StochasticRoundingState)


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(11), jax.random.key(3, impl="rbg")])
@pytest.mark.slow
def test_state_keeps_its_signature_and_moves_on(key):
    params = jnp.linspace(1, 2, 100, dtype=jnp.bfloat16)
    method = stochastic_rounding(sam_optax.fsam(0.05), key=key)
    state = method.init(params)
    eps, new_state = jax.jit(method.update)(params, state, params)
    assert signature(new_state) == signature(state)
    assert_same(eps, method.update(params, method.init(params), params)[0])
    again = state._replace(key=new_state.key)
    assert not same(eps, method.update(params, again, params)[0])
    assert signature(eps) == signature(params)


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


@pytest.mark.slow
def test_survival_tells_how_noisy_it_is():
    """Against the rounded ε′ that the method intends, nothing more is lost."""
    params = jnp.linspace(1, 2, 1000, dtype=jnp.bfloat16)
    method = stochastic_rounding(sam_optax.sam(0.005), key=KEY)
    state = method.init(params)
    measured = perturbation_survival(method, params, params, state)
    np.testing.assert_allclose(measured, 1, rtol=1e-5)
    eps = vector(sam_optax.sam(0.005).update(params, optax.EmptyState())[0])
    assert np.linalg.norm(vector(method.update(params, state, params)[0])) > 3 * np.linalg.norm(eps)


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
    with pytest.raises(TypeError, match="perturbation"):
        stochastic_rounding(0.05, key=KEY)
