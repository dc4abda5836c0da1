"""The generator: its distribution, and the bits that it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from bits import SIZE, WORDS, planes

from sam_optax._internal import generator

# ---------------------------------------------------------------- distribution


def quantiles(monkeypatch):
    """Every value that ``normal`` can take, by the sum of its three integers."""
    sums = np.arange(2047 + 2047 + 1023 + 1, dtype=np.uint32)
    low, middle = np.minimum(sums, 2047), np.minimum(np.maximum(sums, 2047) - 2047, 2047)
    high = sums - low - middle
    words = (high << 22) | (middle << 11) | low
    with monkeypatch.context() as patched:
        patched.setattr(generator, "hash_words", lambda x, words_: jnp.asarray(words))
        return np.float64(generator.normal(jnp.zeros(2, jnp.uint32), sums.shape))


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


# ---------------------------------------------------------------- bits


def random_bits(words, shape):
    return np.asarray(generator.bits(words, shape))


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.slow
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


def test_either_word_decides_the_noise():
    """One bit of the first word, or another second word, gives independent noise."""
    words = np.asarray(WORDS[0])
    rng = np.random.default_rng(0)
    flipped = [words ^ np.array([1 << bit, 0], np.uint32) for bit in range(32)]
    second = [np.array([words[0], rng.integers(2**32)], np.uint32) for _ in range(32)]
    draw_many = jax.jit(jax.vmap(lambda w: generator.normal(w, (SIZE,))))
    z, *others = np.float64(draw_many(np.stack([words, *flipped, *second])))
    assert np.abs(np.asarray(others) @ z / SIZE).max() < 5 / np.sqrt(SIZE)


def test_uniform():
    u = np.float64(generator.uniform(generator.bits(WORDS[0], (1_000_000,))))
    assert 0 <= u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
    assert scipy.stats.kstest(u, "uniform").pvalue > 1e-4
