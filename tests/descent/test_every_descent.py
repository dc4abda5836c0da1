"""What every descent keeps: schedules, steps that do not perturb, dtypes, leaves of other kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, precision, signature, vector

import sam_optax

DESCENTS = {
    "surrogate_gap": lambda: sam_optax.surrogate_gap(0.4),
    "mix_gradients": lambda: sam_optax.mix_gradients(0.3),
    "decoupled_sharpness": lambda: sam_optax.decoupled_sharpness(optax.identity(), 0.1, 2.0),
    "match_ascent_norm": sam_optax.match_ascent_norm,
    "away_from_eigenvector": lambda: sam_optax.away_from_eigenvector(0.3),
    "toward_maximum": lambda: sam_optax.toward_maximum(1.0),
}
every_descent = pytest.mark.parametrize("name", DESCENTS)


def loss(params):
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.abs(x.astype(jnp.complex64))) for x in leaves)


def update(name, g, g_s, perturbed=True):
    """What the descent makes of an ascent gradient, which is also the params, and a sharp one."""
    tx, given = DESCENTS[name](), {"eigenvector": g, "value_fn": loss, "ascent_grads": g}
    return tx.update(g_s, tx.init(g), g, perturbed=jnp.asarray(perturbed), **given)[0]


@pytest.mark.parametrize("name", [name for name in DESCENTS if name != "decoupled_sharpness"])
def test_steps_that_do_not_perturb_keep_their_gradient(name):
    """And what a piece before made of it. (The decoupled form goes by the ascent gradient.)"""
    g, clipped = jnp.array([0.6, -0.8, 0.0]), jnp.array([0.4, -0.8, 0.0])
    assert np.any(vector(update(name, g, clipped)) != vector(clipped))
    assert_same(update(name, g, clipped, perturbed=False), clipped)


@pytest.mark.parametrize(
    "make",
    [
        sam_optax.surrogate_gap,
        sam_optax.mix_gradients,
        sam_optax.away_from_eigenvector,
        lambda weight: sam_optax.decoupled_sharpness(optax.identity(), 0.1, weight),
        lambda rate: sam_optax.decoupled_sharpness(optax.identity(), rate, 2.0),
    ],
)
def test_schedules_count_steps(make):
    g, g_s = jnp.array([0.6, -0.8]), jnp.array([1.0, 0.5])
    given = {"ascent_grads": g, "eigenvector": g, "perturbed": True}
    scheduled = make(lambda step: 0.5 * step)
    state = scheduled.init(g)
    for value in (0.0, 0.5, 1.0):
        found, state = scheduled.update(g_s, state, g, **given)
        assert_close(found, make(value).update(g_s, make(value).init(g), g, **given)[0], 1e-6)


@every_descent
def test_zero_gradients_stay_zero(name):
    zero = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    assert not np.any(vector(update(name, zero, zero)))


@every_descent
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "weak"]
)
def test_dtypes_and_weak_types_are_kept(name, dtype):
    with precision("float64" if dtype == "float64" else "float32"):
        g = jnp.asarray(2.0) if dtype == "weak" else jnp.ones(2, dtype)
        assert signature(jax.eval_shape(lambda g: update(name, g, g), g)) == signature(g)


@every_descent
def test_leaves_without_a_gradient_stay(name):
    others = {"none": None, "count": jnp.arange(2), "int": np.zeros(2, jax.dtypes.float0)}
    g, g_s = ({"w": jnp.array(x), **others} for x in ([0.6, 0.8], [1.0, 1.0]))
    out = update(name, g, g_s)
    assert np.all(np.isfinite(out["w"]))
    assert out["none"] is None
    assert out["int"].dtype == jax.dtypes.float0
    assert_same(out["count"], others["count"])
