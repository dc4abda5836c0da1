"""Steps of `sharpness_aware` whose right values are known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import Counted, assert_same, norm
from methods import FOUR, make, often

import sam_optax

W = jnp.array([3.0, 4.0])


def update(tx, w, grad_fn, **extra):
    return tx.update(None, tx.init(w), w, grad_fn=grad_fn, **extra)[0]


@pytest.mark.parametrize("name", often(FOUR, "sam", "rsam"))
def test_radius_0_is_the_base_optimizer(name):
    """Case 10, to the bit."""
    base = optax.sgd(0.1)
    tx = sam_optax.sharpness_aware(base, make(name, 0.0))
    x = y = jnp.array(1.0)
    state, base_state = tx.init(x), base.init(x)
    for expected in (0.9, 0.81, 0.729, 0.6561):
        updates, state = tx.update(None, state, x, grad_fn=lambda x: x)
        x = optax.apply_updates(x, updates)
        updates, base_state = base.update(y, base_state)
        y = optax.apply_updates(y, updates)
        assert float(x) == pytest.approx(expected, rel=1e-6)
        assert_same(x, y)


@pytest.mark.parametrize(("name", "k"), [("sam", 1), ("fsam", 1), ("rsam", 1), ("sam", 3)])
def test_schedule_of_the_radius(name, k):
    """Case 11: four steps advance the schedules of the radius and the learning rate by four.

    Whether they perturb or not, as with k = 3.
    """
    learning_rates, when = [], sam_optax.every(k)

    def learning_rate(count):
        learning_rates.append(int(count))
        return 0.1

    method = make(name, lambda t: 0.1 * (t + 1))
    tx = sam_optax.sharpness_aware(optax.sgd(learning_rate), method, when=when)
    params = jnp.array([1.0, 2.0])
    state = tx.init(params)
    learning_rates.clear()
    for t in range(4):
        points = []

        def grad_fn(p, points=points, t=t):
            points.append(p)
            return p + t  # not constant, so that F-SAM has a direction

        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        radius = 0.1 * (t + 1) if when(t) else 0.0
        assert norm(points[-1] - params) == pytest.approx(radius, rel=1e-5)
        params = optax.apply_updates(params, updates)
    assert learning_rates == [0, 1, 2, 3]
    assert int(state.step) == 4


@pytest.mark.parametrize("placement", ["around", "perturbation"])
def test_edits_of_the_radius_without_a_retrace(placement):
    """Case 11."""
    if placement == "around":
        tx = optax.inject_hyperparams(
            lambda rho: sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho))
        )(rho=0.1)
    else:
        inject = optax.inject_hyperparams(sam_optax.sam, static_args="p")
        tx = sam_optax.sharpness_aware(optax.sgd(0.1), inject(rho=0.1))
    step = Counted(lambda x, s: tx.update(None, s, x, grad_fn=lambda x: 2 * x))
    jitted, x = jax.jit(step), jnp.array(3.0)
    state = tx.init(x)
    for rho in (0.1, 0.5, 0.0):
        holder = state if placement == "around" else state.perturbation_state
        holder.hyperparams["rho"] = jnp.asarray(rho)
        updates, state = jitted(x, state)
        assert float(updates) == pytest.approx(-0.2 * (3 + rho), rel=1e-6)
    # Weak types aside: optax's own first state may differ in those from the ones that follow.
    assert step.calls <= 2


@pytest.mark.parametrize("name", often(FOUR, "sam"))
def test_decoupled_weight_decay_acts_on_the_unperturbed_params(name):
    """Case 14."""
    tx = sam_optax.sharpness_aware(optax.adamw(1.0, weight_decay=0.5), make(name, 5.0))
    updates = update(tx, W, lambda w: jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(updates, [-2.5, -3.0], rtol=1e-5)


def test_clipping_bounds_the_update_inside_the_base_alone():
    """Case 15."""
    grad_fn, w = lambda w: jnp.array([10.0, 1.0]) * w, jnp.ones(2)
    clip, sam = optax.clip_by_global_norm(1.0), sam_optax.sam(0.5)
    inside = sam_optax.sharpness_aware(optax.chain(clip, optax.sgd(1.0)), sam)
    outside = optax.chain(clip, sam_optax.sharpness_aware(optax.sgd(1.0), sam))
    norms = [
        norm(tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)[0]) for tx in (inside, outside)
    ]
    assert norms[0] <= 1 + 1e-6
    assert norms[1] > 10


def test_start_at_step_n():
    """Case 16: the first steps are the base optimizer's to the bit, then the radius is there."""
    base, w = optax.sgd(0.1, momentum=0.9), W
    tx = sam_optax.sharpness_aware(base, sam_optax.sam(0.5), when=sam_optax.after(2))
    state, base_state = tx.init(w), base.init(w)
    for t in range(3):
        expected, base_state = base.update(w if t < 2 else w * (1 + 0.5 / norm(w)), base_state)
        updates, state = tx.update(None, state, w, grad_fn=lambda w: w)
        if t < 2:
            assert_same(updates, expected)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
        w = optax.apply_updates(w, updates)


