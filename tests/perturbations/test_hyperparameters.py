"""Schedules of hyperparameters; bad values, where the error says what is wanted."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, vector

import sam_optax

OF_TYPES = ["number", "a static integer", "one PRNG key", "optax.GradientTransformation"]
OF_TYPES += ["a function (key, shape, dtype) -> array"]
NAN, INF = float("nan"), float("inf")
FROM_0 = "in [0, inf)"
TO_1 = "in [0, 1)"
WRONG = {
    "sam": [
        *(("rho", x, FROM_0) for x in (-0.1, NAN, INF)),
        *(("rho", x, "number") for x in ("0.1", None, True)),
        *(("p", x, "in [1, inf]") for x in (0.5, -2, NAN)),
        ("p", "2", "number"),
    ],
    "asam": [
        ("rho", -1.0, FROM_0),
        ("eta", -0.01, FROM_0),
        ("eta", [0.01], "number"),
        ("p", 0, "in [1, inf]"),
        ("normalization", None, "'elementwise' or 'filterwise'"),
        ("stack_axes", -1, "an integer >= 0"),
        ("stack_axes", True, "an integer >= 0"),
    ],
    "fsam": [
        ("rho", -1, FROM_0),
        ("sigma", -1.0, FROM_0),
        ("lmbda", 1.0, TO_1),
        ("lmbda", -0.1, TO_1),
        ("ema_start", "ones", "'bias_corrected'"),
        ("subtract", "both", "'previous' or 'new'"),
    ],
    "rsam": [
        ("rho", -1.0, FROM_0),
        ("gamma", -0.1, FROM_0),
        ("lmbda", -1.0, FROM_0),
        ("noise_scale", "covariance", "'relative'"),
        ("noise_scale", 0.5, "'relative'"),
        ("weighting", None, "'normalized_gradient'"),
        ("draw", "normal", "a function (key, shape, dtype) -> array"),
        ("key", 2**70, "at most 64 bits"),
        *(("key", key, "one PRNG key") for key in (0.5, None, jnp.zeros(2))),
    ],
    "bsam": [
        ("rho", -1.0, FROM_0),
        ("data_size", 0.0, "in (0, inf)"),
        ("weight_decay", -1.0, FROM_0),
        ("decay", 1.0, TO_1),
        ("damping", -1.0, FROM_0),
        ("initial_precision", 0.0, "in (0, inf)"),
    ],
    "fisher_sam": [("rho", -1, FROM_0), ("eta", -1, FROM_0)],
    "limit_rise": [("tau", 0.0, "in (0, inf)"), ("tau", -1.0, "in (0, inf)")],
    "low_pass": [
        ("gamma", -0.1, FROM_0),
        ("samples", 0, "at least 1"),
        ("samples", 1.5, "a static integer"),
        ("noise_scale", "none", "'relative'"),
    ],
    "momentum_start": [("decay", 1.0, TO_1), ("decay", -0.1, TO_1)],
    "random_mask": [("beta", x, "in (0, 1]") for x in (0.0, 1.5)],
    "smooth_gradient": [("decay", 1.0, TO_1), ("decay", -0.1, TO_1), ("ema_start", "g", "'zero'")],
    "sparsify": [
        ("sparsity", 1.0, TO_1),
        ("sparsity", -0.1, TO_1),
        ("choice", "random", "'fisher' or 'dynamic'"),
        ("every", 0, "at least 1"),
        ("every", 2.5, "a static integer"),
        ("drop", 1.0, TO_1),
    ],
    "zscore_filter": [("quantile", 1.0, TO_1), ("quantile", -0.1, TO_1)],
}
WRAPPERS = ["limit_rise", "momentum_start", "perturb_only", "random_start", "stochastic_rounding"]
WRONG_PARTS = [(name, "perturbation", 0.05, "optax.GradientTransformation") for name in WRAPPERS]
REQUIRED = {"perturbation": sam_optax.sam(9.0), "key": 0, "mask": True, "tau": 1.0}
REQUIRED |= {"data_size": 1.0, "weight_decay": 0.0, "weighting": "raw"}


def build(method, **arguments):
    """The method with these arguments and those that it needs."""
    function = getattr(sam_optax, method)
    needed = {k: REQUIRED[k] for k in REQUIRED if k in inspect.signature(function).parameters}
    return function(**{**needed, **arguments})


@pytest.mark.parametrize(
    ("method", "name", "value", "wanted"),
    [(method, *row) for method, rows in WRONG.items() for row in rows] + WRONG_PARTS,
)
def test_bad_arguments(method, name, value, wanted):
    with pytest.raises(TypeError if wanted in OF_TYPES else ValueError) as caught:
        build(method, **{name: value})
    message = str(caught.value)
    assert f"{name} must be" in message
    assert wanted in message
    assert repr(value) in message


KEYS = jax.random.split(jax.random.key(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sam_optax.sam(rho=jnp.ones(2)), r"rho must be a scalar, .* of shape \(2,\)"),
        (lambda: sam_optax.sam(rho=np.float32(-1)), r"rho must be in \[0, inf\), got -1.0"),
        (lambda: sam_optax.sam(rho=jnp.asarray(-1)), r"rho must be in \[0, inf\), got -1"),
        (lambda: sam_optax.sam(p=lambda step: 2.0), r"p must be a static number in \[1, inf\]"),
        (lambda: sam_optax.sparsify(lambda t: 0.5, key=0), "sparsity must be a number .*lambda"),
        (lambda: sam_optax.rsam(key=KEYS), "key must be an integer seed or one PRNG key"),
        (lambda: sam_optax.fsam(accumulator_dtype=jnp.int32), "accumulator_dtype must be a float"),
    ],
)
def test_arguments_of_other_kinds(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


SCHEDULED = {
    **{"sam": ["rho"], "asam": ["rho", "eta"], "fsam": ["rho", "sigma", "lmbda"]},
    **{"rsam": ["rho", "gamma", "lmbda"], "bsam": ["rho"], "fisher_sam": ["rho", "eta"]},
    **{"limit_rise": ["tau"], "low_pass": ["gamma"], "momentum_start": ["decay"]},
    **{"random_mask": ["beta"], "smooth_gradient": ["decay"]},
}


@pytest.mark.parametrize(
    ("method", "name"), [(method, name) for method, names in SCHEDULED.items() for name in names]
)
def test_a_schedule_counts_calls(method, name):
    """From the third step on, the method goes on as with the schedule's later value."""
    early, late = (build(method, **{name: value}) for value in (0.2, 0.9))
    scheduled = build(method, **{name: lambda step: jnp.where(step < 2, 0.2, 0.9)})
    w, rng = jnp.array([[1.0, -2.0], [0.5, 3.0]]), np.random.default_rng(0)
    state, early_state, scheduled_state = early.init(w), early.init(w), scheduled.init(w)
    with jax.disable_jit():
        for t in range(4):
            g = jnp.asarray(rng.normal(size=(2, 2)), jnp.float32)
            eps, state = (early if t < 2 else late).update(g, state, w)
            without, early_state = early.update(g, early_state, w)
            found, scheduled_state = scheduled.update(g, scheduled_state, w)
            assert_close(found, eps, 1e-5)
    assert np.abs(vector(without) - vector(eps)).max() > 1e-4
