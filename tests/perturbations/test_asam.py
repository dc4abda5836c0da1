"""ASAM against its formula, its bias rule, its limits and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from helpers import assert_close, assert_same, leaves, norm, precision, vector, x64

import sam_optax

ORDERS = [1, 1.5, 2, 3, np.inf]


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


@pytest.mark.parametrize("normalization", ["elementwise", "filterwise"])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float64, 1e-13), (jnp.float32, 2e-6)])
@pytest.mark.fast("float64-*")
def test_is_the_papers_formula(normalization, p, dtype, rtol):
    with precision(dtype):
        w, g = tree(dtype, 0), tree(dtype, 1)
        eps = displacement(w, g, p=p, normalization=normalization)
        filters = FILTERS if normalization == "filterwise" else None
        expected = references.asam(leaves(w), leaves(g), 0.3, 0.01, BIASES, filters, p)
        assert_close(eps, expected, rtol)


@pytest.mark.parametrize("normalization", ["elementwise", "filterwise"])
@pytest.mark.parametrize("p", ORDERS)
def test_radius_in_units_of_the_weights(normalization, p):
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        eps = displacement(w, g, p=p, normalization=normalization)
        filters = FILTERS if normalization == "filterwise" else None
        operator = references.normalization(leaves(w), 0.01, BIASES, filters)
        assert norm([e / t for e, t in zip(leaves(eps), operator, strict=True)], p) == (
            pytest.approx(0.3, rel=1e-12)
        )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.slow
def test_p_1_finds_the_largest_element_whatever_its_value(jit):
    method = sam_optax.asam(0.3, 0.01, p=1, bias_mask=False)
    update = jax.jit(method.update) if jit else method.update
    for seed in range(40):
        w, g = np.random.default_rng(seed).normal(size=(2, 8)).astype(np.float32)
        eps, _ = update(jnp.asarray(g), method.init(w), jnp.asarray(w))
        expected = references.asam([np.float64(w)], [np.float64(g)], 0.3, 0.01, [False], p=1)
        assert_close(eps, expected, 1e-5)


@pytest.mark.parametrize("p", [2 - 1e-7, 2 + 1e-7])
def test_general_formula_meets_p_2(p):
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        assert_close(displacement(w, g, p=p), displacement(w, g), 1e-6)


def test_is_sam_where_every_leaf_is_a_bias():
    w, g = tree(seed=0), tree(seed=1)
    assert_same(displacement(w, g, bias_mask=True), sam_optax.sam(0.3).update(g, ())[0])


def test_wrong_formulas_are_told_apart():
    """Negative controls, each seen in some implementation."""
    w, g = tree(seed=0), tree(seed=1)
    t = references.flatten(references.normalization(leaves(w), 0.01, BIASES))
    t_biased = np.abs(vector(w)) + 0.01
    t_eta_on_biases = np.where(t == 1, 1.01, t)
    v, eps = vector(g), vector(displacement(w, g))
    wrong = {
        "|w| g / |g|": 0.3 * np.abs(vector(w)) * v / np.linalg.norm(v),
        "T g / |T g|": 0.3 * t * v / np.linalg.norm(t * v),
        "T^2 g / |g|": 0.3 * t**2 * v / np.linalg.norm(v),
        "T^2 g / |T^2 g|": 0.3 * t**2 * v / np.linalg.norm(t**2 * v),
        "biases normalized": 0.3 * t_biased**2 * v / np.linalg.norm(t_biased * v),
        "eta on biases": 0.3 * t_eta_on_biases**2 * v / np.linalg.norm(t_eta_on_biases * v),
        "filterwise": vector(displacement(w, g, normalization="filterwise")),
    }
    for name, other in wrong.items():
        assert np.abs(eps - other).max() > 1e-3, name


@pytest.mark.parametrize(
    "mask",
    [
        {"conv": False, "dense": {"b": False, "w": True}},
        lambda params: {"conv": False, "dense": {"b": False, "w": True}},
        {"conv": {"bias": np.bool_(False), "kernel": False}, "dense": {"b": False, "w": True}},
    ],
)
def test_bias_mask_overrides_names(mask):
    w, g = tree(seed=0), tree(seed=1)
    expected = references.asam(leaves(w), leaves(g), 0.3, 0.01, [False, False, False, True])
    assert_close(displacement(w, g, bias_mask=mask), expected, 2e-6)


def test_bias_mask_false_normalizes_everything():
    w, g = tree(seed=0), tree(seed=1)
    expected = references.asam(leaves(w), leaves(g), 0.3, 0.01, [False] * 4)
    assert_close(displacement(w, g, bias_mask=False), expected, 2e-6)


@pytest.mark.parametrize("axis", [0, 1, -2, 3])
@pytest.mark.slow
def test_filter_axis_is_for_leaves_with_four_axes(axis):
    w, g = tree(seed=0), tree(seed=1)
    eps = displacement(w, g, normalization="filterwise", filter_axis=axis)
    filters = [None, axis, None, None]
    expected = references.asam(leaves(w), leaves(g), 0.3, 0.01, BIASES, filters)
    assert_close(eps, expected, 2e-6)


def test_filter_axis_by_function():
    w, g = tree(seed=0), tree(seed=1)

    def axis_of(path, leaf):
        return 1 if jax.tree_util.keystr(path) == "['dense']['w']" else None

    eps = displacement(w, g, normalization="filterwise", filter_axis=axis_of)
    expected = references.asam(leaves(w), leaves(g), 0.3, 0.01, BIASES, [None, None, None, 1])
    assert_close(eps, expected, 2e-6)


def attention_and_conv1d():
    """Two leaves of one shape, (d, heads, head_dim) and (width, in, out), and a convolution."""
    rng = np.random.default_rng(0)
    shapes = {"conv": (3, 3, 2, 4), "conv1d": (5, 2, 4), "query": (5, 2, 4)}
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


@pytest.mark.slow
def test_three_axes_are_not_a_convolution_by_default():
    w = attention_and_conv1d()
    eps = displacement(w, w, normalization="filterwise")
    assert_close(
        eps, references.asam(leaves(w), leaves(w), 0.3, 0.01, [False] * 3, [-1, None, None]), 2e-6
    )
    # Negative control: as filters, the leaves of three axes give another ε.
    filters = references.asam(leaves(w), leaves(w), 0.3, 0.01, [False] * 3, [-1, -1, -1])
    assert np.abs(vector(eps) - references.flatten(filters)).max() > 1e-2


def test_one_dimensional_convolutions_by_function():
    def axis_of(path, leaf):
        return -1 if path[0].key.startswith("conv") else None

    w = attention_and_conv1d()
    eps = displacement(w, w, normalization="filterwise", filter_axis=axis_of)
    expected = references.asam(leaves(w), leaves(w), 0.3, 0.01, [False] * 3, [-1, -1, None])
    assert_close(eps, expected, 2e-6)


def test_schedules_of_radius_and_eta():
    w, g = tree(seed=0), tree(seed=1)
    method = sam_optax.asam(rho=lambda t: 0.1 * (t + 1), eta=lambda t: 0.5 * t)
    state = method.init(w)
    for step in range(3):
        eps, state = method.update(g, state, w)
        expected = references.asam(leaves(w), leaves(g), 0.1 * (step + 1), 0.5 * step, BIASES)
        assert_close(eps, expected, 2e-6)


def test_params_are_needed():
    method = sam_optax.asam()
    with pytest.raises(ValueError, match="asam needs the params"):
        method.update(tree(), method.init(tree()))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rho": -1.0}, ValueError, ["rho", "-1.0", "[0, inf)"]),
        ({"eta": -0.01}, ValueError, ["eta", "-0.01", "[0, inf)"]),
        ({"eta": float("nan")}, ValueError, ["eta", "nan", "[0, inf)"]),
        ({"p": 0}, ValueError, ["p ", "0.0", "[1, inf]"]),
        (
            {"normalization": "layerwise"},
            ValueError,
            ["normalization", "'layerwise'", "filterwise"],
        ),
        ({"normalization": None}, ValueError, ["normalization", "None", "elementwise"]),
        ({"eta": [0.01]}, TypeError, ["eta", "[0.01]"]),
        ({"stack_axes": -1}, ValueError, ["stack_axes", "-1", ">= 0"]),
        ({"stack_axes": True}, ValueError, ["stack_axes", "True"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        sam_optax.asam(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("mask", [{"conv": True}, 1, {"conv": True, "dense": 0.5}, "bias"])
def test_bad_bias_masks(mask):
    with pytest.raises(ValueError, match="bias_mask must be a pytree of booleans"):
        displacement(tree(), tree(), bias_mask=mask)


def test_filter_axis_out_of_range():
    with pytest.raises(ValueError, match=r"axis 4 .*\['conv'\]\['kernel'\].* 4 axes"):
        displacement(tree(), tree(), normalization="filterwise", filter_axis=4)