def test_value_reaches_reduce_on_plateau():
    """Case 17; an argument that nobody knows is tolerated."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    tx = sam_optax.sharpness_aware(optax.chain(optax.sgd(0.1), plateau), sam_optax.sam(0.05))
    step = jax.jit(
        lambda s, value: tx.update(None, s, W, grad_fn=lambda w: w, value=value, unknown=1.0)
    )
    state = tx.init(W)
    for _ in range(4):
        _, state = step(state, jnp.asarray(1.0))
    assert float(state.base_state[1].scale) == 0.5


@pytest.mark.parametrize("perturb_dtype", [None, jnp.float32])
@pytest.mark.parametrize("name", often(FOUR, "sam"))
def test_params_are_restored_bit_for_bit(name, perturb_dtype):
    """Case 18."""
    w = before = {"w": jnp.array([1, 100, 0.001], jnp.bfloat16)}
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), make(name, 0.05), perturb_dtype=perturb_dtype)
    state, step = tx.init(w), jax.jit(lambda w, s: tx.update(None, s, w, grad_fn=lambda p: p))
    for _ in range(10):
        updates, state = step(w, state)
        w = optax.apply_updates(w, updates)
    assert_same(w, before)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_float32_point_keeps_the_displacement(dtype):
    """Case 18: in bfloat16 the middle element's ε is rounded away: its spacing at 100 is .5."""
    w, points = jnp.array([1, 100, 0.001], dtype), {}
    exact = np.float64(np.asarray(w, np.float32)) + 0.05 / np.sqrt(3)
    for perturb_dtype in (None, jnp.float32):
        tx = sam_optax.sharpness_aware(
            optax.sgd(1.0), sam_optax.sam(0.05), perturb_dtype=perturb_dtype
        )
        seen = points.setdefault(perturb_dtype, [])
        grad_fn = lambda p, seen=seen: seen.append(p) or p
        updates, _ = tx.update(jnp.ones(3, dtype), tx.init(w), w, grad_fn=grad_fn)
        assert updates.dtype == dtype
    (narrow,), (wide,) = points.values()
    assert (narrow.dtype, wide.dtype) == (dtype, jnp.float32)
    # ε itself has the precision of the gradient's dtype, 2^−8 or better.
    np.testing.assert_allclose(wide, exact, atol=0.05 / np.sqrt(3) * 2.0**-8)
    lost = np.abs(np.float64(np.asarray(narrow, np.float32)) - exact)
    assert lost[1] > (0.02 if dtype == jnp.bfloat16 else 0.005)


def test_dropout_with_one_key():
    """Case 21: the sharp gradient equals the clean one."""
    key = jax.random.key(3)
    grad_fn = jax.grad(lambda w: jnp.sum(jax.random.bernoulli(key, 0.5, w.shape) * w))
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.5))
    assert_same(update(tx, jnp.arange(1.0, 5.0), grad_fn), -grad_fn(jnp.arange(1.0, 5.0)))


@pytest.mark.parametrize("gradient_of_n", ["float0", "none", "zeros"])
def test_an_integer_leaf(gradient_of_n):
    """Case 28."""
    params, points = {"w": W, "n": jnp.array([1, 2], jnp.int32)}, []

    def grad_fn(p):
        points.append(p)
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2) * p["n"][0], allow_int=True)(p)
        replaced = {"none": {"n": None}, "zeros": {"n": jnp.zeros_like(p["n"])}}
        return grads | replaced.get(gradient_of_n, {})

    base = optax.masked(optax.sgd(0.1), {"w": True, "n": False})
    tx = sam_optax.sharpness_aware(base, sam_optax.sam(0.1))
    updates = update(tx, params, grad_fn)
    assert_same([point["n"] for point in points], [params["n"]] * 2)
    np.testing.assert_allclose(updates["w"], [-0.612, -0.816], rtol=1e-6)


@pytest.mark.parametrize("name", ["sam", "rsam"])
def test_a_frozen_subtree(name):
    """Case 28: no displacement and no update, but grad_fn sees it. L = Σ (backbone · head)²/2."""
    params, points = {"backbone": jnp.array([2.0, 3.0]), "head": W}, []

    def grad_fn(p):
        points.append(p)
        product = p["backbone"] * p["head"]
        return {"backbone": product * p["head"], "head": product * p["backbone"]}

    method = sam_optax.perturb_only(make(name, 0.1), {"backbone": False, "head": True})
    base = optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        {"backbone": "freeze", "head": "train"},
    )
    updates = update(sam_optax.sharpness_aware(base, method), params, grad_fn)
    np.testing.assert_array_equal(updates["backbone"], 0)
    assert_same(points[-1]["backbone"], params["backbone"])
    assert norm(points[-1]["head"] - W) == pytest.approx(0.1, rel=1e-5)
    np.testing.assert_allclose(updates["head"], -0.1 * points[-1]["head"] * jnp.array([4.0, 9.0]))


def test_a_scaled_loss_whose_gradient_is_unscaled():
    """Case 19; F-SAM's average and the base optimizer's momentum would see the scale."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), make("fsam", 0.1))

    def run(scale, factor):
        w, state = W, tx.init(W)
        for _ in range(3):
            updates, state = tx.update(None, state, w, grad_fn=lambda w: scale * w / factor)
            w = optax.apply_updates(w, updates)
        return w

    assert_same(run(1024.0, 1024.0), run(1.0, 1.0))
    assert norm(run(1024.0, 1.0) - run(1.0, 1.0)) > 1
