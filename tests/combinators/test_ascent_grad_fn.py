"""``ascent_grad_fn``: another gradient leads the ascent, in perturbing steps alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family import BASE, as_tree, gap, plain, run
from helpers import RuntimeCounted, assert_close, assert_same, vector
from methods import make

import sam_optax
from sam_optax.training import TrainState

KEY = jax.random.key(9)
W = jnp.array([1.0, -2.0, 0.5])


def sharp(p, *group):
    return 2 * p


def ascent(p, *group):
    return p**3 - 1


def turned(p, t):
    """Another gradient on the problem of ``family``."""
    return jax.tree.map(lambda x: jnp.flip(x) + 0.1, p)


@pytest.mark.parametrize("name", ["sam", "fsam", "asam", "esam"])
@pytest.mark.slow
def test_equals_that_gradient_given_as_grads(name):
    tx = sam_optax.sharpness_aware(BASE, make(name))
    state = other = tx.init(W)
    w = v = W
    step = jax.jit(lambda s, w: tx.update(None, s, w, grad_fn=sharp, ascent_grad_fn=ascent))
    given = jax.jit(lambda s, w: tx.update(ascent(w), s, w, grad_fn=sharp))
    for _ in range(3):
        updates, state = step(state, w)
        w = optax.apply_updates(w, updates)
        updates, other = given(other, v)
        v = optax.apply_updates(v, updates)
    assert_close((w, state), (v, other), 1e-6)


def test_grads_lead_nothing_but_the_steps_that_do_not_perturb():
    tx = sam_optax.sharpness_aware(BASE, make("sam"), when=sam_optax.every(2))
    step = jax.jit(lambda g, s: tx.update(g, s, W, grad_fn=sharp, ascent_grad_fn=ascent))
    state = tx.init(W)
    first = [step(g, state) for g in (sharp(W), jnp.flip(W))]
    assert_same(*first)
    second = [step(g, first[0][1])[0] for g in (sharp(W), jnp.flip(W))]
    assert np.abs(second[0] - second[1]).max() > 0.05
    expected, _ = BASE.update(sharp(W), first[0][1].base_state, W)
    assert_close(second[0], expected, 1e-6)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", ["sam", "rsam"])
def test_evaluations(name, jit):
    """One each at perturbing steps; none of the ascent at others."""
    method = sam_optax.rsam(0.3, key=KEY) if name == "rsam" else make(name)
    tx = sam_optax.sharpness_aware(BASE, method, when=sam_optax.every(2))
    f, g = RuntimeCounted(sharp), RuntimeCounted(ascent)
    step = lambda s, w: tx.update(None, s, w, grad_fn=f, ascent_grad_fn=g)
    step = jax.jit(step) if jit else step
    state, seen = tx.init(W), []
    for _ in range(4):
        _, state = step(state, W)
        jax.effects_barrier()
        seen.append((f.evaluations, g.evaluations))
    assert seen == [(1, 1), (2, 1), (3, 2), (4, 2)]
    if jit:
        assert (f.calls, g.calls) == (1, 1)


def test_plain_steps_are_the_base_optimizers():
    tx = sam_optax.sharpness_aware(BASE, make("sam"), when=sam_optax.after(2))
    extra = lambda params, t: {"ascent_grad_fn": lambda p: turned(p, t)}
    points, _ = run(tx, 4, extra=extra)
    assert gap(points[:2], plain(steps=2)) < 1e-15
    assert gap(points, run(tx, 4)[0]) > 1e-3


def test_a_random_start_is_where_it_is_taken():
    method = sam_optax.rsam(0.3, 0.5, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
    state, points = tx.init(W), []
    updates, _ = tx.update(
        None, state, W, grad_fn=sharp, ascent_grad_fn=lambda p: points.append(p) or ascent(p)
    )
    start = method.start_fn(W, state.perturbation_state)
    assert_same(points, [start])
    point, _ = method.perturb_fn(W, ascent(start), state.perturbation_state)
    assert_close(-updates, sharp(point), 1e-6)


def test_several_ascent_steps_all_follow_it():
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), make("sam"), ascent_steps=2)
    updates, _ = tx.update(None, tx.init(W), W, grad_fn=sharp, ascent_grad_fn=ascent)
    point = W
    for _ in range(2):
        point = point + 0.3 * ascent(point) / jnp.linalg.norm(ascent(point))
    assert_close(-updates, sharp(point), 1e-6)


def test_groups_get_their_index():
    """Each group's ascent by its own part of another batch."""
    shift = jnp.array([[1.0, 0, 0], [0, 0, 2.0]])
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), make("sam"), groups=2)
    updates, _ = jax.jit(
        lambda s: tx.update(
            None, s, W, grad_fn=lambda p, i: (i + 1) * p**3, ascent_grad_fn=lambda p, i: shift[i]
        )
    )(tx.init(W))
    points = [W + 0.3 * s / jnp.linalg.norm(s) for s in shift]
    assert_close(-updates, (points[0] ** 3 + 2 * points[1] ** 3) / 2, 1e-6)


