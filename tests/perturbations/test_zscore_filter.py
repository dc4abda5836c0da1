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


def test_layers_are_filtered_alone():
    rng = np.random.default_rng(1)
    small, large = rng.normal(size=(4, 4)), 1e3 * rng.normal(size=(3, 5))
    found = kept({"a": jnp.asarray(small), "b": jnp.asarray(large)}, 0.8)
    assert np.count_nonzero(found["a"]) == 3
    assert np.count_nonzero(found["b"]) == 3


def test_leaves_with_fewer_than_two_axes_stay():
    tree = {"bias": jnp.array([1.0, 2.0, 9.0]), "scale": jnp.array(3.0), "kernel": jnp.eye(4)}
    found = kept(tree, 0.9)
    assert_same(found["bias"], tree["bias"])
    assert_same(found["scale"], tree["scale"])


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
