"""SAM against its formula, its limits, the range of each dtype and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from helpers import assert_close, leaves, norm, precision, vector, x64
from methods import make

import sam_optax

ORDERS = [1, 1.01, 1.5, 2, 3, 50, np.inf]


def gradient(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    tree = {"a": rng.normal(size=(3, 4)), "b": [rng.normal(size=5), rng.normal(size=())]}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def displacement(method, grads, params=None):
    return method.update(grads, method.init(grads), params)[0]


@pytest.mark.parametrize("p", ORDERS)
def test_is_the_papers_formula(p):
    with x64():
        g = gradient(jnp.float64)
        eps = displacement(sam_optax.sam(rho=0.3, p=p), g)
        # A power q − 1 = 100 magnifies relative errors a hundred times.
        assert_close(eps, references.sam(leaves(g), 0.3, p), 3e-12 if p == 1.01 else 1e-13)
        assert norm(eps, p) == pytest.approx(0.3, rel=1e-12)
        assert norm(displacement(sam_optax.sam(rho=0.0, p=p), g)) == 0


def test_wrong_formulas_are_told_apart():
    """Negative controls: a norm for each leaf, a square too many, another order."""
    g = gradient()
    eps = displacement(sam_optax.sam(0.3), g)
    per_leaf = [0.3 * x / np.linalg.norm(x) for x in leaves(g)]
    squared = [0.3 * x / np.linalg.norm(vector(g)) ** 2 for x in leaves(g)]
    for wrong in (per_leaf, squared, references.sam(leaves(g), 0.3, 3)):
        with pytest.raises(AssertionError):
            assert_close(eps, wrong, 1e-2)


@pytest.mark.parametrize("p", [2 - 1e-7, 2 + 1e-7])
def test_general_formula_meets_p_2(p):
    with x64():
        near = displacement(sam_optax.sam(0.3, p=p), gradient(jnp.float64))
        assert_close(near, displacement(sam_optax.sam(0.3), gradient(jnp.float64)), 1e-6)


@pytest.mark.parametrize("excess", [0, 1e-3, 1e-6])
def test_general_formula_meets_p_1_where_ties_share_the_radius(excess):
    """Near p = 1 a power of 1/(p − 1) must not magnify the rounding of a norm."""
    eps = displacement(sam_optax.sam(0.3, p=1 + excess), jnp.array([2.0, -2.0, 1.0, 0.0]))
    np.testing.assert_allclose(eps, [0.15, -0.15, 0, 0], atol=0.3 * excess + 1e-6)


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


# ---------------------------------------------------------------- known values


@pytest.mark.parametrize("grads_given", [True, False])
def test_sharp_gradient_of_a_parabola(grads_given):
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(1.0))
    grad_fn, x = jax.grad(lambda x: x**2), jnp.array(3.0)
    updates, _ = tx.update(grad_fn(x) if grads_given else None, tx.init(x), x, grad_fn=grad_fn)
    assert float(updates) == -8


def test_one_norm_over_the_tree():
    eps = displacement(sam_optax.sam(0.1), {"a": jnp.array([3.0]), "b": jnp.array([4.0])})
    np.testing.assert_allclose(vector(eps), [0.06, 0.08], rtol=1e-6)


def test_p_inf_is_the_sign_and_zero_at_zero():
    eps = displacement(sam_optax.sam(0.25, p=np.inf), jnp.array([1e-3, -7, 0], jnp.float16))
    np.testing.assert_array_equal(eps, [0.25, -0.25, 0])


def test_complex_leaves_use_the_magnitude():
    g = {"c": jnp.array([3 + 4j, 0]), "r": jnp.array([12.0])}
    eps = displacement(sam_optax.sam(0.13), g)
    np.testing.assert_allclose(eps["c"], [0.03 + 0.04j, 0], rtol=1e-6)
    np.testing.assert_allclose(eps["r"], [0.12], rtol=1e-6)
    eps = displacement(sam_optax.sam(0.1, p=np.inf), g)
    np.testing.assert_allclose(eps["c"], [0.06 + 0.08j, 0], rtol=1e-6)


@pytest.mark.parametrize("name", ["sam", "sam_3", "asam", "fsam", "rsam"])
def test_zero_gradients_of_float16(name):
    """Where 1e-12 and 1e-8 are 0; of both gradients, and of the second alone."""
    w, zero = {"w": jnp.ones(3, jnp.float16)}, {"w": jnp.zeros(3, jnp.float16)}
    base = optax.adam(0.1, eps=1e-4)  # the default, 1e-8, is 0 in float16
    tx = sam_optax.sharpness_aware(base, make(name, 0.5))
    with jax.disable_jit():  # op by op, to compile less
        for first in (zero, w):
            updates, _ = tx.update(first, tx.init(w), w, grad_fn=lambda p: zero)
            assert norm(updates) == 0


# ---------------------------------------------------------------- the whole range of each dtype

RANGES = {
    jnp.float16: (6e-8, 1e-4, 300, 65504),
    jnp.bfloat16: (1.2e-38, 1e-20, 1e19, 3e38),
    jnp.float32: (1e-18, 1e-17, 1e17, 1e18),
    jnp.float64: (1e-150, 1e150),
}


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "value"), [(d, v) for d, vs in RANGES.items() for v in vs])
def test_range(p, dtype, value):
    with precision(dtype):
        for count in (1, 100):
            eps = displacement(sam_optax.sam(0.5, p=p), jnp.full(count, value, dtype))
            assert norm(eps, p) == pytest.approx(0.5, rel=0.01)


def test_many_leaves():
    """A bfloat16 accumulator would stop at 16; the norm of 600 ones is 24.49."""
    grads = [jnp.ones(1, jnp.bfloat16) for _ in range(600)]
    with jax.disable_jit():  # op by op, or 600 leaves take long to compile
        assert norm(displacement(sam_optax.sam(0.5), grads)) == pytest.approx(0.5, rel=0.01)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("rho", [0.05, 1, np.float32(0.05), np.array(0.05), jnp.asarray(0.05)])
def test_kinds_of_radius(rho):
    assert isinstance(sam_optax.sam(rho).init(gradient()), optax.EmptyState)
    eps = displacement(sam_optax.sam(rho), gradient())
    assert norm(eps) == pytest.approx(float(rho), rel=1e-6)
