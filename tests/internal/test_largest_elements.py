"""The k largest of a tree: exactly k, ties at random, whatever the scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import vector

from sam_optax._internal import largest_elements, noise


@jax.jit
def largest(scores, among, k, key):
    return largest_elements.largest(jax.tree.map(largest_elements.rank, scores), among, k, key)


def cut(values):
    return {"a": jnp.asarray(values[:20]).reshape(4, 5), "b": jnp.asarray(values[20:])}


def choose(values, k, seed=0, among=None):
    among = np.ones(30, bool) if among is None else among
    key = noise.first_key(jax.random.key(seed))
    return vector(largest(cut(values.astype(np.float32)), cut(among), k, key)) == 1


SCORES = {
    "equal": np.full(30, 0.1),  # whose last bit is set
    "three values": np.repeat([3.0, 1.0, 2.0], 10),
    "range of float32": np.logspace(-38, 38, 30),
    "nan": np.full(30, np.nan),
    "some nan": np.where(np.arange(30) % 2, np.nan, np.arange(30.0) + 1),
    "infinite": np.repeat([np.inf, 1.0], 15),
}


@pytest.mark.parametrize("name", SCORES)
def test_exactly_k_and_the_largest(name):
    values = np.nan_to_num(np.abs(SCORES[name]), posinf=np.inf)  # NaN counts as 0
    for k in (0, 1, 15, 29, 30):
        chosen = choose(SCORES[name], k)
        assert chosen.sum() == k
        if 0 < k < 30:
            assert values[chosen].min() >= values[~chosen].max()


@pytest.mark.parametrize("name", ["three values", "nan"])
def test_ties_are_broken_at_random(name):
    draws = np.stack([choose(SCORES[name], 5, seed) for seed in range(60)])
    tied = SCORES[name] == 3 if name == "three values" else np.ones(30, bool)
    assert draws[:, ~tied].sum() == 0
    share = draws[:, tied].mean(0)  # 5 of those that are tied
    assert np.all(np.abs(share - 5 / tied.sum()) < 4.5 * 0.5 / np.sqrt(60))
    assert share.min() > 0


def test_only_among_those_that_may_be_chosen():
    values, among = np.arange(30.0), np.arange(30) % 3 == 0
    chosen = choose(values, 4, among=among)
    np.testing.assert_array_equal(np.flatnonzero(chosen), [18, 21, 24, 27])
