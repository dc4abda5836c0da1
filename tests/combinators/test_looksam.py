"""What LookSAM remembers and reuses, by hand. (Whole runs: ``test_catalogue``.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same, norm, precision, vector

import sam_optax


@jax.jit
def both_steps(g, g_s, then):
    tx = sam_optax.reuse_orthogonal(0.5)
    _, state = tx.update(g_s, tx.init(g), ascent_grads=g, perturbed=True)
    out, _ = tx.update(then, state, ascent_grads=then, perturbed=False)
    return state, out


def step(g, g_s, then=None):
    """What a perturbing step remembers, and what the next one makes of a gradient (α = .5)."""
    return both_steps(g, g_s, g if then is None else then)


@pytest.mark.parametrize(
    ("g", "g_s", "g_v"),
    [([1, 1], [2, 0], [1, -1]), ([0, 2], [1, 7], [1, 0]), ([1, 2], [-2, 1], [-2, 1])],
)
def test_orthogonal_part_by_hand(g, g_s, g_v):
    """Case 13: over the whole tree; leaf by leaf, nothing of one-element leaves is orthogonal."""
    cut = lambda x: {"a": jnp.array(x[:1], jnp.float32), "b": jnp.array(x[1:], jnp.float32)}
    state, out = step(cut(g), cut(g_s))
    np.testing.assert_allclose(vector(state.g_v), g_v, atol=1e-6)
    expected = np.array(g) + 0.5 * np.linalg.norm(g) / np.linalg.norm(g_v) * np.array(g_v)
    np.testing.assert_allclose(vector(out), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounding_of_parallel_gradients_is_not_blown_up_and_a_small_part_not_lost(dtype):
    rng = np.random.default_rng(0)
    g = {"a": jnp.asarray(1 + rng.normal(size=100_000), dtype), "b": jnp.ones(2, dtype)}
    state, out = step(g, g)
    assert norm(state.g_v) == 0
    assert_same(out, g)
    # Products rounded to the dtype are parallel within its rounding only.
    scaled = jax.tree.map(lambda x: (1.1 * x.astype(jnp.float32)).astype(dtype), g)
    assert norm(step(g, scaled)[0].g_v) <= 4 * float(jnp.finfo(dtype).eps) * norm(scaled)
    # 32 units of rounding are a direction.
    part = 32 * float(jnp.finfo(dtype).eps)
    state, out = step(jnp.array([1, 0], dtype), jnp.array([1, part], dtype))
    np.testing.assert_allclose(vector(state.g_v), [0, part], rtol=1e-3)
    np.testing.assert_allclose(vector(out), [1, 0.5], rtol=1e-2)


def test_zero_gradients_and_nothing_remembered():
    zero, g = jnp.zeros(3), jnp.array([1.0, -2.0, 0.5])
    for first, second in ((zero, zero), (g, zero)):
        state, out = step(first, second)
        assert norm(state.g_v) == 0
        assert_same(out, first)
    # Everything is orthogonal to an ascent gradient of 0.
    state, out = step(zero, g, then=g)
    assert_same(state.g_v, g)
    assert_close(out, 1.5 * g, 1e-6)
    assert_same(step(zero, g, then=zero)[1], zero)
    tx = sam_optax.reuse_orthogonal()
    assert_same(tx.update(g, tx.init(g), ascent_grads=g, perturbed=False)[0], g)


@pytest.mark.parametrize("alpha", [0.0, lambda step: 0.5 * step])
def test_a_schedule_of_alpha_counts_steps_and_0_reuses_nothing(alpha):
    tx, g = sam_optax.reuse_orthogonal(alpha), jnp.array([1.0, 1.0])
    _, state = tx.update(jnp.array([2.0, 0.0]), tx.init(g), ascent_grads=g, perturbed=True)
    for step in (1, 2):
        out, state = tx.update(g, state, ascent_grads=g, perturbed=False)
        share = alpha(step) if callable(alpha) else 0.0
        assert_close(out, g + share * jnp.array([1.0, -1.0]), 1e-6)


@pytest.mark.parametrize(("scale", "dtype"), [(1e4, jnp.float16), (1e-36, jnp.bfloat16)])
def test_range_of_narrow_dtypes(scale, dtype):
    cut = lambda x: jnp.asarray(scale * np.array(x), dtype)
    state, out = step(cut([1, 1]), cut([2, 0]))
    assert (state.g_v.dtype, out.dtype, state.norm.dtype) == (dtype, dtype, jnp.float32)
    np.testing.assert_allclose(vector(out) / scale, [1.5, 0.5], rtol=0.02)


def test_leaves_of_other_kinds():
    float0 = np.zeros(2, jax.dtypes.float0)
    g = {"w": jnp.array([1.0, 1.0]), "n": None, "z": jnp.array([1j]), "i": float0}
    g_s = {**g, "w": jnp.array([2.0, 0.0])}
    tx = sam_optax.reuse_orthogonal(1.0)
    _, state = tx.update(g_s, tx.init({**g, "i": jnp.arange(2)}), ascent_grads=g, perturbed=True)
    # ⟨g_s, g⟩ = 2 + 1 and ‖g‖² = 2 + 1: the complex leaf takes part.
    np.testing.assert_allclose(state.g_v["w"], [1.0, -1.0], atol=1e-6)
    np.testing.assert_allclose(state.g_v["z"], [0], atol=1e-6)
    assert state.g_v["i"] is None
    out, _ = tx.update(g, state, ascent_grads=g, perturbed=False)
    assert out["i"] is float0
    assert out["n"] is None
    with precision(jnp.float64):
        assert tx.init(jnp.ones(2)).norm.dtype == jnp.float64


def test_nothing_leaks_from_the_branch_not_taken_and_no_state_is_the_gradient():
    """A state that is not finite does not reach a perturbing step; states can be donated."""
    tx, g = sam_optax.reuse_orthogonal(0.5), jnp.array([1.0, 1.0])
    spoilt = tx.init(g)._replace(g_v=jnp.full(2, jnp.nan), norm=jnp.asarray(jnp.nan))
    update = jax.jit(lambda s, on: tx.update(g, s, ascent_grads=g, perturbed=on))
    assert np.all(np.isfinite(vector(update(spoilt, True))))
    _, state = tx.update(g, tx.init(g), ascent_grads=jnp.array([0.0, 1.0]))
    assert state.g_v is not g


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"alpha must be in \[0, inf\), got -1\.0"):
        sam_optax.reuse_orthogonal(-1.0)
    tx = sam_optax.reuse_orthogonal()
    with pytest.raises(ValueError, match="reuse_orthogonal needs ascent_grads"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
