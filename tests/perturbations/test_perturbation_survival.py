"""`perturbation_survival`: what rounding leaves of ε, at the points that a model computes with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, batches, init_mlp, leaves, mlp_loss, same, vector
from methods import build

import sam_optax
from sam_optax._perturbations.perturbation_survival import perturbation_survival

KEY = jax.random.key(5)
LOW = [jnp.bfloat16, jnp.float16]


def large_params(dtype, lower=1.0, upper=100.0, size=10**6):
    """Params of magnitudes spread evenly in the logarithm, and a gradient."""
    rng = np.random.default_rng(0)
    magnitude = np.exp(rng.uniform(np.log(lower), np.log(upper), size))
    w = magnitude * rng.choice([-1, 1], size)
    return jnp.asarray(w, dtype), jnp.asarray(rng.normal(size=size), dtype)


def survival(method, params, grads, **options):
    return [
        float(x)
        for x in perturbation_survival(method, params, grads, method.init(params), **options)
    ]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.fast("bfloat16")
def test_large_low_precision_params_keep_nothing(dtype):
    params, grads = large_params(dtype)
    along, length = survival(sam_optax.sam(0.05), params, grads)
    assert along < 0.01
    assert length < 0.1
    kept = survival(sam_optax.sam(0.05), params, grads, perturb_dtype=jnp.float32)
    np.testing.assert_allclose(kept, 1, rtol=2e-3)  # ε has the digits of the gradient's dtype
    lost = {"perturb_dtype": jnp.float32, "compute_dtype": dtype}
    assert survival(sam_optax.sam(0.05), params, grads, **lost)[0] < 0.01


def test_float32_keeps_everything():
    np.testing.assert_allclose(
        survival(sam_optax.sam(0.05), *large_params(jnp.float32)), 1, rtol=1e-3
    )


@pytest.mark.parametrize("dtype", LOW)
def test_float32_params_computed_with_in_low_precision(dtype):
    """An element moves by one spacing with probability |ε|/spacing: right on average, and noisy."""
    params, grads = large_params(jnp.float32)
    along, length = survival(sam_optax.sam(0.05), params, grads, compute_dtype=dtype)
    w, g = np.asarray(params, np.float64), np.asarray(grads, np.float64)
    eps = 0.05 * np.abs(g) / np.linalg.norm(g)
    spacing = np.exp2(np.floor(np.log2(np.abs(w))) - jnp.finfo(dtype).nmant)
    assert eps.max() < spacing.min()
    # Sums of independent spacings, each within four standard deviations.
    squares, moved = np.sum(eps**2), np.sum(eps * spacing)
    assert abs(length**2 * squares - moved) < 4 * np.sqrt(np.sum(eps * spacing**3))
    assert abs(along - 1) * squares < 4 * np.sqrt(np.sum(eps**3 * spacing))
    assert length > 10


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.fast("bfloat16")
def test_more_survives_in_smaller_params_and_at_larger_radii(dtype):
    radii = [survival(sam_optax.sam(rho), *large_params(dtype))[0] for rho in (0.05, 0.5, 5, 50)]
    assert radii == sorted(radii)
    assert radii[0] < 0.01
    assert radii[-1] > 0.7
    small, grads = large_params(dtype, 1e-3, 0.1)
    assert survival(sam_optax.sam(0.05), small, grads)[0] > 0.5


@pytest.mark.parametrize("name", ["sam", "rsam", "only_sam", "fsam_asam", "scale"])
@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, None), (jnp.float16, jnp.bfloat16)],
)
@pytest.mark.fast("bfloat16-None-sam")
def test_is_the_quotient_it_says(name, dtype, compute_dtype):
    method = build(name, 0.05)
    params = init_mlp(dtype=dtype)
    grads = jax.grad(mlp_loss)(params, *(b[0].astype(dtype) for b in batches(1)))
    state = method.init(params)
    actual = perturbation_survival(method, params, grads, state, compute_dtype=compute_dtype)
    as_float = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    eps = vector(method.update(as_float, state, params)[0])
    point, _ = sam_optax.as_perturbation(method).perturb_fn(params, grads, state)

    def cast(tree):
        return np.concatenate(
            [
                np.asarray(x).astype(compute_dtype or x.dtype).astype(np.float64).ravel()
                for x in jax.tree.leaves(tree)
            ]
        )

    moved = cast(point) - cast(params)
    expected = moved @ eps / (eps @ eps), np.linalg.norm(moved) / np.linalg.norm(eps)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "compute_dtype"), [(jnp.bfloat16, None), (jnp.float32, jnp.bfloat16)]
)
@pytest.mark.slow
def test_compiled_measurement_rounds_as_an_eager_one(dtype, compute_dtype):
    """A compiler that keeps the digits of fused casts would report 1 and 1."""
    params, grads = large_params(dtype, size=10**4)
    method = sam_optax.sam(0.005)
    measure = functools.partial(perturbation_survival, method, compute_dtype=compute_dtype)
    eager = measure(params, grads, method.init(params))
    compiled = jax.jit(measure)(params, grads, method.init(params))
    np.testing.assert_allclose(compiled, eager, rtol=1e-5)
    assert abs(float(compiled.length) - 1) > 0.5


def test_small_case():
    """w = (1, 100, .001), equal gradients, ρ = .05: each ε is .0289, little beside 100."""
    params = jnp.array([1.0, 100.0, 0.001], jnp.bfloat16)
    along, length = survival(sam_optax.sam(0.05), params, jnp.ones_like(params))
    eps = 0.05 / np.sqrt(3)
    # bfloat16 steps: 2⁻⁷ at 1, ½ at 100, 2⁻¹³ at .03.
    moved = np.array([4 * 2**-7, 0, np.round(eps * 2**13) / 2**13])
    np.testing.assert_allclose(along, np.sum(moved) / (3 * eps), rtol=5e-3)
    np.testing.assert_allclose(length, np.linalg.norm(moved) / 0.05, rtol=5e-3)


def test_nothing_is_lost_of_nothing():
    params, grads = large_params(jnp.bfloat16, size=10)
    assert survival(sam_optax.sam(0.05), params, 0 * grads) == [1, 1]
    assert survival(sam_optax.sam(0.0), params, grads) == [1, 1]


def test_sam_without_a_perturbation_is_its_base_optimizer():
    """What the helper warns of, and what `perturb_dtype` does about it."""
    params, grads = large_params(jnp.bfloat16, size=10**4)
    method = sam_optax.sam(0.005)
    assert survival(method, params, grads)[0] == 0
    offset = grads.astype(jnp.float32)
    grad_fn = jax.grad(lambda w: 1e3 * jnp.sum((w.astype(jnp.float32) - params + offset) ** 2))

    def sharp(**options):
        tx = sam_optax.sharpness_aware(optax.identity(), method, **options)
        return tx.update(None, tx.init(params), params, grad_fn=grad_fn)[0]

    assert_same(sharp(), grad_fn(params))
    assert not same(sharp(perturb_dtype=jnp.float32), grad_fn(params))


def test_in_a_training_step():
    """From the state of `sharpness_aware`, schedules included; the state stays as it is."""
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), sam_optax.fsam(optax.linear_schedule(0.0, 0.1, 4))
    )
    method = sam_optax.fsam(optax.linear_schedule(0.0, 0.1, 4))

    @jax.jit
    def train_step(params, state, x, y):
        grads = jax.grad(mlp_loss)(params, x, y)
        measured = perturbation_survival(
            method, params, grads, state.perturbation_state, compute_dtype=jnp.bfloat16
        )
        updates, state = tx.update(
            grads, state, params, grad_fn=lambda p: jax.grad(mlp_loss)(p, x, y)
        )
        return optax.apply_updates(params, updates), state, measured

    params, lengths = init_mlp(), []
    state = tx.init(params)
    for x, y in zip(*batches(4), strict=True):
        params, state, measured = train_step(params, state, x, y)
        lengths.append(float(measured.length))
    assert lengths[0] == 1  # ρ = 0
    assert all(0.5 < length < 2 and length != 1 for length in lengths[1:])


def test_other_leaves_pass():
    params = {
        "w": jnp.ones(3, jnp.bfloat16),
        "n": jnp.arange(2),
        "z": jnp.array([1 + 2j]),
        "none": None,
    }
    grads = {
        "w": jnp.ones(3, jnp.bfloat16),
        "n": jnp.zeros(2, int),
        "z": jnp.array([1j]),
        "none": None,
    }
    np.testing.assert_allclose(survival(sam_optax.sam(0.5), params, grads), 1, rtol=0.02)
    assert len(leaves(params)) == 3


def test_errors():
    with pytest.raises(TypeError, match="perturbation"):
        perturbation_survival(0.05, jnp.ones(2), jnp.ones(2), ())
    lost = optax.chain(sam_optax.rsam(key=KEY))
    with pytest.raises(ValueError, match="random start"):
        perturbation_survival(lost, jnp.ones(2), jnp.ones(2), lost.init(jnp.ones(2)))
