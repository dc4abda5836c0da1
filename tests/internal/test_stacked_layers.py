"""Layers that a scan has stacked on leading axes: what each of them gets alone, stacked."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

import sam_optax

# Drawing and statistics are not among the core's dependencies.
analysis = pytest.importorskip("sam_optax.analysis", exc_type=ImportError)

SHAPES = {"conv": (3, 3, 2, 4), "dense": (6, 4), "query": (6, 2, 3), "bias": (4,)}


def layer(seed, shapes=SHAPES):
    """A layer's leaves; every layer has another scale."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(10.0**seed * rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def as_list(tree, layers=2):
    return [jax.tree.map(lambda w, i=i: w[i], tree) for i in range(layers)]


def some_stacked(path, leaf):
    return 1 if path[0].key == "blocks" else 0


@pytest.mark.parametrize("axis", [pytest.param(-1, marks=pytest.mark.slow), 0])
def test_filters_of_asam_are_each_layers_own(axis):
    """Stacked, ε is that of the same layers in a list; one norm spans them all."""
    options = {"normalization": "filterwise", "filter_axis": axis}
    layers, grads = [layer(0), layer(1)], [layer(2), layer(3)]
    alone = sam_optax.asam(0.3, 0.01, **options)
    expected, _ = alone.update(grads, alone.init(layers), layers)
    method = sam_optax.asam(0.3, 0.01, **options, stack_axes=1)
    params = stacked(*layers)
    eps, _ = method.update(stacked(*grads), method.init(params), params)
    assert_close(as_list(eps), expected, 2e-6)
    # Negative control: without the option, filters are wrong, and attention's leaves are filters.
    other, _ = alone.update(stacked(*grads), alone.init(params), params)
    for name in ("conv", "query"):
        assert not np.allclose(other[name], stacked(*expected)[name], rtol=1e-2)


def test_only_some_leaves_are_stacked():
    options = {"normalization": "filterwise"}
    layers, stem = [layer(0), layer(1)], layer(2)
    params = {"blocks": stacked(*layers), "stem": stem}
    method = sam_optax.asam(0.3, 0.01, **options, stack_axes=some_stacked)
    eps, _ = method.update(params, method.init(params), params)
    listed = {"blocks": layers, "stem": stem}
    alone = sam_optax.asam(0.3, 0.01, **options)
    expected, _ = alone.update(listed, alone.init(listed), listed)
    assert_close({"blocks": as_list(eps["blocks"]), "stem": eps["stem"]}, expected, 2e-6)


def test_a_filter_axis_function_sees_one_layer():
    seen = {}

    def axis_of(path, leaf):
        seen[path[0].key] = leaf.shape, leaf.dtype
        return None

    params = stacked(layer(0), layer(1))
    method = sam_optax.asam(normalization="filterwise", filter_axis=axis_of, stack_axes=1)
    method.update(params, method.init(params), params)
    assert seen == {name: (shape, jnp.float32) for name, shape in SHAPES.items()}


def columns(norms):
    """A kernel (400, 50) per norm, whose columns all have it."""
    draw = np.random.default_rng(0).normal(size=(len(norms), 400, 50))
    unit = draw / np.linalg.norm(draw, axis=1, keepdims=True)
    return jnp.asarray(unit * np.array(norms)[:, None, None], jnp.float32)


@pytest.mark.slow
def test_directions_are_each_layers_own():
    """Columns of norm 10 in one layer and 0.1 in the other."""
    params = {"kernel": columns([10.0, 0.1])}
    d = analysis.random_direction(params, jax.random.key(0), stack_axes=1)["kernel"]
    norms = np.linalg.norm(d, axis=1)
    np.testing.assert_allclose(norms, np.repeat([[10.0], [0.1]], 50, axis=1), rtol=1e-5)
    mixed = analysis.random_direction(params, jax.random.key(0))["kernel"]
    assert np.linalg.norm(mixed[1], axis=0).min() > 1  # ten times its weights and more


@pytest.mark.parametrize("scale", ["relative", "norm", "sqrt_norm"])
def test_noise_of_stacked_layers(scale):
    """Kernels whose columns have norm 10 in one layer and 0.1 in the other: each has its own."""
    lengths = np.array([10.0, 0.1])
    params = {"kernel": columns(lengths)}
    expected = {"relative": lengths / 20, "norm": lengths, "sqrt_norm": lengths**0.5}[scale]

    def deviation(method):
        start = method.start_fn(params, method.init(params))["kernel"]
        return np.std(np.asarray(start - params["kernel"]), axis=(1, 2)) / 0.1

    for make in (sam_optax.rsam, sam_optax.low_pass):
        stacked = make(gamma=0.1, key=0, noise_scale=scale, stack_axes=1)
        np.testing.assert_allclose(deviation(stacked), expected, rtol=0.03)
    together = sam_optax.rsam(gamma=0.1, key=0, noise_scale=scale)
    assert deviation(together)[1] > 2 * expected[1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: sam_optax.asam(stack_axes=2).init(p), ["stack_axes=2", "1 axes", "['c']"]),
        (
            lambda p: sam_optax.asam(stack_axes=lambda path, leaf: 0.5).init(p),
            ["stack_axes must be an integer >= 0", "0.5"],
        ),
        (
            lambda p: analysis.random_direction(p, jax.random.key(0), stack_axes=-1),
            ["stack_axes must be an integer >= 0", "-1"],
        ),
        (
            lambda p: analysis.filter_normalized(p, p, kernel_axis=2, stack_axes=1),
            ["axis 2 is out of range", "2 axes in addition to 1 that stack layers"],
        ),
    ],
)
def test_errors_say_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        call({"c": jnp.ones(3), "k": jnp.ones((3, 2, 2))})
    for word in words:
        assert word in str(caught.value)
