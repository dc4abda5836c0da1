"""What every method does with each dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import norm, precision, signature, vector, x64
from methods import FORMULAS, make, subject

import sam_optax

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128]


def tree(dtype):
    return {
        "conv": jnp.array([[[1.0, -2.0]]], dtype),
        "dense": {"bias": jnp.array([0.5, -1.0], dtype), "kernel": jnp.eye(2, dtype=dtype)},
    }


def gradient(params):
    return jax.tree.map(lambda x: x + jnp.ones_like(x), params)


def halfway(params, eps):
    return jax.tree.map(lambda p, e: p + 0.5 * e, params, eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_dtypes_are_kept(name, dtype):
    """Also where jax refuses implicit promotion."""
    # Op by op, here and below: compiling whole methods for each dtype would take minutes.
    with precision(dtype), jax.numpy_dtype_promotion("strict"), jax.disable_jit():
        method, params = make(name), tree(dtype)
        state = method.init(params)
        expected = signature(params), signature(state)
        for _ in range(2):
            grads = gradient(params)
            eps, state = method.update(grads, state, params)
            assert (signature(eps), signature(state)) == expected
            assert np.all(np.isfinite(vector(eps)))
            params = halfway(params, eps)
        point, _ = method.perturb_fn(params, grads, state)
        assert signature(point) == expected[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sam", "fsam", "rsam", "only_sam", "only_rsam", "by_hand"])
def test_radius_in_every_dtype(name, dtype):
    """‖ε‖ = ρ for the methods of the Euclidean ball."""
    if name == "by_hand":
        dtype = jnp.float32  # what optax's norm does elsewhere is its own affair
    with precision(dtype), jax.disable_jit():
        method, params = make(name), tree(dtype)
        eps, _ = method.update(gradient(params), method.init(params), params)
        tolerance = max(float(jnp.finfo(dtype).eps), 1e-6 if "rsam" in name else 0) * 4
        assert norm(eps) == pytest.approx(0.3, rel=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sam", "sam_3", "fsam", "rsam"])
def test_updates_have_the_dtype_of_the_params(name, dtype):
    with precision(dtype):
        tx, params = subject(name, "sgd"), tree(dtype)
        step = jax.jit(lambda s, p: tx.update(None, s, p, grad_fn=gradient))
        state = tx.init(params)
        expected = signature(state)
        for _ in range(2):
            updates, state = step(state, params)
        assert [u.dtype for u in jax.tree.leaves(updates)] == [dtype] * 3
        assert signature(state) == expected


@pytest.mark.parametrize("name", FORMULAS)
def test_leaves_of_different_dtypes(name):
    with x64(), jax.disable_jit():
        params = {
            "bf16": jnp.ones(2, jnp.bfloat16),
            "c64": jnp.ones(2, jnp.complex64),
            "f16": jnp.ones(2, jnp.float16),
            "f32": jnp.ones(2, jnp.float32),
            "f64": jnp.ones(2, jnp.float64),
            "i32": jnp.ones(2, jnp.int32),
        }
        grads = {k: v if k == "i32" else 3 * v for k, v in params.items()}
        method = make(name)
        state = method.init(params)
        eps, new_state = method.update(grads, state, params)
        assert signature({k: eps[k] for k in eps if k != "i32"}) == (
            signature({k: params[k] for k in params if k != "i32"})
        )
        assert signature(new_state) == signature(state)
        point, _ = method.perturb_fn(params, grads, state)
        assert signature(point) == signature(params)


@pytest.mark.parametrize("name", ["sam", "asam", "fsam", "rsam"])
@pytest.mark.parametrize(
    ("params_dtype", "grads_dtype"),
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.float16, jnp.bfloat16)],
)
def test_gradients_in_another_dtype_than_the_params(name, params_dtype, grads_dtype):
    method = make(name)
    params, grads = tree(params_dtype), tree(grads_dtype)
    state = method.init(params)
    with jax.disable_jit():
        eps, new_state = method.update(grads, state, params)
        point, _ = method.perturb_fn(params, grads, state)
    assert signature(eps) == signature(grads)
    assert signature(new_state) == signature(state)
    assert signature(point) == signature(params)


# ---------------------------------------------------------------- strict promotion


def scalars():
    """Methods whose hyperparameters are JAX scalars, given or from a schedule."""
    value = lambda x: jnp.asarray(x, jnp.float32)
    schedule = lambda x: lambda step: value(x)
    return {
        "sam": sam_optax.sam(value(0.1)),
        "sam_3": sam_optax.sam(schedule(0.1), p=3),
        "asam": sam_optax.asam(schedule(0.1), schedule(0.01)),
        "fsam": sam_optax.fsam(schedule(0.1), schedule(0.5), schedule(0.9)),
        "fsam_corrected": sam_optax.fsam(
            value(0.1), value(0.5), value(0.9), ema_start="bias_corrected"
        ),
        "rsam": sam_optax.rsam(schedule(0.1), schedule(0.1), schedule(1.0), key=jax.random.key(0)),
        "rsam_normalized": sam_optax.rsam(
            value(0.1), value(0.1), value(1.0), key=jax.random.key(0), normalize_gradient=True
        ),
    }


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("name", scalars())
def test_strict_dtype_promotion_with_jax_scalars(name, dtype):
    with precision(dtype), jax.numpy_dtype_promotion("strict"), jax.disable_jit():
        method, params = scalars()[name], tree(dtype)
        eps, _ = method.update(params, method.init(params), params)
        assert eps["conv"].dtype == dtype


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"perturb_dtype": jnp.float32}])
@pytest.mark.parametrize("name", ["sam_scheduled", "rsam"])
def test_strict_dtype_promotion_of_the_combinator(name, options):
    with jax.numpy_dtype_promotion("strict"):
        params = tree(jnp.float32)
        tx = sam_optax.sharpness_aware(
            optax.sgd(0.1), make(name), when=sam_optax.every(2), **options
        )
        step = jax.jit(lambda s, p: tx.update(None, s, p, grad_fn=lambda p: p))
        updates, _ = step(tx.init(params), params)
        assert np.all(np.isfinite(vector(updates)))
