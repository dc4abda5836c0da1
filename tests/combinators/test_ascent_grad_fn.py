"""``ascent_grad_fn``: another gradient leads the ascent, in perturbing steps alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family import BASE
from helpers import RuntimeCounted, assert_close, assert_same
from methods import make

import sam_optax
from sam_optax.training import TrainState

W = jnp.array([1.0, -2.0, 0.5])
SGD = optax.sgd(1.0)


def sharp(p, *group):
    return 2 * p


def ascent(p, *group):
    return p**3 - 1


def reached(w, direction):
    """w + ε of SAM, ρ = 0.3."""
    return w + 0.3 * direction / jnp.linalg.norm(direction)


def update(tx, ascent_grad_fn=ascent, params=W, grad_fn=sharp):
    """The updates of a first step."""
    return tx.update(None, tx.init(params), params, grad_fn=grad_fn, ascent_grad_fn=ascent_grad_fn)[
        0
    ]


def test_grads_lead_nothing_but_the_steps_that_do_not_perturb():
    tx = sam_optax.sharpness_aware(BASE, make("sam"), when=sam_optax.every(2))
    step = jax.jit(lambda g, s: tx.update(g, s, W, grad_fn=sharp, ascent_grad_fn=ascent))
    first = [step(g, tx.init(W)) for g in (sharp(W), jnp.flip(W))]
    assert_same(*first)
    for g in (sharp(W), jnp.flip(W)):
        expected, _ = BASE.update(g, first[0][1].base_state, W)
        assert_close(step(g, first[0][1])[0], expected, 1e-6)


@pytest.mark.parametrize(("name", "jit"), [("sam", True), ("rsam", False)])
def test_evaluations(name, jit):
    """One each at perturbing steps; none of the ascent at others."""
    tx = sam_optax.sharpness_aware(BASE, make(name), when=sam_optax.every(2))
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


def test_a_random_start_is_where_it_is_taken():
    method, points = make("rsam"), []
    tx = sam_optax.sharpness_aware(SGD, method)
    updates = update(tx, lambda p: points.append(p) or ascent(p))
    before = method.init(W)
    start = method.start_fn(W, before)
    assert_same(points, [start])
    point, _ = method.perturb_fn(W, ascent(start), before)
    assert_close(-updates, sharp(point), 1e-6)


def test_several_ascent_steps_all_follow_it():
    tx = sam_optax.sharpness_aware(SGD, make("sam"), ascent_steps=2)
    first = reached(W, ascent(W))
    assert_close(-update(tx), sharp(reached(first, ascent(first))), 1e-6)


def test_groups_get_their_index():
    """Each group's ascent by its own part of another batch."""
    shift = jnp.array([[1.0, 0, 0], [0, 0, 2.0]])
    tx = sam_optax.sharpness_aware(SGD, make("sam"), groups=2)
    updates = update(tx, lambda p, i: shift[i], grad_fn=lambda p, i: (i + 1) * p**3)
    points = [reached(W, direction) for direction in shift]
    assert_close(-updates, (points[0] ** 3 + 2 * points[1] ** 3) / 2, 1e-6)


def test_the_descent_sees_it_as_the_ascent_gradient():
    """It may be a constant array of NumPy's: the full gradient, computed now and then."""
    full = np.array([0.0, 3.0, 4.0], np.float32)
    tx = sam_optax.sharpness_aware(SGD, make("sam"), descent=sam_optax.mix_gradients(0.25))
    expected = 0.75 * full + 0.25 * sharp(reached(W, full))
    assert_close(-update(tx, lambda p: full), expected, 1e-6)


def test_loss_is_that_of_the_whole_batch():
    """At the perturbed params in a perturbing step, where the batch is seen whole."""
    loss_fn = lambda p: jnp.sum(p**2)
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), make("sam"), when=sam_optax.every(2))
    state = TrainState.create(apply_fn=None, params=W, tx=tx)
    step = jax.jit(lambda s: s.apply_loss(loss_fn, ascent_grad_fn=ascent))
    for expected in (reached(W, ascent(W)), W):
        state, loss = step(state)
        assert float(loss) == pytest.approx(float(loss_fn(expected)), rel=1e-6)


@pytest.mark.parametrize("when", [None, sam_optax.every(2)])
@pytest.mark.parametrize("given", [None, jnp.float32])
def test_it_may_have_another_dtype(when, given):
    """A float32 ascent gradient of bfloat16 params: accumulated, or of another model's dtype."""
    w = W.astype(jnp.bfloat16)
    grads = None if given is None else sharp(W).astype(given)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("sam"), when=when)
    wide = lambda p: ascent(p.astype(jnp.float32))
    step = lambda s: tx.update(grads, s, w, grad_fn=sharp, ascent_grad_fn=wide)
    updates, state = jax.eval_shape(step, tx.init(w))
    assert updates.dtype == jax.eval_shape(step, state)[0].dtype == jnp.bfloat16


def test_devices():
    tx = sam_optax.sharpness_aware(SGD, make("sam"), axis_name="batch")
    step = jax.pmap(lambda c: update(tx, lambda p: c), axis_name="batch", devices=jax.devices()[:2])
    updates = step(jnp.array([[1.0, 0, 0], [0, 0, 2.0]]))
    assert_same(updates[0], updates[1])
    assert_close(-updates[0], 2 * (W + jnp.array([0.15, 0, 0.15])), 1e-6)


def test_it_may_have_holes():
    tx, w = sam_optax.sharpness_aware(SGD, make("sam")), {"a": W, "b": W}
    updates = update(tx, lambda p: {"a": p["a"], "b": None}, w, lambda p: p)
    assert_close(updates, {"a": -reached(W, W), "b": -W}, 1e-6)


SAM = sam_optax.sharpness_aware(BASE, make("sam"))
ABOVE = sam_optax.sharpness_aware(BASE, make("sam"), when=sam_optax.above_average(0.5))
MOMENTUM = sam_optax.sharpness_aware(BASE, make("momentum"))
PAIR = jax.value_and_grad(lambda p: jnp.sum(p**2))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: update(SAM, W), "ascent_grad_fn must be a function"),
        (lambda: update(SAM, grad_fn=None), "needs a gradient function"),
        (lambda: update(SAM, PAIR), "result of ascent_grad_fn must .*jax.value_and_grad"),
        (lambda: update(SAM, lambda p: {"a": p}), "result of ascent_grad_fn must have the struc"),
        (lambda: update(MOMENTUM), "ascent_grad_fn cannot be used with.*momentum_start"),
        (lambda: update(ABOVE), "ascent_grad_fn is for perturbing steps only.*above_average"),
    ],
)
def test_errors(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
