"""F-SAM against its formula, in each of its orders, its limits and its arguments."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from helpers import assert_close, assert_same, leaves, norm, vector, x64

import sam_optax


def gradients(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [
        {
            "a": jnp.asarray(rng.normal(size=(2, 3)) + 1, dtype),
            "b": jnp.asarray(rng.normal(size=3), dtype),
        }
        for _ in range(5)
    ]


def run(method, gs, params=None):
    """What the method makes of a sequence of gradients, and its last state."""
    state = method.init(gs[0])
    outputs = []
    for g in gs:
        output, state = method.update(g, state, params)
        outputs.append(output)
    return outputs, state


@pytest.mark.parametrize("ema_start", ["first_gradient", "zero", "bias_corrected"])
def test_residual_is_the_papers_formula(ema_start):
    """In both orders, each of which is not the other."""
    with x64():
        gs = gradients(jnp.float64)
        for order, other in (("previous", "new"), ("new", "previous")):
            method = sam_optax.remove_full_gradient(0.5, 0.6, ema_start=ema_start, subtract=order)
            found = np.stack([vector(d) for d in run(method, gs)[0]])
            for subtract in (order, other):
                expected = references.fsam_residuals(
                    [leaves(g) for g in gs], 0.5, 0.6, ema_start, subtract
                )
                gap = np.abs(found - [references.flatten(d) for d in expected]).max()
                assert gap < 1e-13 if subtract == order else gap > 1e-2


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (-0.5, 1.0)), ({"ema_start": "zero", "subtract": "new"}, (-0.045, 0.95))],
)
def test_residual_of_known_values(options, expected):
    (_, d), _ = run(sam_optax.remove_full_gradient(0.5, 0.9, **options), list(jnp.eye(2)))
    np.testing.assert_allclose(d, expected, rtol=1e-6)


def test_defaults_are_the_papers():
    gs = gradients()
    epsilons, _ = run(sam_optax.fsam(), gs)
    residuals = references.fsam_residuals([leaves(g) for g in gs], 1.0, 0.9)
    for eps, d in zip(epsilons, residuals, strict=True):
        assert_close(eps, references.sam(d, 0.1), 1e-5)


def test_sigma_0_is_sam_to_the_bit():
    gs = gradients()
    epsilons, _ = run(sam_optax.fsam(0.1, sigma=0.0), gs)
    for eps, g in zip(epsilons, gs, strict=True):
        assert_same(eps, sam_optax.sam(0.1).update(g, ())[0])


def test_before_asam_is_equation_51():
    gs = gradients()
    w = {"a": jnp.array([[1.0, -2.0, 0.5], [3.0, 0.1, -0.2]]), "b": jnp.array([1.0, 2.0, -3.0])}
    method = optax.chain(sam_optax.remove_full_gradient(1.0, 0.9), sam_optax.asam(0.5, 0.01))
    epsilons, _ = run(sam_optax.as_perturbation(method), gs, w)
    residuals = references.fsam_residuals([leaves(g) for g in gs], 1.0, 0.9)
    for eps, d in zip(epsilons, residuals, strict=True):
        expected = references.asam(leaves(w), d, 0.5, 0.01, [False, True])
        assert_close(eps, expected, 1e-5)


def test_constant_gradient_leaves_nothing():
    """m = g exactly, so d = 0 exactly, and ε = 0 and not NaN."""
    g = gradients(jnp.float16)[0]
    epsilons, _ = run(sam_optax.fsam(0.1), [g] * 2)
    assert norm(epsilons[1]) == 0


@pytest.mark.parametrize(("value", "dtype"), [(40_000, jnp.float16), (1e38, jnp.bfloat16)])
@pytest.mark.slow
def test_residual_is_not_confined_to_the_range_of_the_gradient(value, dtype):
    """g − m may be twice as large as either, as with gradients of a scaled loss."""
    method = sam_optax.fsam(0.5)
    gs = [jnp.full(4, value, dtype), jnp.full(4, -value, dtype)]
    (_, eps), _ = run(method, gs)
    np.testing.assert_allclose(np.float64(np.asarray(eps, np.float32)), -0.25, rtol=1e-2)


def test_accumulator_dtype():
    """In bfloat16, (1 − λ) g is lost beside m for λ = .999; in float32 it is not."""
    gs = [{"w": jnp.full((3,), value, jnp.bfloat16)} for value in [1.0] + [2.0] * 40]
    wide = sam_optax.remove_full_gradient(1.0, 0.999, accumulator_dtype="float32")
    narrow = sam_optax.remove_full_gradient(1.0, 0.999)
    (*_, d), state = run(wide, gs)
    assert d["w"].dtype == jnp.bfloat16
    assert state.ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.ema["w"], 2 - 0.999**40, rtol=1e-5)
    _, state = run(narrow, gs)
    assert state.ema["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.ema["w"].astype(jnp.float32), 1.0)


def test_a_frozen_leaf_keeps_its_average():
    method = sam_optax.remove_full_gradient()
    state = method.init({"a": jnp.ones(2), "n": jnp.arange(3)})
    assert state.ema["n"] is None
    for _ in range(2):
        d, state = method.update({"a": jnp.ones(2), "n": None}, state)
    assert d["n"] is None
    d, state = method.update({"a": None, "n": None}, state)
    np.testing.assert_array_equal(state.ema["a"], 1.0)
