"""R-SAM's noise: its covariance, its distribution, and the bits that it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import scipy.stats
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
    return draw(kernels(), 0.1)


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


def test_mean_is_0(samples):
    z = samples.mean(0) / samples.std(0) * np.sqrt(DRAWS)
    assert np.abs(z).max() < 4.5


def test_elements_kernels_and_leaves_are_uncorrelated(samples):
    correlation = np.corrcoef(samples.T) - np.eye(samples.shape[1])
    assert np.abs(correlation).max() < 5 / np.sqrt(DRAWS)
    magnitude = np.corrcoef(np.abs(samples).T) - np.eye(samples.shape[1])
    assert np.abs(magnitude).max() < 5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_successive_steps_are_uncorrelated(samples, lag):
    z = (samples - samples.mean(0)) / samples.std(0)
    for a in (z, np.abs(z) - np.abs(z).mean(0)):
        assert np.abs(a[:-lag].T @ a[lag:]).max() / (DRAWS - lag) < 5 / np.sqrt(DRAWS)


def test_marginals_are_normal(samples):
    z = samples / samples.std(0)
    for element in z.T:
        assert scipy.stats.kstest(element, "norm").statistic < 2.2 / np.sqrt(DRAWS)


def test_large_leaves():
    """More than 2^16 elements: drawn on their own, with the same properties."""
    params = {"a": jnp.full((300, 300), 0.1), "b": jnp.full((300, 300), 0.1), "c": jnp.ones(50)}
    steps = 20
    rows = draw(params, 0.2, draws=steps)
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


# ---------------------------------------------------------------- distribution


def quantiles(monkeypatch):
    """Every value that ``normal`` can take, by the sum of its three integers."""
    sums = np.arange(2047 + 2047 + 1023 + 1, dtype=np.uint32)
    low, middle = np.minimum(sums, 2047), np.minimum(np.maximum(sums, 2047) - 2047, 2047)
    high = sums - low - middle
    words = (high << 22) | (middle << 11) | low
    with monkeypatch.context() as patched:
        patched.setattr(noise, "_hash", lambda x, words_: jnp.asarray(words))
        return np.float64(noise.normal(jnp.zeros(2, jnp.uint32), sums.shape))


def probabilities():
    """The exact distribution of that sum."""
    wide, narrow = np.full(2048, 1 / 2048), np.full(1024, 1 / 1024)
    return np.convolve(np.convolve(wide, wide), narrow)


def test_exact_distribution_is_normal(monkeypatch):
    values, pmf = quantiles(monkeypatch), probabilities()
    assert pmf.sum() == pytest.approx(1, abs=1e-12)
    assert np.all(np.diff(values) > 0)
    np.testing.assert_allclose(values, -values[::-1], atol=1e-5)
    assert pmf @ values**2 == pytest.approx(1, abs=1e-4)
    assert pmf @ values**4 == pytest.approx(3, abs=1e-3)
    upper, normal = np.cumsum(pmf), scipy.stats.norm.cdf(values)
    assert np.abs(upper - normal).max() < 4e-4
    assert np.abs(upper - pmf - normal).max() < 4e-4
    assert 4.5 < values[-1] < 5


@pytest.mark.parametrize("seed", range(3))
def test_a_million_draws(seed):
    """Kolmogorov–Smirnov, moments, and the frequency of each sum against its probability."""
    count = 1_000_000
    z = np.float64(noise.normal(noise.first_key(jax.random.key(seed)), (count,)))
    assert scipy.stats.kstest(z, "norm").statistic < 4e-4 + 1.9 / np.sqrt(count)
    assert z.mean() == pytest.approx(0, abs=4.5 / np.sqrt(count))
    assert z.var() == pytest.approx(1, abs=4.5 * np.sqrt(2 / count))
    assert scipy.stats.skew(z) == pytest.approx(0, abs=4.5 * np.sqrt(6 / count))
    assert scipy.stats.kurtosis(z, fisher=False) == pytest.approx(3, abs=4.5 * np.sqrt(24 / count))


@pytest.mark.parametrize("seed", range(3))
def test_values_repeat_as_often_as_chance_has_it(monkeypatch, seed):
    count = 1_000_000
    values, pmf = quantiles(monkeypatch), probabilities()
    z = np.float64(noise.normal(noise.first_key(jax.random.key(seed)), (count,)))
    index = np.searchsorted((values[1:] + values[:-1]) / 2, z)
    expected, observed = count * pmf, np.bincount(index, minlength=len(pmf))
    common = expected > 20
    statistic = np.sum((observed - expected)[common] ** 2 / expected[common])
    p_value = scipy.stats.chi2.sf(statistic, common.sum() - 1)
    assert 1e-5 < p_value < 1 - 1e-5  # too regular is as wrong as too irregular
    # Pairs of neighbours, coarsely: 16 equally likely cells for each.
    cell = np.minimum((scipy.stats.norm.cdf(z) * 16).astype(int), 15)
    pairs = np.bincount(cell[:-1] * 16 + cell[1:], minlength=256)
    outer = np.outer(np.bincount(cell), np.bincount(cell)).ravel() / count
    assert scipy.stats.chi2.sf(np.sum((pairs - outer) ** 2 / outer), 225) > 1e-5


# ---------------------------------------------------------------- bits


def random_bits(words, shape):
    return np.asarray(noise._hash(noise._index(shape), words))


def planes(bits):
    """±1 for each of the 32 bits: an array (elements, 32)."""
    columns = (bits.ravel()[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return 2 * columns.astype(np.float32) - 1


WORDS = [noise.first_key(jax.random.key(seed)) for seed in range(2)] + [
    jnp.array(pair, jnp.uint32) for pair in ((0, 0), (0, 1), (2**32 - 1, 2**32 - 1))
]
SIZE = 2**16


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_bit_planes_are_balanced_and_independent(words):
    x = planes(random_bits(words, (SIZE,)))
    bound = 5.5 / np.sqrt(SIZE)
    assert np.abs(x.mean(0)).max() < bound
    assert np.abs(x.T @ x / SIZE - np.eye(32)).max() < bound
    for distance in (1, 2, 3, 4, 8, 64, 256, 1000, 4096):  # neighbours along any axis
        assert np.abs(x[distance:].T @ x[:-distance] / SIZE).max() < bound


def test_elements_are_numbered_row_by_row():
    words = WORDS[0]
    flat = random_bits(words, (24,))
    np.testing.assert_array_equal(random_bits(words, (2, 3, 4)).ravel(), flat)
    np.testing.assert_array_equal(random_bits(words, ()), flat[0])


def test_no_two_elements_have_the_same_bits():
    assert len(np.unique(random_bits(WORDS[0], (SIZE,)))) == SIZE


def test_different_keys_are_independent():
    x = [planes(random_bits(noise.first_key(jax.random.key(s)), (SIZE,))) for s in range(4)]
    for i, a in enumerate(x):
        for b in x[:i]:
            assert np.abs(a.T @ b / SIZE).max() < 5.5 / np.sqrt(SIZE)


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
    method = sam_optax.rsam(gamma=0.1, noise_scale="isotropic", weighting="raw", key=0)
    delta = method.start_fn(params, method.init(params))["c"] - params["c"]
    delta = np.complex128(delta) / 0.1
    assert np.mean(np.abs(delta) ** 2) == pytest.approx(1, abs=0.02)
    assert np.mean(delta.real**2) == pytest.approx(0.5, abs=0.02)
    assert abs(np.mean(delta.real * delta.imag)) < 0.01
    assert abs(np.mean(delta)) < 0.02


def test_either_word_decides_the_noise():
    """One bit of the first word, or another second word, gives independent noise."""
    words = np.asarray(WORDS[0])
    rng = np.random.default_rng(0)
    flipped = [words ^ np.array([1 << bit, 0], np.uint32) for bit in range(32)]
    second = [np.array([words[0], rng.integers(2**32)], np.uint32) for _ in range(32)]
    draw_many = jax.jit(jax.vmap(lambda w: noise.normal(w, (SIZE,))))
    z, *others = np.float64(draw_many(np.stack([words, *flipped, *second])))
    assert np.abs(np.asarray(others) @ z / SIZE).max() < 5 / np.sqrt(SIZE)
