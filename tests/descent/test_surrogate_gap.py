"""GSAM against its formula, its limits and its numerics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from family import BASE, LR, MOMENTUM, START, as_tree, gap, numpy_gradients, run
from helpers import assert_close, assert_same, precision, vector

import sam_optax

RHO = 0.3


def tx(alpha, perturbation=None, **options):
    descent, sam = sam_optax.surrogate_gap(alpha), sam_optax.sam(RHO)
    return sam_optax.sharpness_aware(BASE, perturbation or sam, descent=descent, **options)


@functools.cache
def trained(alpha):
    return run(tx(alpha))


def reference(gradient_of):
    return ref.train(START, numpy_gradients(), gradient_of, LR, MOMENTUM)


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(alpha, g, g_s, perturbed=True):
    """What it makes of an ascent gradient and a sharp one."""
    gap_tx = sam_optax.surrogate_gap(alpha)
    return gap_tx.update(g_s, (), ascent_grads=g, perturbed=perturbed)[0]


@pytest.mark.parametrize("alpha", [0.4, 2.0])
def test_is_the_papers_formula(alpha):
    points, _ = trained(alpha)
    assert gap(points, reference(ref.gsam(RHO, alpha))) < 1e-13


def wrong(change):
    """GSAM with another direction than the right one."""

    def gradient_of(t, w, grad):
        g = grad(w)
        return change(g, grad(w + RHO * ref.unit(g)))

    return gradient_of


def leaf_by_leaf(g, g_s):
    across = [a - ref.project(a, b) for a, b in ((g[:6], g_s[:6]), (g[6:], g_s[6:]))]
    return g_s - 0.4 * np.concatenate(across)


@pytest.mark.parametrize(
    "change",
    [
        leaf_by_leaf,
        lambda g, g_s: g_s + 0.4 * (g - ref.project(g, g_s)),  # added
        lambda g, g_s: g_s - 0.4 * (g_s - ref.project(g_s, g)),  # the other way round
        lambda g, g_s: g_s - 0.4 * ref.project(g, g_s),  # the parallel part
        lambda g, g_s: g_s - 0.4 * ref.unit(g - ref.project(g, g_s)),
        lambda g, g_s: g - 0.4 * (g - ref.project(g, g_s)),
    ],
)
def test_wrong_formulas_are_told_apart(change):
    points, _ = trained(0.4)
    assert gap(points[:3], reference(wrong(change))[:3]) > 1e-3


def test_alpha_0_is_sam_to_the_bit():
    points, states = run(tx(0.0))
    plain, plain_states = run(sam_optax.sharpness_aware(BASE, sam_optax.sam(RHO)))
    assert gap(points, plain) == 0
    assert_same(states[-1].base_state[1], plain_states[-1].base_state)


def test_steps_that_do_not_perturb_are_the_base_optimizers_to_the_bit():
    options = {"when": sam_optax.after(3)}
    points, _ = run(tx(0.4, **options), 5)
    without, _ = run(sam_optax.sharpness_aware(BASE, sam_optax.sam(RHO), **options), 5)
    assert gap(points[:3], without[:3]) == 0
    assert gap(points[3:], without[3:]) > 1e-3


@pytest.mark.parametrize(
    ("g", "g_s", "alpha", "expected"),
    [
        ([2, 0], [1, 1], 0.4, [0.6, 1.4]),
        ([2, 0], [1, 1], 0.0, [1, 1]),
        ([2, 0], [1, 1], 1.0, [0, 2]),
        ([0, 3], [2, 0], 0.5, [2, -1.5]),  # nothing of g lies along g_s
        ([1, 7], [3, 4], 0.2, [3.544, 3.592]),
        ([4, 6], [2, 3], 0.4, [2, 3]),  # parallel
    ],
)
def test_by_hand(g, g_s, alpha, expected):
    g, g_s = (np.array(x, np.float64) for x in (g, g_s))
    by_hand = g_s - alpha * (g - ref.project(g, g_s))
    np.testing.assert_allclose(by_hand, expected, atol=1e-12)
    together = apply(alpha, jnp.asarray(g, jnp.float32), jnp.asarray(g_s, jnp.float32))
    np.testing.assert_allclose(together, by_hand, atol=1e-6)
    # Over the whole tree: it does not matter how the vector is cut into leaves.
    cut = lambda x: [jnp.asarray(x[:1], jnp.float32), jnp.asarray(x[1:], jnp.float32)]
    np.testing.assert_allclose(vector(apply(alpha, cut(g), cut(g_s))), by_hand, atol=1e-6)


@pytest.mark.slow
def test_with_a_random_start_it_is_r_gsam():
    """g is the gradient at the random start."""
    key = jax.random.key(3)
    method, g_and_g_s = sam_optax.rsam(RHO, 0.5, key=key), []

    def grad_fn(p):
        g_and_g_s.append(p**3)
        return p**3

    w = jnp.array([1.0, -2.0, 0.5])
    r_gsam = sam_optax.sharpness_aware(optax.sgd(1.0), method, descent=sam_optax.surrogate_gap(0.4))
    updates, _ = r_gsam.update(None, r_gsam.init(w), w, grad_fn=grad_fn)
    g, g_s = (np.asarray(x, np.float64) for x in g_and_g_s)
    assert np.abs(g - np.asarray(w**3)).max() > 0.01
    np.testing.assert_allclose(-updates, g_s - 0.4 * (g - ref.project(g, g_s)), rtol=1e-5)


def test_a_schedule_of_alpha_counts_steps():
    points, states = run(tx(lambda t: 0.1 * t), 4)
    expected = reference(lambda t, w, grad: ref.gsam(RHO, 0.1 * t)(t, w, grad))
    assert gap(points, expected[:4]) < 1e-13
    assert int(states[-1].base_state[0].step) == 4


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.slow
def test_zero_gradients(dtype):
    zero, g = jnp.zeros(3, dtype), jnp.array([1, -2, 0.5], dtype)
    assert_same(apply(0.5, zero, zero), zero)
    assert_same(apply(0.5, zero, g), g)
    # Against a sharp gradient of 0, all of g is orthogonal to it.
    assert_same(apply(0.5, g, zero), -0.5 * g)


@pytest.mark.parametrize(
    ("dtype", "tol"), [(jnp.bfloat16, 2.0**-8), (jnp.float16, 2.0**-10), (jnp.float32, 1e-5)]
)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.slow
def test_dtypes_are_kept_and_their_range_is_used(dtype, tol, scale):
    rng = np.random.default_rng(0)
    g, g_s = (
        {"a": jnp.asarray(scale * rng.normal(size=(4, 5)), dtype), "b": jnp.zeros(2, dtype)}
        for _ in range(2)
    )
    out = apply(0.4, g, g_s)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(out))
    u, v = vector(g), vector(g_s)
    np.testing.assert_allclose(
        vector(out), v - 0.4 * (u - ref.project(u, v)), atol=tol * 2 * np.abs(v).max()
    )


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(3e4, jnp.float16), (1e-6, jnp.float16), (1e37, jnp.bfloat16), (1e-37, jnp.bfloat16)],
)
def test_squares_do_not_overflow(scale, dtype):
    """Nor vanish: the projection is the same at every scale."""
    g, g_s = (scale * np.array(x) for x in ([2.0, 0.0], [1.0, 1.0]))
    out = vector(apply(0.4, jnp.asarray(g, dtype), jnp.asarray(g_s, dtype)))
    np.testing.assert_allclose(out / scale, [0.6, 1.4], rtol=0.03)


def test_complex_gradients_are_pairs_of_real_ones():
    rng = np.random.default_rng(1)
    g, g_s = (rng.normal(size=4) + 1j * rng.normal(size=4) for _ in range(2))
    out = np.asarray(apply(0.4, jnp.asarray(g), jnp.asarray(g_s)))
    pair = lambda z: np.concatenate([z.real, z.imag])
    expected = pair(g_s) - 0.4 * (pair(g) - ref.project(pair(g), pair(g_s)))
    np.testing.assert_allclose(pair(out), expected, atol=1e-6)


def test_leaves_without_a_gradient_stay():
    float0 = np.zeros(2, jax.dtypes.float0)
    g = {"w": jnp.array([2.0, 0.0]), "none": None, "count": jnp.arange(2), "int": float0}
    g_s = {**g, "w": jnp.array([1.0, 1.0])}
    out = apply(0.4, g, g_s)
    np.testing.assert_allclose(out["w"], [0.6, 1.4], rtol=1e-6)
    assert out["none"] is None
    assert_same(out["count"], g["count"])
    assert out["int"].dtype == jax.dtypes.float0


def test_weak_types_and_float64_are_kept():
    assert apply(0.4, jnp.asarray(2.0), jnp.asarray(1.0)).weak_type
    with precision(jnp.float64):
        g = jnp.array([2.0, 0.0])
        assert apply(np.float32(0.4), g, g).dtype == jnp.float64


@pytest.mark.parametrize("perturbed", [False, np.bool_(False)])
def test_an_unperturbed_step_keeps_its_gradient(perturbed):
    g = as_tree(START, jnp.float32)
    assert_same(apply(0.4, g, g, perturbed), g)


# ---------------------------------------------------------------- use


@pytest.mark.slow
def test_wrappers_take_the_same_steps():
    points, _ = run(tx(0.4), 3, jnp.float32, given=True)
    for wrapped in (
        optax.chain(optax.identity(), tx(0.4)),
        optax.apply_if_finite(tx(0.4), 3),
        optax.inject_hyperparams(lambda alpha: tx(alpha))(alpha=0.4),
    ):
        others, _ = run(wrapped, 3, jnp.float32, given=True)
        assert gap(points, others) < 1e-6


def test_alternating_hands_over_the_ascent_gradient():
    both, single = (
        combinator(optax.sgd(0.1), sam_optax.sam(RHO), descent=sam_optax.surrogate_gap(0.4))
        for combinator in (sam_optax.alternating, sam_optax.sharpness_aware)
    )
    w = v = jnp.array([1.0, -2.0])
    state, single_state = both.init(w), single.init(v)
    for _ in range(3):
        for _ in range(2):
            updates, state = both.update(w**3, state, w)
            w = optax.apply_updates(w, updates)
        updates, single_state = single.update(None, single_state, v, grad_fn=lambda v: v**3)
        v = optax.apply_updates(v, updates)
    assert_close(w, v, 1e-6)


def test_errors():
    with pytest.raises(ValueError, match=r"alpha must be in \[0, inf\), got -0.1"):
        sam_optax.surrogate_gap(-0.1)
    gap_tx = sam_optax.surrogate_gap()
    inside = sam_optax.sharpness_aware(optax.chain(gap_tx, optax.sgd(0.1)), sam_optax.sam(RHO))
    for update in (
        lambda: gap_tx.update(jnp.ones(2), gap_tx.init(jnp.ones(2))),
        lambda: optax.chain(optax.sgd(0.1), gap_tx).update(
            jnp.ones(2), optax.chain(optax.sgd(0.1), gap_tx).init(jnp.ones(2)), jnp.ones(2)
        ),
        # In the base optimizer it gets no ascent gradient.
        lambda: inside.update(None, inside.init(jnp.ones(2)), jnp.ones(2), grad_fn=lambda p: p),
    ):
        with pytest.raises(ValueError, match=r"surrogate_gap needs ascent_grads.*as descent="):
            update()
