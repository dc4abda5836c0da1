"""`perturbation_survival`: what rounding leaves of ε, at the points that a model computes with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, init_mlp, mlp_loss, vector
from methods import build

import sam_optax
from sam_optax._perturbations.perturbation_survival import perturbation_survival

SAM = sam_optax.sam(0.05)


def large_params(dtype, lower=1.0, upper=100.0, size=10**6):
    """Params of magnitudes spread evenly in the logarithm, and a gradient."""
    rng = np.random.default_rng(0)
    magnitude = np.exp(rng.uniform(np.log(lower), np.log(upper), size))
    w = magnitude * rng.choice([-1, 1], size)
    return jnp.asarray(w, dtype), jnp.asarray(rng.normal(size=size), dtype)


def survival(method, params, grads, **options):
    measured = perturbation_survival(method, params, grads, method.init(params), **options)
    return [float(x) for x in measured]


def test_small_case():
    """w = (1, 100, .001), equal gradients, ρ = .05: each ε is .0289, little beside 100."""
    params = jnp.array([1.0, 100.0, 0.001], jnp.bfloat16)
    along, length = survival(SAM, params, jnp.ones_like(params))
    eps = 0.05 / np.sqrt(3)
    # bfloat16 steps: 2⁻⁷ at 1, ½ at 100, 2⁻¹³ at .03.
    moved = np.array([4 * 2**-7, 0, np.round(eps * 2**13) / 2**13])
    np.testing.assert_allclose(along, np.sum(moved) / (3 * eps), rtol=5e-3)
    np.testing.assert_allclose(length, np.linalg.norm(moved) / 0.05, rtol=5e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "compute_dtype"),
    [
        ("sam", jnp.bfloat16, None),
        ("only_sam", jnp.float32, jnp.bfloat16),
        pytest.param("fsam_asam", jnp.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("rsam", jnp.float16, jnp.bfloat16, marks=pytest.mark.slow),
        ("scale", jnp.float32, jnp.bfloat16),
    ],
)
def test_is_the_quotient_it_says(name, dtype, compute_dtype):
    method = build(name, 0.05)
    params = init_mlp(dtype=dtype)
    grads = jax.grad(mlp_loss)(params, *(b[0].astype(dtype) for b in batches(1)))
    state = method.init(params)
    actual = perturbation_survival(method, params, grads, state, compute_dtype=compute_dtype)
    as_float = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    eps = vector(method.update(as_float, state, params)[0])
    point, _ = sam_optax.as_perturbation(method).perturb_fn(params, grads, state)
    cast = lambda tree: vector(
        [np.asarray(x).astype(compute_dtype or x.dtype) for x in jax.tree.leaves(tree)]
    )
    moved = cast(point) - cast(params)
    expected = moved @ eps / (eps @ eps), np.linalg.norm(moved) / np.linalg.norm(eps)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.slow
def test_large_low_precision_params_keep_nothing():
    params, grads = large_params(jnp.bfloat16)
    along, length = survival(SAM, params, grads)
    assert along < 0.01
    assert length < 0.1
    kept = survival(SAM, params, grads, perturb_dtype=jnp.float32)
    np.testing.assert_allclose(kept, 1, rtol=2e-3)  # ε has the digits of the gradient's dtype
    lost = {"perturb_dtype": jnp.float32, "compute_dtype": jnp.bfloat16}
    assert survival(SAM, params, grads, **lost)[0] < 0.01
    assert survival(SAM, *large_params(jnp.bfloat16, 1e-3, 0.1))[0] > 0.5
    assert survival(sam_optax.sam(50), params, grads)[0] > 0.7


@pytest.mark.parametrize(
    ("dtype", "compute_dtype"), [(jnp.bfloat16, None), (jnp.float32, jnp.bfloat16)]
)
def test_compiled_measurement_rounds_as_an_eager_one(dtype, compute_dtype):
    """A compiler that keeps the digits of fused casts would report 1 and 1."""
    params, grads = large_params(dtype, size=10**4)
    method = sam_optax.sam(0.005)
    measure = functools.partial(perturbation_survival, method, compute_dtype=compute_dtype)
    eager = measure(params, grads, method.init(params))
    compiled = jax.jit(measure)(params, grads, method.init(params))
    np.testing.assert_allclose(compiled, eager, rtol=1e-5)
    assert abs(float(compiled.length) - 1) > 0.5


def test_nothing_is_lost_of_nothing():
    params, grads = large_params(jnp.bfloat16, size=10)
    assert survival(SAM, params, 0 * grads) == [1, 1]
    assert survival(sam_optax.sam(0.0), params, grads) == [1, 1]


def test_with_the_state_of_a_schedule():
    """At the step that the state counts: a quarter of the last radius at the second."""
    method = sam_optax.sam(optax.linear_schedule(0.0, 200.0, 4))
    params, grads = large_params(jnp.bfloat16, size=10**4)
    assert survival(method, params, grads) == [1, 1]  # ρ = 0
    _, state = method.update(grads, method.init(params))
    found = perturbation_survival(method, params, grads, state)
    np.testing.assert_allclose(found, survival(sam_optax.sam(50.0), params, grads))


def test_other_leaves_pass():
    params = {"w": jnp.ones(3), "n": jnp.arange(2), "z": jnp.array([1 + 2j]), "none": None}
    grads = {**params, "n": np.zeros(2, jax.dtypes.float0)}
    np.testing.assert_allclose(survival(sam_optax.sam(0.5), params, grads), 1, rtol=1e-5)


def test_errors():
    with pytest.raises(TypeError, match="perturbation"):
        perturbation_survival(0.05, jnp.ones(2), jnp.ones(2), ())
    lost = optax.chain(sam_optax.rsam(key=0))
    with pytest.raises(ValueError, match="random start"):
        perturbation_survival(lost, jnp.ones(2), jnp.ones(2), lost.init(jnp.ones(2)))
