"""ZSharp's filter against its formula and its limits."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, x64

import sam_optax


def kept(g, quantile):
    method = sam_optax.zscore_filter(quantile)
    return method.update(g, method.init(g))[0]


def by_sorting(g, quantile):
    z = np.abs((g - g.mean()) / g.std())
    return np.where(z > np.quantile(z, quantile), g, 0)


@pytest.mark.parametrize(
    ("shape", "quantile"), [((3, 7), 0.0), ((2, 2), 0.5), ((4, 5, 6), 0.77), ((3, 7), 0.95)]
)
def test_it_is_the_quantile_of_the_z_scores(shape, quantile):
    with x64():
        g = np.random.default_rng(0).normal(1.0, 2.0, shape)
        np.testing.assert_array_equal(kept(jnp.asarray(g), quantile), by_sorting(g, quantile))


@pytest.mark.parametrize("g", [jnp.full((3, 3), 2.0), jnp.ones((1, 1)), jnp.array([[0.0, 1.0]])])
def test_a_leaf_of_which_nothing_would_be_left_stays(g):
    """Equal elements, one element, and two that are as far from their mean."""
    assert_same(kept(g, 0.9), g)


def test_ties_at_the_quantile_are_dropped():
    g = jnp.array([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 4.0, -4.0]])
    np.testing.assert_array_equal(kept(g, 0.5), [[0, 0, 0, 0, 0, 0, 4, -4]])


def test_axes_of_sharded_params_are_refused():
    method = sam_optax.zscore_filter()
    message = "norm_axis_name='model' cannot be used with zscore_filter"
    with pytest.raises(ValueError, match=message):
        method.update(jnp.eye(2), method.init(jnp.eye(2)), norm_axis_name="model")