def test_the_descent_sees_it_as_the_ascent_gradient():
    tx = sam_optax.sharpness_aware(
        optax.sgd(1.0), make("sam"), descent=sam_optax.surrogate_gap(0.4)
    )
    updates, _ = tx.update(None, tx.init(W), W, grad_fn=sharp, ascent_grad_fn=ascent)
    g, g_s = vector(ascent(W)), vector(sharp(W + 0.3 * ascent(W) / jnp.linalg.norm(ascent(W))))
    np.testing.assert_allclose(-updates, g_s - 0.4 * (g - (g @ g_s) / (g_s @ g_s) * g_s), rtol=1e-5)


@pytest.mark.parametrize("when", [None, sam_optax.every(2)])
def test_loss_is_that_of_the_whole_batch(when):
    """At the perturbed params in a perturbing step, where the batch is seen whole."""
    loss_fn = lambda p: jnp.sum(p**2)
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), make("sam"), when=when)
    state = TrainState.create(apply_fn=None, params=W, tx=tx)
    step = jax.jit(lambda s: s.apply_loss(loss_fn, ascent_grad_fn=ascent))
    point = W + 0.3 * ascent(W) / jnp.linalg.norm(ascent(W))
    state, loss = step(state)
    assert float(loss) == pytest.approx(float(loss_fn(point)), rel=1e-6)
    state, loss = step(state)
    assert float(loss) == pytest.approx(float(loss_fn(W if when else point)), rel=1e-6)


@pytest.mark.parametrize("when", [None, sam_optax.every(2)])
@pytest.mark.parametrize("given", [None, jnp.bfloat16, jnp.float32])
def test_it_may_have_another_dtype(when, given):
    """A float32 ascent gradient of bfloat16 params: accumulated, or of another model's dtype."""
    w = W.astype(jnp.bfloat16)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("sam"), when=when)
    step = jax.jit(
        lambda s: tx.update(
            None if given is None else sharp(W).astype(given),
            s,
            w,
            grad_fn=sharp,
            ascent_grad_fn=lambda p: ascent(p.astype(jnp.float32)),
        )
    )
    state = tx.init(w)
    for _ in range(2):
        updates, state = step(state)
        assert updates.dtype == jnp.bfloat16


def test_a_constant_gradient():
    """The full gradient, computed now and then: an array of NumPy's."""
    full = np.array([0.0, 3.0, 4.0], np.float32)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), make("sam"), when=sam_optax.every(2))
    state = tx.init(W)
    for step in (tx.update, jax.jit(tx.update, static_argnames=("grad_fn", "ascent_grad_fn"))):
        updates, _ = step(None, state, W, grad_fn=sharp, ascent_grad_fn=lambda p: full)
        np.testing.assert_allclose(-updates, 2 * (vector(W) + 0.3 * full / 5), rtol=1e-6)


def test_devices():
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), make("sam"), axis_name="batch")
    state = tx.init(W)
    step = jax.pmap(
        lambda c: tx.update(None, state, W, grad_fn=sharp, ascent_grad_fn=lambda p: c)[0],
        axis_name="batch",
        devices=jax.devices()[:2],
    )
    updates = step(jnp.array([[1.0, 0, 0], [0, 0, 2.0]]))
    assert_same(updates[0], updates[1])
    assert_close(-updates[0], 2 * (W + jnp.array([0.15, 0, 0.15])), 1e-6)


@pytest.mark.parametrize(
    ("options", "ascent_grad_fn", "error", "words"),
    [
        ({}, W, TypeError, ["ascent_grad_fn must be a function"]),
        (
            {"perturbation": sam_optax.momentum_start(sam_optax.sam())},
            ascent,
            ValueError,
            ["ascent_grad_fn cannot be used with", "momentum_start"],
        ),
    ],
)
def test_errors(options, ascent_grad_fn, error, words):
    tx = sam_optax.sharpness_aware(BASE, **{"perturbation": make("sam"), **options})
    with pytest.raises(error) as caught:
        tx.update(None, tx.init(W), W, grad_fn=sharp, ascent_grad_fn=ascent_grad_fn)
    for word in words:
        assert word in str(caught.value)


def test_grad_fn_is_needed_all_the_same():
    tx = sam_optax.sharpness_aware(BASE, make("sam"))
    with pytest.raises(ValueError, match="needs a gradient function"):
        tx.update(None, tx.init(W), W, ascent_grad_fn=ascent)


@pytest.mark.slow
def test_tree_params():
    params = as_tree(np.arange(9.0), jnp.float32)
    tx = sam_optax.sharpness_aware(BASE, make("sam"))
    updates, _ = tx.update(
        None, tx.init(params), params, grad_fn=lambda p: p, ascent_grad_fn=lambda p: p
    )
    assert_same(updates, tx.update(params, tx.init(params), params, grad_fn=lambda p: p)[0])
