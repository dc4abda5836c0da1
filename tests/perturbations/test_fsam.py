"""F-SAM against its formula, in each of its orders, its limits and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from helpers import assert_close, assert_same, leaves, norm, precision

import sam_optax

STARTS = ["first_gradient", "zero", "bias_corrected"]
ORDERS = ["previous", "new"]
STEPS = 5


def gradients(dtype=jnp.float32, steps=STEPS):
    rng = np.random.default_rng(0)
    return [
        {
            "a": jnp.asarray(rng.normal(size=(2, 3)) + 1, dtype),
            "b": jnp.asarray(rng.normal(size=3), dtype),
        }
        for _ in range(steps)
    ]


def run(method, gs, params=None):
    """What the method makes of a sequence of gradients, and its last state."""
    state = method.init(gs[0])
    outputs = []
    for g in gs:
        output, state = method.update(g, state, params)
        outputs.append(output)
    return outputs, state


@pytest.mark.parametrize("ema_start", STARTS)
@pytest.mark.parametrize("subtract", ORDERS)
@pytest.mark.parametrize(("sigma", "lmbda"), [(1.0, 0.9), (0.5, 0.6), (0.7, 0.0)])
@pytest.mark.parametrize(("dtype", "tol"), [(jnp.float64, 1e-13), (jnp.float32, 2e-6)])
def test_residual_is_the_papers_formula(ema_start, subtract, sigma, lmbda, dtype, tol):
    with precision(dtype):
        gs = gradients(dtype)
        method = sam_optax.remove_full_gradient(
            sigma, lmbda, ema_start=ema_start, subtract=subtract
        )
        residuals, _ = run(method, gs)
        expected = references.fsam_residuals(
            [leaves(g) for g in gs], sigma, lmbda, ema_start, subtract
        )
        for d, want in zip(residuals, expected, strict=True):
            assert_close(d, want, rtol=0, atol=tol)


@pytest.mark.parametrize("ema_start", STARTS)
@pytest.mark.parametrize("subtract", ORDERS)
@pytest.mark.slow
def test_fsam_is_sam_of_the_residual(ema_start, subtract):
    gs = gradients()
    options = {"ema_start": ema_start, "subtract": subtract}
    epsilons, _ = run(sam_optax.fsam(0.2, 0.5, 0.6, **options), gs)
    residuals = references.fsam_residuals([leaves(g) for g in gs], 0.5, 0.6, **options)
    for eps, d in zip(epsilons, residuals, strict=True):
        assert_close(eps, references.sam(d, 0.2), 5e-6)


def test_defaults_are_the_papers():
    gs = gradients()
    epsilons, _ = run(sam_optax.fsam(), gs)
    residuals = references.fsam_residuals([leaves(g) for g in gs], 1.0, 0.9)
    for eps, d in zip(epsilons, residuals, strict=True):
        assert_close(eps, references.sam(d, 0.1), 1e-5)


@pytest.mark.parametrize("ema_start", STARTS)
def test_first_step_of_previous_is_sam(ema_start):
    (eps,), _ = run(sam_optax.fsam(0.1, ema_start=ema_start), gradients(steps=1))
    assert_same(eps, sam_optax.sam(0.1).update(gradients(steps=1)[0], ())[0])


def test_sigma_0_is_sam_to_the_bit():
    gs = gradients()
    epsilons, _ = run(sam_optax.fsam(0.1, sigma=0.0), gs)
    for eps, g in zip(epsilons, gs, strict=True):
        assert_same(eps, sam_optax.sam(0.1).update(g, ())[0])


def test_the_orders_and_starts_differ():
    """Negative control: each of the six is told apart from the others at some step."""
    gs = [leaves(g) for g in gradients()]
    methods = {
        (start, order): run(
            sam_optax.remove_full_gradient(0.5, 0.6, ema_start=start, subtract=order), gradients()
        )[0]
        for start in STARTS
        for order in ORDERS
    }
    for key, residuals in methods.items():
        for other in methods:
            expected = references.fsam_residuals(gs, 0.5, 0.6, *other)
            gap = max(
                np.abs(leaves(d)[0] - want[0]).max()
                for d, want in zip(residuals, expected, strict=True)
            )
            assert gap < 1e-5 if other == key else gap > 1e-2


def test_with_sigma_1_both_orders_point_the_same_way():
    """g − m_t = λ (g − m_{t−1}), so from the second step on the order does not matter to SAM."""
    previous, _ = run(sam_optax.fsam(0.1), gradients())
    new, _ = run(sam_optax.fsam(0.1, subtract="new"), gradients())
    assert norm(new[0]) == 0
    for a, b in zip(previous[1:], new[1:], strict=True):
        assert_close(a, b, 1e-5)


def test_before_asam_is_equation_51():
    gs = gradients()
    w = {"a": jnp.array([[1.0, -2.0, 0.5], [3.0, 0.1, -0.2]]), "b": jnp.array([1.0, 2.0, -3.0])}
    method = optax.chain(sam_optax.remove_full_gradient(1.0, 0.9), sam_optax.asam(0.5, 0.01))
    epsilons, _ = run(sam_optax.as_perturbation(method), gs, w)
    residuals = references.fsam_residuals([leaves(g) for g in gs], 1.0, 0.9)
    for eps, d in zip(epsilons, residuals, strict=True):
        expected = references.asam(leaves(w), d, 0.5, 0.01, [False, True])
        assert_close(eps, expected, 1e-5)


@pytest.mark.parametrize("ema_start", STARTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.slow
def test_constant_gradient_leaves_nothing(ema_start, dtype):
    g = jax.tree.map(lambda x: x.astype(dtype), gradients(steps=1)[0])
    epsilons, _ = run(sam_optax.fsam(0.1, ema_start=ema_start), [g] * 4)
    if ema_start == "first_gradient":  # m = g exactly, so d = 0 exactly
        assert norm(epsilons[1]) == 0
    assert all(np.isfinite(norm(eps)) for eps in epsilons)


@pytest.mark.parametrize(("value", "dtype"), [(40_000, jnp.float16), (1e38, jnp.bfloat16)])
@pytest.mark.slow
def test_residual_is_not_confined_to_the_range_of_the_gradient(value, dtype):
    """g − m may be twice as large as either, as with gradients of a scaled loss."""
    method = sam_optax.fsam(0.5)
    gs = [jnp.full(4, value, dtype), jnp.full(4, -value, dtype)]
    (_, eps), _ = run(method, gs)
    np.testing.assert_allclose(np.float64(np.asarray(eps, np.float32)), -0.25, rtol=1e-2)


def test_state_is_one_copy_of_the_gradient():
    _, state = run(sam_optax.remove_full_gradient(), gradients())
    assert int(state.count) == STEPS
    assert len(jax.tree.leaves(state)) == 3
    assert jax.tree.structure(state.ema) == jax.tree.structure(gradients()[0])


@pytest.mark.parametrize("accumulator_dtype", [jnp.float32, "float32"])
@pytest.mark.slow
def test_accumulator_dtype(accumulator_dtype):
    """In bfloat16, (1 − λ) g is lost beside m for λ = .999; in float32 it is not."""
    gs = [{"w": jnp.full((3,), value, jnp.bfloat16)} for value in [1.0] + [2.0] * 40]
    wide = sam_optax.remove_full_gradient(1.0, 0.999, accumulator_dtype=accumulator_dtype)
    narrow = sam_optax.remove_full_gradient(1.0, 0.999)
    (*_, d), state = run(wide, gs)
    assert d["w"].dtype == jnp.bfloat16
    assert state.ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.ema["w"], 2 - 0.999**40, rtol=1e-5)
    _, state = run(narrow, gs)
    assert state.ema["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.ema["w"].astype(jnp.float32), 1.0)


def test_schedules():
    gs = gradients(steps=3)
    method = sam_optax.remove_full_gradient(sigma=lambda t: 0.5 * t, lmbda=lambda t: 0.9 - 0.4 * t)
    residuals, state = run(method, gs)
    g0, g1, g2 = (np.asarray(g["b"], np.float64) for g in gs)
    m = 0.5 * g0 + 0.5 * g1  # λ = .5 at the second step
    np.testing.assert_allclose(residuals[1]["b"], g1 - 0.5 * g0, atol=1e-6)
    np.testing.assert_allclose(residuals[2]["b"], g2 - 1.0 * m, atol=1e-6)
    assert int(state.step) == 3


def test_a_frozen_leaf_keeps_its_average():
    method = sam_optax.remove_full_gradient()
    state = method.init({"a": jnp.ones(2), "n": jnp.arange(3)})
    assert state.ema["n"] is None
    for _ in range(2):
        d, state = method.update({"a": jnp.ones(2), "n": None}, state)
    assert d["n"] is None
    d, state = method.update({"a": None, "n": None}, state)
    np.testing.assert_array_equal(state.ema["a"], 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"sigma": -1.0}, ValueError, ["sigma", "-1.0", "[0, inf)"]),
        ({"lmbda": 1.0}, ValueError, ["lmbda", "1.0", "[0, 1)"]),
        ({"lmbda": -0.1}, ValueError, ["lmbda", "-0.1", "[0, 1)"]),
        ({"ema_start": "ones"}, ValueError, ["ema_start", "'ones'", "bias_corrected"]),
        ({"subtract": "both"}, ValueError, ["subtract", "'both'", "previous"]),
        ({"sigma": "1"}, TypeError, ["sigma", "'1'"]),
        ({"accumulator_dtype": jnp.int32}, ValueError, ["accumulator_dtype", "int32", "float"]),
    ],
)
@pytest.mark.parametrize("method", [sam_optax.fsam, sam_optax.remove_full_gradient])
def test_bad_arguments(method, arguments, error, words):
    with pytest.raises(error) as caught:
        method(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_bad_radius():
    with pytest.raises(ValueError, match=r"rho must be in \[0, inf\), got -1"):
        sam_optax.fsam(rho=-1)
