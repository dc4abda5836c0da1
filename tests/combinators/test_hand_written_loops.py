"""``start_fn`` and ``perturb_fn`` alone do what ``sharpness_aware`` does; several ascent steps."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import assert_close, assert_same, norm, signature
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
BASE = optax.sgd(0.1, momentum=0.9)
STEPS = 4
ALL = [*FOUR, "sam_1", "sam_3", "sam_scheduled", "rsam_raw", "random_asam", "only_sam"]
ALL += ["fsam_asam"]
PARAMS = {
    "layer0": {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.1, -0.2])},
    "layer1": {"kernel": jnp.array([[[2.0], [-1.0]]]), "bias": jnp.array([0.3])},
}
SHIFTS = [jnp.asarray(0.1 * i, jnp.float32) for i in range(STEPS)]


@jax.jit
def grad(params, shift):
    """The gradient, on a batch given by a number, of a loss whose curvature changes."""
    return jax.tree.map(lambda x: x + jnp.tanh(x) * x**2 + shift, params)


def by_hand(method):
    """A training step made of start_fn, perturb_fn and the base optimizer."""

    def step(params, state, shift):
        method_state, base_state = state
        start = method.start_fn(params, method_state)
        point, method_state = method.perturb_fn(params, grad(start, shift), method_state)
        updates, base_state = BASE.update(grad(point, shift), base_state, params)
        return optax.apply_updates(params, updates), (method_state, base_state)

    return step


def by_combinator(method):
    tx = sam_optax.sharpness_aware(BASE, method)

    def step(params, state, shift):
        updates, state = tx.update(None, state, params, grad_fn=lambda p: grad(p, shift))
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize(
    ("name", "jit"), [(name, True) for name in ALL] + [("sam", False), ("rsam", False)]
)
@pytest.mark.fast("sam-*", "fsam-True", "rsam-True")
def test_hand_written_loop_is_the_combinator_to_the_bit(name, jit):
    method, params = make(name), PARAMS
    hand, combined = by_hand(method), by_combinator(method)
    if jit:
        hand, combined = jax.jit(hand), jax.jit(combined)
    hand_params, hand_state = params, (method.init(params), BASE.init(params))
    state = sam_optax.sharpness_aware(BASE, method).init(params)
    for i in range(STEPS if jit else 2):
        hand_params, hand_state = hand(hand_params, hand_state, SHIFTS[i])
        params, state = combined(params, state, SHIFTS[i])
        assert_same(params, hand_params)
        assert_same((state.perturbation_state, state.base_state), hand_state)
    assert norm(jax.tree.map(jnp.subtract, params, PARAMS)) > 1e-2


@pytest.mark.parametrize("name", ["sam", "sam_scheduled", "asam", "fsam", "rsam", "only_sam"])
@pytest.mark.fast("sam")
def test_perturb_fn_adds_what_update_returns(name):
    method, params = make(name), PARAMS
    state = method.init(params)
    grads = grad(method.start_fn(params, state), SHIFTS[0])
    point, new_state = method.perturb_fn(params, grads, state)
    eps, expected_state = method.update(grads, state, params)
    assert_close(point, jax.tree.map(jnp.add, params, eps), 1e-6)
    assert_close(new_state, expected_state, 1e-6)
    assert signature(point) == signature(params)
    if not method.has_start:
        assert_same(method.start_fn(params, state), params)


def test_perturb_fn_in_another_dtype():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    method = make("sam")
    grads = jax.tree.map(jnp.ones_like, params)
    point, _ = method.perturb_fn(params, grads, method.init(params), perturb_dtype=jnp.float32)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(point))
    moved = jax.tree.map(lambda a, b: a - b.astype(jnp.float32), point, params)
    assert norm(moved) == pytest.approx(0.3, rel=1e-2)


# ---------------------------------------------------------------- ascent_steps


def ascend_by_hand(method, params, state, steps, grads=None):
    """n times: gradient at the (started) point, perturb from there."""
    point = params
    for i in range(steps):
        if i or grads is None or method.has_start:
            grads = grad(method.start_fn(point, state), SHIFTS[0])
        point, state = method.perturb_fn(point, grads, state)
    return point, state


@pytest.mark.parametrize(("steps", "given"), [(1, True), (2, False), (2, True), (4, False)])
@pytest.mark.parametrize("name", ["sam", "asam", "fsam", "rsam"])
@pytest.mark.fast("sam-2-True", "fsam-2-True")
def test_ascent_steps_are_a_loop(name, steps, given):
    method, params = make(name), PARAMS
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, ascent_steps=steps)
    other = jax.tree.map(jnp.ones_like, params)
    grads = other if given else None
    point, method_state = ascend_by_hand(method, params, method.init(params), steps, grads)
    expected = jax.tree.map(jnp.negative, grad(point, SHIFTS[0]))
    step = lambda g, s, p: tx.update(g, s, p, grad_fn=lambda p: grad(p, SHIFTS[0]))
    for update in (step, jax.jit(step)):
        updates, state = update(grads, tx.init(params), params)
        assert_close(updates, expected, 1e-5)
        assert_close(state.perturbation_state, method_state, 1e-5)
    assert_same(step(grads, tx.init(params), params)[0], expected)  # outside of jit, to the bit


def test_more_steps_reach_further():
    params = PARAMS
    method = make("sam")
    point, _ = ascend_by_hand(method, params, method.init(params), 3)
    assert 0.5 < norm(jax.tree.map(jnp.subtract, point, params)) <= 0.9 + 1e-5


def test_schedules_do_not_count_ascent_steps():
    method = sam_optax.sam(lambda t: 0.1 * (t + 1))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), method, ascent_steps=3)
    w = jnp.array([3.0, 4.0])
    state = tx.init(w)
    for t in range(2):
        points = []

        def grad_fn(p, points=points):
            points.append(p)
            return p

        _, state = tx.update(w, state, w, grad_fn=grad_fn)
        assert norm(points[-1] - w) == pytest.approx(3 * 0.1 * (t + 1), rel=1e-5)
        assert int(state.perturbation_state.step) == t + 1


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.fast("2")
def test_same_as_optax_contrib_sam(steps):
    """``sync_period=n + 1`` in its opaque mode, with normalized gradient ascent."""
    rho = 0.2
    ours = sam_optax.sharpness_aware(BASE, sam_optax.sam(rho), ascent_steps=steps)
    theirs = optax.contrib.sam(
        BASE,
        optax.chain(optax.contrib.normalize(), optax.sgd(rho)),
        sync_period=steps + 1,
        opaque_mode=True,
    )

    @jax.jit
    def step(params, state, shift):
        updates, state = ours.update(None, state, params, grad_fn=lambda p: grad(p, shift))
        return optax.apply_updates(params, updates), state

    @jax.jit
    def their_step(params, state, shift):
        grad_fn = lambda p, _: grad(p, shift)
        updates, state = theirs.update(grad(params, shift), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    params = their_params = PARAMS
    state, their_state = ours.init(params), theirs.init(params)
    for i in range(STEPS):
        params, state = step(params, state, SHIFTS[i])
        their_params, their_state = their_step(their_params, their_state, SHIFTS[i])
        assert_close(params, their_params, 1e-5)
    assert norm(jax.tree.map(jnp.subtract, params, PARAMS)) > 1e-2
