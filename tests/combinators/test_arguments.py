"""``sharpness_aware``: what it forwards to whom, what it refuses, in which dtype it perturbs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import assert_same
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}


def gradient(p):
    return jax.tree.map(lambda x: 2 * x, p)


def recorder(log):
    """A base optimizer that notes what it is given."""

    def update(updates, state, params=None, **extra):
        log.append((updates, params, extra))
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", [*FOUR, "only_sam", "by_hand"])
def test_base_gets_the_sharp_gradient_the_ascent_gradient_and_the_params(name, given):
    log = []
    method = make(name)
    tx = sam_optax.sharpness_aware(recorder(log), method)
    state = tx.init(PARAMS)
    grads = gradient(PARAMS) if given else None
    tx.update(grads, state, PARAMS, grad_fn=gradient, value=1.0)
    ((sharp, params, extra),) = log
    start = method.start_fn(PARAMS, state.perturbation_state)
    assert_same(extra["ascent_grads"], gradient(start))
    point, _ = method.perturb_fn(PARAMS, gradient(start), state.perturbation_state)
    assert_same(sharp, gradient(point))
    assert_same(params, PARAMS)
    assert extra["value"] == 1.0


def test_ascent_grads_are_the_first_of_several():
    log = []
    tx = sam_optax.sharpness_aware(recorder(log), sam_optax.sam(0.3), ascent_steps=4)
    tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient)
    assert_same(log[0][2]["ascent_grads"], gradient(PARAMS))


EXTRAS = {
    "array": jnp.ones(2),
    "numpy": np.float32(1),
    "number": 1.0,
    "tree": {"x": [1, 2]},
    "none": None,
    "function": abs,
    "string": "name",
    "numpy_string": np.str_("name"),
    "object_array": np.array([None, "a"], dtype=object),
    "string_array": np.array(["a", "b"]),
    "key": jax.random.key(1),
    "dtype": jnp.float32,
}


@pytest.mark.parametrize("kind", EXTRAS)
@pytest.mark.parametrize("jit", [False, True])
def test_extra_arguments_of_any_kind_reach_both(kind, jit):
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra["unknown"])
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = sam_optax.sharpness_aware(spy, optax.chain(spy, sam_optax.sam(0.3)))
    step = lambda s, p: tx.update(None, s, p, grad_fn=gradient, unknown=EXTRAS[kind])
    (jax.jit(step) if jit else step)(tx.init(PARAMS), PARAMS)
    assert len(seen) == 2
    assert jax.tree.structure(seen[0]) == jax.tree.structure(EXTRAS[kind])
    assert seen[1] is EXTRAS[kind]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("missing", ["params", "grad_fn"])
def test_missing_arguments(missing, jit):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())

    def step(g, s, p):
        if missing == "params":
            return tx.update(g, s, grad_fn=gradient)
        return tx.update(g, s, p)

    step = jax.jit(step) if jit else step
    with pytest.raises(ValueError, match=r"update\(grads, state, params, grad_fn=grad_fn\)"):
        step(PARAMS, tx.init(PARAMS), PARAMS)


def test_grad_fn_must_be_callable():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())
    with pytest.raises((TypeError, ValueError), match="grad_fn"):
        tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=PARAMS)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"base_tx": 0.1}, TypeError, ["base_tx", "0.1", "optax.sgd"]),
        ({"base_tx": optax.sgd}, TypeError, ["base_tx", "optax.sgd"]),
        ({"perturbation": 0.05}, TypeError, ["perturbation", "0.05", "sam_optax.sam"]),
        ({"perturbation": sam_optax.sam}, TypeError, ["perturbation", "sam_optax.sam()"]),
        ({"ascent_steps": 0}, ValueError, ["ascent_steps", "0", "1"]),
        ({"ascent_steps": -3}, ValueError, ["ascent_steps", "-3", "1"]),
        ({"ascent_steps": 1.5}, TypeError, ["ascent_steps", "1.5"]),
        ({"ascent_steps": True}, TypeError, ["ascent_steps", "True"]),
        ({"when": 2}, TypeError, ["when", "2", "sam_optax.every"]),
        ({"perturb_dtype": jnp.int32}, ValueError, ["perturb_dtype", "int32", "float"]),
        ({"perturb_dtype": "no dtype"}, TypeError, ["no dtype"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    good = {"base_tx": optax.sgd(0.1), "perturbation": sam_optax.sam()}
    with pytest.raises(error) as caught:
        sam_optax.sharpness_aware(**(good | arguments))
    for word in words:
        assert word in str(caught.value)


# ---------------------------------------------------------------- perturb_dtype


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["sam", "asam", "fsam", "rsam"])
@pytest.mark.slow
def test_perturb_dtype_is_the_dtype_that_grad_fn_sees(name, steps):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    dtypes = []

    def grad_fn(p):
        dtypes.append(p["a"].dtype)
        return gradient(p)

    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), make(name), perturb_dtype=jnp.float32, ascent_steps=steps
    )
    state = tx.init(params)
    updates, new_state = tx.update(None, state, params, grad_fn=grad_fn)
    # The params themselves, or a random start, whose noise is not to be rounded away either.
    assert dtypes[0] == (jnp.float32 if make(name).has_start else jnp.bfloat16)
    assert dtypes[-1] == jnp.float32
    assert updates["a"].dtype == jnp.bfloat16
    assert jax.tree.map(jnp.result_type, new_state) == jax.tree.map(jnp.result_type, state)


@pytest.mark.slow
def test_perturb_dtype_leaves_complex_params_complex():
    params = {"c": jnp.array([1 + 1j]), "r": jnp.array([1.0], jnp.bfloat16)}
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(), perturb_dtype=jnp.float32)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=lambda p: p)
    assert updates["c"].dtype == jnp.complex64
    assert float(jnp.abs(updates["c"].imag[0])) > 0.1
