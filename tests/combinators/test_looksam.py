"""LookSAM against its formula, its limits, its numerics and JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from family import BASE, LR, MOMENTUM, START, as_tree, gap, gradient, numpy_gradients, run
from helpers import Counted, assert_close, assert_same, norm, precision, signature, vector

import sam_optax

RHO = 0.3


def looksam(rho, k, alpha=0.7, perturbation=sam_optax.sam, base=BASE):
    descent = sam_optax.reuse_orthogonal(alpha)
    when = sam_optax.every(k)
    return sam_optax.sharpness_aware(base, perturbation(rho), descent=descent, when=when)


@functools.cache
def trained(k, alpha):
    return run(looksam(RHO, k, alpha))


def reference(gradient_of):
    return ref.train(START, numpy_gradients(), gradient_of, LR, MOMENTUM)


@jax.jit
def both_steps(g, g_s, then):
    tx = sam_optax.reuse_orthogonal(0.5)
    _, state = tx.update(g_s, tx.init(g), ascent_grads=g, perturbed=True)
    out, _ = tx.update(then, state, ascent_grads=then, perturbed=False)
    return state, out


def step(g, g_s, then=None):
    """What a perturbing step remembers, and what the next one makes of a gradient (α = .5)."""
    return both_steps(g, g_s, g if then is None else then)


@pytest.mark.parametrize(("k", "alpha"), [(3, 0.7), (2, 2.0)])
def test_is_the_papers_formula(k, alpha):
    assert gap(trained(k, alpha)[0], reference(ref.looksam(RHO, k, alpha))) < 1e-12


def test_wrong_formulas_are_told_apart():
    points, _ = trained(3, 0.7)

    def wrong(change):
        """LookSAM with another g_v."""
        kept = []

        def gradient_of(t, w, grad):
            g = grad(w)
            if t % 3 == 0:
                g_s = grad(w + RHO * ref.unit(g))
                kept.append(change(g, g_s))
                return g_s
            return g + 0.7 * np.linalg.norm(g) * ref.unit(kept[-1])

        return reference(gradient_of)

    def leaf_by_leaf(g, g_s):
        parts = [a - ref.project(a, b) for a, b in ((g_s[:6], g[:6]), (g_s[6:], g[6:]))]
        return np.concatenate(parts)

    assert gap(points, wrong(lambda g, g_s: g_s - ref.project(g_s, g))) < 1e-12
    for change in (
        leaf_by_leaf,
        lambda g, g_s: g - ref.project(g, g_s),  # the other way round
        lambda g, g_s: g_s - g,
        lambda g, g_s: g_s,
        lambda g, g_s: -(g_s - ref.project(g_s, g)),
    ):
        assert gap(points, wrong(change)) > 1e-3


@pytest.mark.slow
def test_limits():
    sam = sam_optax.sam(RHO)
    assert gap(trained(1, 0.7)[0], run(sam_optax.sharpness_aware(BASE, sam))[0]) < 1e-14
    every_3 = sam_optax.sharpness_aware(BASE, sam, when=sam_optax.every(3))
    assert gap(trained(3, 0.0)[0], run(every_3)[0]) < 1e-14


@pytest.mark.parametrize(
    ("g", "g_s", "g_v"),
    [
        ([1, 1], [2, 0], [1, -1]),
        ([3, 4], [5, 0], [5 - 1.8, -2.4]),
        ([0, 2], [1, 7], [1, 0]),
        ([1, 2], [-2, 1], [-2, 1]),
    ],
)
def test_orthogonal_part_by_hand(g, g_s, g_v):
    """Over the whole tree: leaf by leaf, nothing of one-element leaves is orthogonal."""
    cut = lambda x: {"a": jnp.array(x[:1], jnp.float32), "b": jnp.array(x[1:], jnp.float32)}
    state, out = step(cut(g), cut(g_s))
    np.testing.assert_allclose(vector(state.g_v), g_v, atol=1e-6)
    assert float(state.norm) == pytest.approx(np.linalg.norm(g_v), rel=1e-6)
    expected = np.array(g) + 0.5 * np.linalg.norm(g) / np.linalg.norm(g_v) * np.array(g_v)
    np.testing.assert_allclose(vector(out), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_before_the_first_perturbation_nothing_is_reused():
    points, expected = (
        run(
            sam_optax.sharpness_aware(
                BASE, sam_optax.sam(RHO), descent=descent, when=lambda t: t == 2
            ),
            5,
        )[0]
        for descent in (sam_optax.reuse_orthogonal(0.7), None)
    )
    assert gap(points[:3], expected[:3]) < 1e-14
    assert gap(points[3:], expected[3:]) > 1e-3


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("factor", [1.0, 1.1, -0.3, 0.0, 1e-3])
@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.slow
def test_rounding_of_parallel_gradients_is_not_blown_up(dtype, factor, size):
    rng = np.random.default_rng(0)
    g = {"a": jnp.asarray(1 + rng.normal(size=size), dtype), "b": jnp.ones(2, dtype)}
    g_s = jax.tree.map(lambda x: (factor * x.astype(jnp.float32)).astype(dtype), g)
    state, out = step(g, g_s)
    if factor in (1.0, 0.0) or dtype == jnp.float32:
        assert norm(state.g_v) == 0
        assert_same(out, g)
    # Products rounded to the dtype are parallel within its rounding only.
    assert norm(state.g_v) <= 4 * float(jnp.finfo(dtype).eps) * norm(g_s)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.slow
def test_a_small_orthogonal_part_is_not_lost(dtype):
    """32 units of rounding are a direction."""
    part = 32 * float(jnp.finfo(dtype).eps)
    state, out = step(jnp.array([1, 0], dtype), jnp.array([1, part], dtype))
    np.testing.assert_allclose(vector(state.g_v), [0, part], rtol=1e-3)
    np.testing.assert_allclose(vector(out), [1, 0.5], rtol=1e-2)


def test_zero_gradients():
    zero, g = jnp.zeros(3), jnp.array([1.0, -2.0, 0.5])
    state, out = step(zero, zero)
    assert norm(state.g_v) == 0
    assert_same(out, zero)
    state, out = step(g, zero)
    assert norm(state.g_v) == 0
    assert_same(out, g)
    # Everything is orthogonal to an ascent gradient of 0.
    state, out = step(zero, g, then=g)
    assert_same(state.g_v, g)
    assert_close(out, 1.5 * g, 1e-6)
    assert_same(step(zero, g, then=zero)[1], zero)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e4, jnp.float16), (1e-4, jnp.float16), (1e37, jnp.bfloat16), (1e-36, jnp.bfloat16)],
)
def test_range_of_narrow_dtypes(scale, dtype):
    cut = lambda x: jnp.asarray(scale * np.array(x), dtype)
    state, out = step(cut([1, 1]), cut([2, 0]))
    assert state.g_v.dtype == out.dtype == dtype
    assert state.norm.dtype == jnp.float32
    np.testing.assert_allclose(vector(state.g_v) / scale, [1, -1], rtol=0.02)
    np.testing.assert_allclose(vector(out) / scale, [1.5, 0.5], rtol=0.02)


@pytest.mark.slow
def test_leaves_of_other_kinds():
    float0 = np.zeros(2, jax.dtypes.float0)
    g = {"w": jnp.array([1.0, 1.0]), "n": None, "z": jnp.array([1j]), "i": float0}
    g_s = {**g, "w": jnp.array([2.0, 0.0]), "z": jnp.array([1j])}
    params = {**g, "i": jnp.arange(2)}
    tx = sam_optax.reuse_orthogonal(1.0)
    _, state = tx.update(g_s, tx.init(params), ascent_grads=g, perturbed=True)
    np.testing.assert_allclose(state.g_v["w"], [1.0, -1.0], atol=1e-6)
    np.testing.assert_allclose(state.g_v["z"], [0], atol=1e-6)
    assert state.g_v["i"] is None
    out, _ = tx.update(g, state, ascent_grads=g, perturbed=False)
    assert out["i"] is float0
    assert out["n"] is None


def test_nothing_leaks_from_the_branch_not_taken():
    """A state that is not finite does not reach a perturbing step, nor g_s the others."""
    tx = sam_optax.reuse_orthogonal(0.5)
    g = jnp.array([1.0, 1.0])
    spoilt = tx.init(g)._replace(g_v=jnp.full(2, jnp.nan), norm=jnp.asarray(jnp.nan))
    update = jax.jit(lambda s, on: tx.update(g, s, ascent_grads=g, perturbed=on))
    out, state = update(spoilt, True)
    assert np.all(np.isfinite(vector((out, state))))


# ---------------------------------------------------------------- use


@pytest.mark.slow
def test_scan_vmap_donation_and_no_retrace():
    tx = looksam(RHO, 3)
    params = as_tree(START, jnp.float32)

    def one(carry, t):
        params, state = carry
        updates, state = tx.update(None, state, params, grad_fn=lambda p: gradient(p, t))
        return (optax.apply_updates(params, updates), state), None

    first = params, tx.init(params)
    counted = Counted(one)
    jitted = jax.jit(counted, donate_argnums=0)
    carry = jax.tree.map(jnp.copy, first)
    for t in range(5):
        carry, _ = jitted(carry, jnp.asarray(t))
        assert signature(carry) == signature(first)
    assert counted.calls == 1
    scanned, _ = jax.jit(lambda c: jax.lax.scan(one, c, jnp.arange(5)))(first)
    assert_close(scanned, carry, 1e-6)
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), first)
    batched, _ = jax.jit(lambda c: jax.lax.scan(jax.vmap(one, (0, None)), c, jnp.arange(5)))(pair)
    assert_close(jax.tree.map(lambda x: x[1], batched), carry, 1e-5)


def test_state_is_one_copy_of_the_gradient_and_no_alias():
    params = as_tree(START, jnp.float32)
    tx = sam_optax.reuse_orthogonal()
    state = tx.init(params)
    assert jax.tree.structure(state.g_v) == jax.tree.structure(params)
    assert norm(state) == 0
    _, state = tx.update(params, state, ascent_grads=jax.tree.map(jnp.flip, params))
    shared = {id(x) for x in jax.tree.leaves(params)} & {id(x) for x in jax.tree.leaves(state)}
    assert not shared


def test_a_schedule_of_alpha_counts_steps():
    points, states = run(looksam(RHO, 2, lambda t: 0.2 * t), 4)
    method = ref.looksam(RHO, 2, 1.0)

    def gradient_of(t, w, grad):
        g, reused = grad(w), method(t, w, grad)
        return reused if t % 2 == 0 else g + 0.2 * t * (reused - g)

    assert gap(points, reference(gradient_of)[:4]) < 1e-7
    assert int(states[-1].base_state[0].step) == 4


def test_float64():
    with precision(jnp.float64):
        tx = sam_optax.reuse_orthogonal(jnp.float32(0.7))
        state = tx.init(jnp.ones(2))
        assert state.norm.dtype == jnp.float64


@pytest.mark.slow
def test_other_compositions():
    """With another perturbation, with alternating, inside inject_hyperparams."""
    single = looksam(0.5, 2, perturbation=sam_optax.asam, base=optax.sgd(0.1))
    descent = sam_optax.reuse_orthogonal(0.7)
    both = sam_optax.alternating(
        optax.sgd(0.1), sam_optax.asam(0.5), descent=descent, when=sam_optax.every(2)
    )
    w = v = jnp.array([1.0, -2.0])
    state, single_state = both.init(w), single.init(v)
    for t in range(3):
        for _ in range(2 if t % 2 == 0 else 1):
            updates, state = both.update(w**3, state, w)
            w = optax.apply_updates(w, updates)
        updates, single_state = single.update(None, single_state, v, grad_fn=lambda v: v**3)
        v = optax.apply_updates(v, updates)
    assert_close(sam_optax.eval_params(w, state), v, 1e-6)
    injected = optax.inject_hyperparams(lambda rho: looksam(rho, 3))(rho=RHO)
    points = run(injected, dtype=jnp.float32)[0]
    assert gap(points, trained(3, 0.7)[0]) < 1e-5


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"alpha must be in \[0, inf\), got -1\.0"):
        sam_optax.reuse_orthogonal(-1.0)
    tx = sam_optax.reuse_orthogonal()
    with pytest.raises(ValueError, match="reuse_orthogonal needs ascent_grads"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
