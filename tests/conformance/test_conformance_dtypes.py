"""What every method does with each dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import norm, precision, signature, vector, x64
from methods import FORMULAS, OURS, make, subject

import sam_optax

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128]


def tree(dtype):
    return {
        "conv": jnp.array([[[1.0, -2.0]]], dtype),
        "dense": {"bias": jnp.array([0.5, -1.0], dtype), "kernel": jnp.eye(2, dtype=dtype)},
    }


def gradient(params):
    return jax.tree.map(lambda x: x + jnp.ones_like(x), params)


def everything(method):
    """All that a method returns: ε, the perturbed params, the start, the new state."""

    def run(params, grads, state):
        eps, new_state = method.update(grads, state, params)
        point, _ = method.perturb_fn(params, grads, state)
        return eps, point, method.start_fn(params, state), new_state

    return run


def check_kept(method, params, grads):
    """Shapes, dtypes and weak types by tracing alone, which is where they are decided."""
    state = method.init(params)
    eps, point, start, new_state = jax.eval_shape(everything(method), params, grads, state)
    assert signature(eps) == signature(grads)
    assert signature(point) == signature(start) == signature(params)
    assert signature(new_state) == signature(state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.fast("*-float16", "*-complex128")
def test_dtypes_are_kept(name, dtype):
    """Also where jax refuses implicit promotion."""
    with precision(dtype), jax.numpy_dtype_promotion("strict"):
        check_kept(make(name), tree(dtype), gradient(tree(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sam", "sam_3", "asam", "fsam", "rsam"])
@pytest.mark.fast("rsam-bfloat16", "sam-complex64")
def test_values_in_every_dtype(name, dtype):
    """Finite, and ‖ε‖ = ρ for the methods of the Euclidean ball."""
    with precision(dtype):
        method, params = make(name), tree(dtype)
        run = jax.jit(everything(method))
        eps, *others = run(params, gradient(params), method.init(params))
        assert np.all(np.isfinite(vector((eps, *others))))
        if name not in ("sam_3", "asam"):
            tolerance = max(float(jnp.finfo(dtype).eps), 1e-6 if "rsam" in name else 0) * 4
            assert norm(eps) == pytest.approx(0.3, rel=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sam", "rsam"])
@pytest.mark.fast("*-bfloat16", "sam-complex64")
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


@pytest.mark.parametrize("name", OURS)
def test_leaves_of_different_dtypes(name):
    with x64():
        params = {str(dtype): jnp.ones(2, dtype) for dtype in (*DTYPES, jnp.int32)}
        check_kept(make(name), params, params)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(
    ("params_dtype", "grads_dtype"),
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.float16, jnp.bfloat16)],
)
def test_gradients_in_another_dtype_than_the_params(name, params_dtype, grads_dtype):
    check_kept(make(name), tree(params_dtype), tree(grads_dtype))


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
        "rsam_normalized_gradient": sam_optax.rsam(
            value(0.1),
            value(0.1),
            value(1.0),
            key=jax.random.key(0),
            weighting="normalized_gradient",
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", scalars())
@pytest.mark.fast("fsam-*")
def test_strict_dtype_promotion_with_jax_scalars(name, dtype):
    with precision(dtype), jax.numpy_dtype_promotion("strict"):
        check_kept(scalars()[name], tree(dtype), tree(dtype))


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"perturb_dtype": jnp.float32}])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["sam_scheduled", "asam", "fsam", "rsam"])
def test_strict_dtype_promotion_of_the_combinator(name, dtype, options):
    with jax.numpy_dtype_promotion("strict"):
        params = tree(dtype)
        tx = sam_optax.sharpness_aware(
            optax.sgd(0.1), make(name), when=sam_optax.every(2), **options
        )
        step = lambda s, p: tx.update(None, s, p, grad_fn=lambda p: p)
        state = tx.init(params)
        updates, new_state = jax.eval_shape(step, state, params)
        assert [u.dtype for u in jax.tree.leaves(updates)] == [dtype] * 3
        assert signature(new_state) == signature(state)
