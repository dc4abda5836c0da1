"""Displacements whose right values are known by hand, for methods of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, norm, precision, vector
from methods import make

import sam_optax

KEY = jax.random.key(0)
FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]


def displacement(method, grads, params=None):
    return method.update(grads, method.init(grads if params is None else params), params)[0]


# Zero gradients.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["sam", "sam_1", "sam_3", "asam", "fsam", "rsam"])
@pytest.mark.fast("*-float32")
def test_zero_gradient(name, dtype):
    with precision(dtype):
        params = {"bias": jnp.ones(3, dtype), "k": jnp.ones((2, 1, 2), dtype)}
        zeros = jax.tree.map(jnp.zeros_like, params)
        tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name, 0.5))
        state = tx.init(params)
        points = []

        def grad_fn(point):
            points.append(point)
            return zeros

        for _ in range(2):
            with jax.disable_jit():  # op by op, to compile less
                updates, state = tx.update(zeros, state, params, grad_fn=grad_fn)
            assert_same(jax.tree.map(jnp.abs, updates), zeros)
        if name == "rsam":  # the noise is left
            moved = jax.tree.map(lambda a, b: a - b, points[-1], params)
            assert norm(moved) == pytest.approx(0.5, rel=0.02)
        else:
            assert_same(points[-1], params)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", ["sam", "sam_3", "asam", "fsam", "rsam"])
def test_zero_second_gradient(name, dtype):
    with precision(dtype):
        params = {"w": jnp.ones(3, dtype)}
        base = optax.adam(0.1, eps=1e-4)  # the default, 1e-8, is 0 in float16
        tx = sam_optax.sharpness_aware(base, make(name, 0.5))
        with jax.disable_jit():
            updates, _ = tx.update(
                {"w": jnp.ones(3, dtype)},
                tx.init(params),
                params,
                grad_fn=lambda p: jax.tree.map(jnp.zeros_like, p),
            )
        np.testing.assert_array_equal(vector(updates), 0)


# The sharp gradient is the gradient at w + ε.


@pytest.mark.parametrize(
    ("x", "rho", "sharp"), [(3.0, 1.0, 8.0), (-3.0, 1.0, -8.0), (3.0, 0.0, 6.0)]
)
@pytest.mark.parametrize("grads_given", [True, False])
@pytest.mark.parametrize("name", ["sam", "sam_1", "sam_3", "sam_inf", "fsam"])
def test_sharp_gradient_of_a_parabola(name, x, rho, sharp, grads_given):
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), make(name, rho))
    grad_fn = jax.grad(lambda x: x**2)
    x = jnp.array(x)
    grads = grad_fn(x) if grads_given else None
    updates, _ = tx.update(grads, tx.init(x), x, grad_fn=grad_fn)
    assert float(updates) == pytest.approx(-sharp, rel=1e-6)


# One norm over the tree, over the perturbed leaves only.


@pytest.mark.parametrize("rho", [0.1, 2.0])
def test_norm_over_the_tree(rho):
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    eps = displacement(sam_optax.sam(rho), grads)
    np.testing.assert_allclose(vector(eps), [rho * 0.6, rho * 0.8], rtol=1e-6)


@pytest.mark.parametrize("rho", [0.1, 2.0])
@pytest.mark.parametrize("chosen", ["a", "b"])
def test_norm_over_the_perturbed_leaves(rho, chosen):
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    params = {"a": jnp.array([1.0]), "b": jnp.array([-0.0])}
    method = sam_optax.perturb_only(sam_optax.sam(rho), {k: k == chosen for k in params})
    eps = displacement(method, grads, params)
    other = "b" if chosen == "a" else "a"
    np.testing.assert_allclose(eps[chosen], rho, rtol=1e-6)
    np.testing.assert_array_equal(eps[other], 0)


# ASAM by hand.


def test_asam_by_hand():
    w, g = {"w": jnp.array([2.0, -0.5])}, {"w": jnp.array([1.0, 1.0])}
    eps = displacement(sam_optax.asam(0.5, 0.0), g, w)
    np.testing.assert_allclose(eps["w"], [0.970143, 0.060634], atol=1e-6)
    eps = displacement(sam_optax.asam(0.5, 0.01), g, w)
    in_units_of_weights = np.float64(eps["w"]) / [2.01, 0.51]
    assert np.linalg.norm(in_units_of_weights) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, np.inf])
@pytest.mark.parametrize("normalization", ["elementwise", "filterwise"])
@pytest.mark.parametrize("shape", [(3,), (2, 2, 3)])
@pytest.mark.slow
def test_zero_weights_and_no_eta(p, normalization, shape):
    w, g = {"w": jnp.zeros(shape)}, {"w": jnp.ones(shape)}
    method = sam_optax.asam(0.5, 0.0, p=p, normalization=normalization)
    np.testing.assert_array_equal(displacement(method, g, w)["w"], 0)
    # A single weight that is not zero takes the whole radius.
    w = {"w": w["w"].at[(0,) * len(shape)].set(2.0)}
    eps = displacement(sam_optax.asam(0.5, 0.0, p=p), g, w)["w"]
    assert float(eps.ravel()[0]) == pytest.approx(1.0, rel=1e-6)
    assert int(jnp.count_nonzero(eps)) == 1


# F-SAM's orders.


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (-0.5, 1.0)), ({"ema_start": "zero", "subtract": "new"}, (-0.045, 0.95))],
)
def test_orders_of_fsam(options, expected):
    method = sam_optax.remove_full_gradient(0.5, 0.9, **options)
    state = method.init(jnp.zeros(2))
    for g in ([1.0, 0.0], [0.0, 1.0]):
        d, state = method.update(jnp.array(g), state)
    np.testing.assert_allclose(d, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_constant_gradient(dtype):
    with precision(dtype):
        g = jnp.array([0.3, -0.7], dtype)
        method = sam_optax.fsam(0.1, 1.0, 0.9)
        state = method.init(g)
        _, state = method.update(g, state)
        eps, state = method.update(g, state)
        np.testing.assert_array_equal(np.asarray(eps, np.float64), 0)


# R-SAM (its covariance: test_noise.py; γ = 0 and keys: test_rsam.py).


@pytest.mark.parametrize("rho", [0.05, 3.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.slow
def test_radius_of_rsam(rho, scale):
    w = {"k": jnp.ones((3, 2)), "b": jnp.ones(2)}
    eps = displacement(sam_optax.rsam(rho, key=KEY), jax.tree.map(lambda x: scale * x, w), w)
    assert norm(eps) == pytest.approx(rho, rel=1e-6)


# SAM with p = ∞.


@pytest.mark.parametrize("dtype", FLOATS)
def test_sam_with_p_inf_by_hand(dtype):
    with precision(dtype):
        eps = displacement(sam_optax.sam(0.25, p=np.inf), jnp.array([1e-3, -7, 0], dtype))
        np.testing.assert_array_equal(np.asarray(eps, np.float64), [0.25, -0.25, 0])


# The whole range of each dtype.

RANGES = {
    jnp.float16: (6e-8, 1e-4, 300, 65504),
    jnp.bfloat16: (1.2e-38, 1e-20, 1e19, 3e38),
    jnp.float32: (1e-18, 1e-17, 1e17, 1e18),
    jnp.float64: (1e-150, 1e150),
}


@pytest.mark.parametrize(("dtype", "value"), [(d, v) for d, vs in RANGES.items() for v in vs])
@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("name", ["sam", "sam_3", "asam", "fsam"])
@pytest.mark.fast("sam-*")
def test_range(name, dtype, value, count):
    with precision(dtype):
        grads = {"bias": jnp.full((count,), value, dtype)}  # a bias: ASAM's T is 1
        eps = displacement(make(name, 0.5), grads, grads)
        assert norm(eps, 3 if name == "sam_3" else 2) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("value", "weight"), [(1e-18, 1.0), (1e-16, 0.0), (1e18, 0.0), (1e18, 1.0), (1e16, 1e2)]
)
@pytest.mark.parametrize("normalization", ["elementwise", "filterwise"])
def test_range_times_the_weights(normalization, value, weight):
    """The norm is that of T g, which has to stay between 1e-18 and 1e18."""
    w, g = (jnp.full((2, 1, 2, 3), x) for x in (weight, value))
    method = sam_optax.asam(0.5, 0.01, normalization=normalization)
    eps = displacement(method, {"kernel": g}, {"kernel": w})
    operator = (weight * (2 if normalization == "filterwise" else 1)) + 0.01
    assert norm(eps) / operator == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.fast("float16")
def test_many_leaves(dtype):
    """A bfloat16 accumulator would stop at 16; the norm of 600 ones is 24.49."""
    grads = [jnp.ones(1, dtype) for _ in range(600)]
    assert norm(displacement(sam_optax.sam(0.5), grads)) == pytest.approx(0.5, rel=0.01)


@pytest.mark.slow
def test_many_elements():
    eps = displacement(sam_optax.sam(0.5), jnp.ones(2**17, jnp.bfloat16))
    assert norm(eps) == pytest.approx(0.5, rel=0.01)
