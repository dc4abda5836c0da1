"""Keys, and R-SAM's noise for a whole tree: its covariance and its independence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from bits import SIZE, WORDS, planes
from helpers import assert_same, leaves

import sam_optax
from sam_optax._internal import noise

DRAWS = 20_000


def kernels():
    rng = np.random.default_rng(0)
    return {
        "bias": jnp.asarray(rng.normal(size=3), jnp.float32),
        "conv": jnp.asarray(3 * rng.normal(size=(2, 1, 2, 3)), jnp.float32),
        "dense": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "scale": jnp.asarray(0.5),
    }


def draw(params, gamma, draws=DRAWS, **options):
    """δ₀ of successive steps: one row of all elements a step."""
    method = sam_optax.rsam(gamma=gamma, key=jax.random.key(3), **options)

    def step(state, _):
        start = method.start_fn(params, state)
        _, state = method.update(params, state, params)
        delta = jax.tree.map(lambda s, w: (s - w).ravel(), start, params)
        return state, jnp.concatenate(jax.tree.leaves(delta))

    run = jax.jit(lambda state: jax.lax.scan(step, state, length=draws)[1])
    return np.float64(run(method.init(params)))


@pytest.fixture(scope="module")
def samples():
    return draw(kernels(), 0.1, noise_scale="sqrt_norm")


def test_variance_of_each_kernel(samples):
    """γ² ‖w_j‖ within 5 %, for every element and for every kernel."""
    std = [references.kernel_std(w, 0.1) for w in leaves(kernels())]
    ratio = samples.var(0) / references.flatten(std) ** 2
    np.testing.assert_allclose(ratio, 1, atol=0.05)
    for element_ratios in references.unflatten(ratio, std):
        units = element_ratios.shape[-1] if element_ratios.ndim > 1 else 1
        by_kernel = element_ratios.reshape(-1, units).mean(0)
        np.testing.assert_allclose(by_kernel, 1, atol=0.05)
    # Negative control: read as a standard deviation, γ ‖w_j‖ is another noise.
    assert np.abs(samples.var(0) / references.flatten(std) ** 4 * 0.1**2 - 1).max() > 0.2


def test_elements_kernels_and_leaves_are_uncorrelated(samples):
    correlation = np.corrcoef(samples.T) - np.eye(samples.shape[1])
    assert np.abs(correlation).max() < 5 / np.sqrt(DRAWS)
    magnitude = np.corrcoef(np.abs(samples).T) - np.eye(samples.shape[1])
    assert np.abs(magnitude).max() < 5 / np.sqrt(DRAWS)


def test_large_leaves():
    """More than 2^16 elements: drawn on their own, with the same properties."""
    params = {"a": jnp.full((300, 300), 0.1), "b": jnp.full((300, 300), 0.1), "c": jnp.ones(50)}
    steps = 20
    rows = draw(params, 0.2, draws=steps, noise_scale="sqrt_norm")
    a, b, c = np.split(rows / rows.std(), [90_000, 180_000], axis=1)
    std = references.kernel_std(np.full((300, 300), 0.1), 0.2)[0, 0]
    assert rows[:, :180_000].std() == pytest.approx(std, rel=0.005)
    assert rows[:, 180_000:].std() == pytest.approx(0.2 * 50**0.25, rel=0.1)
    bound = 5 / np.sqrt(steps * 90_000)
    assert abs(np.mean(a * b)) < bound
    assert abs(np.mean(a[:-1] * a[1:])) < bound * 1.1
    assert abs(np.mean(a[:, 1:] * a[:, :-1])) < bound  # neighbours
    assert abs(np.mean(a[:, 300:] * a[:, :-300])) < bound  # one row apart
    assert abs(np.corrcoef(a[:, :50].ravel(), c.ravel())[0, 1]) < 5 / np.sqrt(steps * 50)
    assert not np.any(np.all(np.diff(rows, axis=0) == 0, axis=0))


def test_successive_keys_are_independent_and_do_not_cycle():
    key = noise.first_key(jax.random.key(0))
    _, keys = jax.lax.scan(lambda k, _: (noise.next_key(k), k), key, length=SIZE)
    keys = np.asarray(keys)
    assert len(np.unique(keys, axis=0)) == SIZE
    x = np.concatenate([planes(keys[:, 0]), planes(keys[:, 1])], axis=1)
    bound = 5.5 / np.sqrt(SIZE)
    assert np.abs(x.mean(0)).max() < bound
    assert np.abs(x.T @ x / SIZE - np.eye(64)).max() < bound
    assert np.abs(x[1:].T @ x[:-1] / SIZE).max() < bound


def test_draws_within_a_step_are_independent():
    """Keys of devices and of groups of the batch, beside the next step's key and their own."""
    key = WORDS[0]
    indices = jnp.arange(SIZE // 8)
    folded = np.asarray(jax.vmap(lambda i: noise.fold_in(key, i))(indices))
    several = np.concatenate([folded, np.asarray([key, noise.next_key(key)])])
    assert len(np.unique(several, axis=0)) == len(several)
    assert len(np.unique(folded)) == folded.size  # no word is shared either
    x = np.concatenate([planes(folded[:, 0]), planes(folded[:, 1])], axis=1)
    bound = 5.5 / np.sqrt(len(x))
    assert np.abs(x.mean(0)).max() < bound
    assert np.abs(x.T @ x / len(x) - np.eye(64)).max() < bound
    assert_same(noise.fold_in(key, None), key)


def test_complex_noise_has_the_variance_in_both_parts():
    params = {"c": jnp.full((200, 300), 1 + 1j), "r": jnp.ones((3, 2))}
    method = sam_optax.rsam(gamma=0.1, noise_scale="isotropic", key=jax.random.key(0))
    delta = method.start_fn(params, method.init(params))["c"] - params["c"]
    delta = np.complex128(delta) / 0.1
    assert np.mean(np.abs(delta) ** 2) == pytest.approx(1, abs=0.02)
    assert np.mean(delta.real**2) == pytest.approx(0.5, abs=0.02)
    assert abs(np.mean(delta.real * delta.imag)) < 0.01
    assert abs(np.mean(delta)) < 0.02


# ---------------------------------------------------------------- seeds


PARAMS = {"a": jnp.ones(3)}
SAM = sam_optax.sam()
MAKE = [sam_optax.rsam, sam_optax.low_pass]
MAKE += [functools.partial(sam_optax.random_start, SAM)]
MAKE += [functools.partial(sam_optax.stochastic_rounding, SAM)]
MAKE += [functools.partial(make, 0.5) for make in (sam_optax.sparsify, sam_optax.random_mask)]
KEYED = [lambda key, make=make: make(key=key).init(PARAMS) for make in MAKE]
KEYED += [
    lambda key: sam_optax.sharpness_aware(
        optax.sgd(0.1), SAM, when=sam_optax.bernoulli(0.5, key=key)
    ).init(PARAMS),
    lambda key: sam_optax.reweighted_ascent(lambda w, x: w["a"] * x, jnp.arange(3.0), key=key)(
        PARAMS
    ),
]


@pytest.mark.parametrize("make", KEYED)
def test_a_seed_is_the_key_of_that_seed(make):
    expected = make(jax.random.key(5))
    for seed in (5, np.int64(5), np.asarray(5), jnp.asarray(5)):
        assert_same(make(seed), expected)
    with pytest.raises(TypeError, match=r"key must be an integer seed or one PRNG key.*True"):
        make(True)


def test_seeds_are_those_of_jax():
    for seed in (-1, 2**31, 2**40 + 1, 2**63 - 1):  # JAX may keep 32 bits of them only
        assert_same(noise.first_key(seed), noise.first_key(jax.random.key(seed)))
    keys = [np.asarray(noise.first_key(seed)) for seed in range(100)]
    assert len(np.unique(keys)) == 200


# ---------------------------------------------------------------- draws of the caller's


def rademacher(key, shape, dtype):
    return jax.random.rademacher(key, shape, dtype)


def uniform(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -(3**0.5), 3**0.5)


def isotropic(params, draw, make=sam_optax.rsam):
    """The noise of a start, one vector for each leaf."""
    method = make(gamma=1.0, key=3, noise_scale="isotropic", draw=draw)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return [np.ravel(x) for x in leaves(method.start_fn(zeros, method.init(zeros)))]


RANDOM_START = lambda **options: sam_optax.random_start(sam_optax.asam(), **options)


@pytest.mark.parametrize("make", [sam_optax.rsam, RANDOM_START, sam_optax.low_pass])
@pytest.mark.parametrize("draw", [jax.random.normal, rademacher, uniform])
@pytest.mark.slow
def test_a_draw_of_the_callers(draw, make):
    params = {"big": jnp.ones((300, 300)), "small": jnp.ones((50, 60)), "one": jnp.ones(())}
    z = isotropic(params, draw, make)
    values = np.float64(np.concatenate(z))
    assert values.mean() == pytest.approx(0, abs=0.02)
    assert values.var() == pytest.approx(1, abs=0.02)
    fourth = {"normal": 3.0, "rademacher": 1.0, "uniform": 1.8}[draw.__name__]
    assert np.mean(values**4) == pytest.approx(fourth, rel=0.03)
    big, _, small = z
    assert abs(np.corrcoef(big[: small.size], small)[0, 1]) < 5 / np.sqrt(small.size)
    # Another key, another noise; the same key, the same.
    assert_same(isotropic(params, draw, make), z)
    assert not np.any(np.isclose(isotropic(params, None, make)[0], big, atol=1e-6).all())


def test_draws_work_whatever_kind_of_key_is_the_default():
    draw = lambda key, shape, dtype: jax.random.normal(key, shape, dtype)
    here = isotropic({"a": jnp.ones(4)}, draw)
    with jax.default_prng_impl("rbg"):
        method = sam_optax.rsam(gamma=1.0, key=3, noise_scale="isotropic", draw=draw)
        zeros = {"a": jnp.zeros(4)}
        there = method.start_fn(zeros, method.init(zeros))
    assert np.all(np.isfinite(there["a"]))
    assert not np.any(there["a"] == here[0])


@pytest.mark.parametrize("shape", [(), (7,)])
def test_a_draw_of_another_shape_is_refused(shape):
    method = sam_optax.rsam(key=3, draw=lambda key, _, dtype: jnp.ones(shape, dtype))
    w = {"a": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"draw must return an array .*\(6,\), got .*\("):
        method.start_fn(w, method.init(w))
