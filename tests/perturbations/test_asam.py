"""ASAM against its formula, its bias rule, its limits and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from helpers import assert_close, leaves, norm, vector, x64

import sam_optax


def tree(dtype=jnp.float32, seed=0):
    """Params or a gradient; leaves in order: conv bias, conv kernel, dense b, dense w."""
    rng = np.random.default_rng(seed)
    shapes = {"conv": {"bias": (3,), "kernel": (2, 1, 2, 3)}, "dense": {"b": (2,), "w": (4, 2)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


BIASES = [True, False, True, False]
FILTERS = [None, -1, None, None]


def displacement(params, grads, **arguments):
    method = sam_optax.asam(**{"rho": 0.3, "eta": 0.01, **arguments})
    return method.update(grads, method.init(params), params)[0]


@pytest.mark.parametrize(
    ("normalization", "p"),
    [*(("elementwise", p) for p in (1, 1.5, 2, 3, np.inf)), ("filterwise", 2), ("filterwise", 3)],
)
def test_is_the_papers_formula(normalization, p):
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        eps = displacement(w, g, p=p, normalization=normalization)
        filters = FILTERS if normalization == "filterwise" else None
        expected = references.asam(leaves(w), leaves(g), 0.3, 0.01, BIASES, filters, p)
        assert_close(eps, expected, 1e-13)
        operator = references.normalization(leaves(w), 0.01, BIASES, filters)
        in_units = [e / t for e, t in zip(leaves(eps), operator, strict=True)]
        assert norm(in_units, p) == pytest.approx(0.3, rel=1e-12)


def test_of_known_values():
    w, g = {"w": jnp.array([2.0, -0.5])}, {"w": jnp.array([1.0, 1.0])}
    np.testing.assert_allclose(
        displacement(w, g, rho=0.5, eta=0.0)["w"], [0.970143, 0.060634], atol=1e-6
    )
    in_units = np.float64(displacement(w, g, rho=0.5)["w"]) / [2.01, 0.51]
    assert np.linalg.norm(in_units) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("normalization", ["elementwise", "filterwise"])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_zero_weights_and_no_eta(p, normalization):
    w, g = {"w": jnp.zeros((2, 1, 2, 3))}, {"w": jnp.ones((2, 1, 2, 3))}
    assert norm(displacement(w, g, eta=0.0, p=p, normalization=normalization)) == 0
    # A single weight that is not zero takes the whole radius.
    w = {"w": w["w"].at[0, 0, 0, 0].set(2.0)}
    eps = vector(displacement(w, g, eta=0.0, p=p))
    np.testing.assert_allclose(eps, [0.6] + 11 * [0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "weight"), [(1e-18, 1.0), (1e-16, 0.0), (1e18, 0.0), (1e18, 1.0), (1e16, 1e2)]
)
@pytest.mark.parametrize("normalization", ["elementwise", "filterwise"])
def test_range_times_the_weights(normalization, value, weight):
    """The norm is that of T g, which has to stay between 1e-18 and 1e18."""
    w, g = ({"kernel": jnp.full((2, 1, 2, 3), x)} for x in (weight, value))
    eps = displacement(w, g, normalization=normalization)
    operator = (weight * (2 if normalization == "filterwise" else 1)) + 0.01
    assert norm(eps) / operator == pytest.approx(0.3, rel=0.01)


def test_wrong_formulas_are_told_apart():
    """Negative controls, each seen in some implementation."""
    w, g = tree(seed=0), tree(seed=1)
    t = references.flatten(references.normalization(leaves(w), 0.01, BIASES))
    t_biased = np.abs(vector(w)) + 0.01
    t_eta_on_biases = np.where(t == 1, 1.01, t)
    v, eps = vector(g), vector(displacement(w, g))
    wrong = {
        "T^2 g / |T^2 g|": 0.3 * t**2 * v / np.linalg.norm(t**2 * v),
        "biases normalized": 0.3 * t_biased**2 * v / np.linalg.norm(t_biased * v),
        "eta on biases": 0.3 * t_eta_on_biases**2 * v / np.linalg.norm(t_eta_on_biases * v),
    }
    for name, other in wrong.items():
        assert np.abs(eps - other).max() > 1e-3, name


@pytest.mark.parametrize(
    ("mask", "biases"),
    [
        ({"conv": np.bool_(False), "dense": {"b": False, "w": True}}, [False, False, False, True]),
        (lambda params: {"conv": True, "dense": False}, [True, True, False, False]),
        (False, [False] * 4),
        (True, [True] * 4),  # which is SAM
    ],
)
def test_bias_mask_overrides_names(mask, biases):
    w, g = tree(seed=0), tree(seed=1)
    expected = references.asam(leaves(w), leaves(g), 0.3, 0.01, biases)
    assert_close(displacement(w, g, bias_mask=mask), expected, 2e-6)


def of_names(path, leaf):
    return -1 if path[0].key.startswith("conv") else None


@pytest.mark.parametrize(
    ("axis", "of_conv", "of_conv1d"),
    [(-1, -1, None), (0, 0, None), (-2, -2, None), (of_names, -1, -1)],
)
def test_filter_axes(axis, of_conv, of_conv1d):
    """A leaf with three axes, as those of attention, has filters only if a function says so."""
    rng = np.random.default_rng(0)
    shapes = {"conv": (3, 3, 2, 4), "conv1d": (5, 2, 4), "query": (5, 2, 4)}
    w = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    eps = displacement(w, w, normalization="filterwise", filter_axis=axis)
    filters = [of_conv, of_conv1d, None]
    expected = references.asam(leaves(w), leaves(w), 0.3, 0.01, [False] * 3, filters)
    assert_close(eps, expected, 2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"normalization": "filterwise", "filter_axis": 4},
            r"axis 4 .*\['conv'\]\['kernel'\].* 4 axes",
        ),
        ({"bias_mask": {"conv": True}}, "bias_mask must be a pytree of booleans"),
        ({"bias_mask": {"conv": True, "dense": 0.5}}, "bias_mask must be a pytree of booleans"),
        ({"bias_mask": "bias"}, "bias_mask must be a pytree of booleans"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        displacement(tree(), tree(), **arguments)


def test_params_are_needed():
    with pytest.raises(ValueError, match="asam needs the params"):
        sam_optax.asam().update(tree(), ())
