"""SAM against its formula, its limits and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from helpers import assert_close, assert_same, leaves, norm, precision, vector, x64

import sam_optax

ORDERS = [1, 1.01, 1.5, 2, 3, 50, np.inf]


def gradient(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    tree = {"a": rng.normal(size=(3, 4)), "b": [rng.normal(size=5), rng.normal(size=())]}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def displacement(method, grads, params=None):
    eps, _ = method.update(grads, method.init(grads), params)
    return eps


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float64, 1e-13), (jnp.float32, 2e-6)])
@pytest.mark.fast("float64-*")
def test_is_the_papers_formula(p, dtype, rtol):
    with precision(dtype):
        g = gradient(dtype)
        eps = displacement(sam_optax.sam(rho=0.3, p=p), g)
        # A power q − 1 = 100 magnifies relative errors a hundred times, and float32 underflows.
        expected = references.sam(leaves(g), 0.3, p)
        assert_close(eps, expected, rtol * (30 if p == 1.01 else 1), atol=1e-30)


@pytest.mark.parametrize("p", ORDERS)
def test_radius_in_its_own_norm(p):
    with x64():
        assert norm(displacement(sam_optax.sam(0.3, p=p), gradient(jnp.float64)), p) == (
            pytest.approx(0.3, rel=1e-12)
        )


@pytest.mark.parametrize("p", ORDERS)
def test_is_the_steepest_direction_of_the_ball(p):
    """No other point of the ball has a larger inner product with the gradient."""
    with x64():
        g = vector(gradient(jnp.float64))
        best = g @ vector(displacement(sam_optax.sam(1.0, p=p), gradient(jnp.float64)))
        others = np.random.default_rng(1).normal(size=(2000, g.size)) + 0.5 * g
        others /= np.linalg.norm(others, p, axis=1, keepdims=True)
        assert (others @ g).max() <= best * (1 + 1e-12)


@pytest.mark.parametrize("p", [2 - 1e-7, 2 + 1e-7])
def test_general_formula_meets_p_2(p):
    with x64():
        near = displacement(sam_optax.sam(0.3, p=p), gradient(jnp.float64))
        assert_close(near, displacement(sam_optax.sam(0.3), gradient(jnp.float64)), 1e-6)


@pytest.mark.parametrize("excess", [1e-3, 1e-4, 1e-5, 1e-6])
def test_general_formula_meets_p_1(excess):
    """Near p = 1 a power of 1/(p − 1) must not magnify the rounding of a norm."""
    g = {"w": jnp.array([2.0, -2.0, 1.0, 0.0])}
    eps = displacement(sam_optax.sam(0.3, p=1 + excess), g)
    np.testing.assert_allclose(eps["w"], [0.15, -0.15, 0, 0], atol=0.3 * excess + 1e-6)


def test_ties_share_the_radius_of_p_1():
    eps = displacement(sam_optax.sam(0.3, p=1), {"w": jnp.array([2.0, -2.0, 1.0, 0.0])})
    np.testing.assert_allclose(eps["w"], [0.15, -0.15, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.slow
def test_p_1_finds_the_largest_element_whatever_its_value(jit):
    """Dividing by the largest magnitude need not give 1 for the largest element itself."""
    method = sam_optax.sam(0.3, p=1)
    update = jax.jit(method.update) if jit else method.update
    for seed in range(40):
        g = np.random.default_rng(seed).normal(size=8)
        eps, _ = update(jnp.asarray(g, jnp.float32), method.init(g))
        assert_close(eps, references.sam([g], 0.3, 1), 1e-6)


@pytest.mark.parametrize("p", ORDERS)
def test_does_not_depend_on_the_scale_of_the_gradient(p):
    with x64():
        g = gradient(jnp.float64)
        eps = displacement(sam_optax.sam(0.3, p=p), g)
        scaled = displacement(sam_optax.sam(0.3, p=p), jax.tree.map(lambda x: x * 1e-30, g))
        assert_close(scaled, eps, 1e-9)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.slow
def test_radius_0_displaces_nothing(p):
    zeros = jax.tree.map(jnp.zeros_like, gradient())
    eps = displacement(sam_optax.sam(0.0, p=p), gradient())
    assert_same(jax.tree.map(jnp.abs, eps), zeros)


def test_wrong_formulas_are_told_apart():
    """Negative controls: a norm for each leaf, a square too many, a root too few."""
    g = gradient()
    eps = displacement(sam_optax.sam(0.3), g)
    per_leaf = [0.3 * x / np.linalg.norm(x) for x in leaves(g)]
    squared = [0.3 * x / np.linalg.norm(vector(g)) ** 2 for x in leaves(g)]
    other_order = references.sam(leaves(g), 0.3, 3)
    for wrong in (per_leaf, squared, other_order):
        with pytest.raises(AssertionError):
            assert_close(eps, wrong, 1e-2)


def test_complex_leaves_use_the_magnitude():
    g = {"c": jnp.array([3 + 4j, 0]), "r": jnp.array([12.0])}
    eps = displacement(sam_optax.sam(0.13), g)
    np.testing.assert_allclose(eps["c"], [0.03 + 0.04j, 0], rtol=1e-6)
    np.testing.assert_allclose(eps["r"], [0.12], rtol=1e-6)
    eps = displacement(sam_optax.sam(0.1, p=np.inf), g)
    np.testing.assert_allclose(eps["c"], [0.06 + 0.08j, 0], rtol=1e-6)


def test_leaves_of_several_dtypes_are_one_vector():
    g = {"bf16": jnp.array([3.0], jnp.bfloat16), "f16": jnp.array([4.0], jnp.float16)}
    eps = displacement(sam_optax.sam(0.5), g)
    assert eps["bf16"].dtype == jnp.bfloat16
    assert eps["f16"].dtype == jnp.float16
    np.testing.assert_allclose(vector(eps), [0.3, 0.4], rtol=4e-3)


@pytest.mark.parametrize("rho", [0.05, 1, np.float32(0.05), np.array(0.05), jnp.asarray(0.05)])
def test_kinds_of_radius(rho):
    eps = displacement(sam_optax.sam(rho), gradient())
    assert norm(eps) == pytest.approx(float(rho), rel=1e-6)


def test_schedule_counts_calls_when_alone():
    method = sam_optax.sam(lambda step: 0.1 * (step + 1))
    g = gradient()
    state = method.init(g)
    for radius in (0.1, 0.2, 0.3):
        eps, state = method.update(g, state)
        assert norm(eps) == pytest.approx(radius, rel=1e-6)
    assert int(state.step) == 3


def test_state_is_empty_without_a_schedule():
    assert jax.tree.leaves(sam_optax.sam(0.1).init(gradient())) == []
    assert isinstance(sam_optax.sam(0.1).init(gradient()), optax.EmptyState)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rho": -0.1}, ValueError, ["rho", "-0.1", "[0, inf)"]),
        ({"rho": float("nan")}, ValueError, ["rho", "nan", "[0, inf)"]),
        ({"rho": float("inf")}, ValueError, ["rho", "inf", "[0, inf)"]),
        ({"rho": np.float32(-1)}, ValueError, ["rho", "-1.0", "[0, inf)"]),
        ({"rho": jnp.asarray(-1.0)}, ValueError, ["rho", "-1.0", "[0, inf)"]),
        ({"p": 0.5}, ValueError, ["p ", "0.5", "[1, inf]"]),
        ({"p": -2}, ValueError, ["p ", "-2", "[1, inf]"]),
        ({"p": float("nan")}, ValueError, ["p ", "nan", "[1, inf]"]),
        ({"rho": "0.1"}, TypeError, ["rho", "'0.1'"]),
        ({"rho": None}, TypeError, ["rho", "None"]),
        ({"rho": True}, TypeError, ["rho", "True"]),
        ({"rho": jnp.ones(2)}, TypeError, ["rho", "(2,)"]),
        ({"rho": np.ones(2)}, TypeError, ["rho"]),
        ({"p": lambda step: 2.0}, TypeError, ["p "]),
        ({"p": "2"}, TypeError, ["p ", "'2'"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        sam_optax.sam(**arguments)
    for word in words:
        assert word in str(caught.value)
