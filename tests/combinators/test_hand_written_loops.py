"""``sharpness_aware`` is a loop over ``start_fn`` and ``perturb_fn``, with as few gradients."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import RuntimeCounted, assert_close, assert_same, norm, same
from methods import FOUR, make, often

import sam_optax

BASE = optax.sgd(0.1, momentum=0.9)
PARAMS = {
    "layer0": {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.1, -0.2])},
    "layer1": {"kernel": jnp.array([[[2.0], [-1.0]]]), "bias": jnp.array([0.3])},
}
SHIFTS = [jnp.asarray(0.1 * i, jnp.float32) for i in range(4)]
OTHER = jax.tree.map(jnp.ones_like, PARAMS)


@jax.jit
def grad(params, shift=0.0):
    """The gradient, on a batch given by a number, of a loss whose curvature changes."""
    return jax.tree.map(lambda x: x + jnp.tanh(x) * x**2 + shift, params)


@pytest.mark.parametrize("name", often([*FOUR, "rsam_raw", "only_sam"], "sam", "fsam", "rsam"))
def test_a_hand_written_step_is_the_combinators_to_the_bit(name):
    method = make(name)
    tx = sam_optax.sharpness_aware(BASE, method)

    @jax.jit
    def by_hand(params, state, shift):
        method_state, base_state = state
        start = method.start_fn(params, method_state)
        point, method_state = method.perturb_fn(params, grad(start, shift), method_state)
        updates, base_state = BASE.update(grad(point, shift), base_state, params)
        return optax.apply_updates(params, updates), (method_state, base_state)

    @jax.jit
    def combined(params, state, shift):
        updates, state = tx.update(None, state, params, grad_fn=lambda p: grad(p, shift))
        return optax.apply_updates(params, updates), state

    hand, hand_state = PARAMS, (method.init(PARAMS), BASE.init(PARAMS))
    params, state = PARAMS, tx.init(PARAMS)
    for shift in SHIFTS:
        hand, hand_state = by_hand(hand, hand_state, shift)
        params, state = combined(params, state, shift)
        assert_same(params, hand)
        assert_same((state.perturbation_state, state.base_state), hand_state)
    assert norm(jax.tree.map(jnp.subtract, params, PARAMS)) > 1e-2


# ---------------------------------------------------------------- gradients of a step


@pytest.mark.parametrize(
    ("name", "given", "steps", "expected"),
    [
        ("sam", True, 1, 1),
        ("sam", False, 1, 2),
        ("rsam", True, 1, 2),
        ("rsam", False, 1, 2),
        ("by_hand", False, 1, 2),
        ("sam", True, 3, 3),
        ("sam", False, 3, 4),
    ],
)
def test_evaluations_and_traces(name, given, steps, expected):
    """``given``: the gradient at the params. Under jit the loss is traced once."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name), ascent_steps=steps)
    grad_fn = RuntimeCounted(grad)
    step = lambda g, s, w: tx.update(g, s, w, grad_fn=grad_fn)
    for run in (step, jax.jit(step)):
        run(OTHER if given else None, tx.init(PARAMS), PARAMS)
    jax.effects_barrier()
    assert grad_fn.evaluations == 2 * expected
    assert grad_fn.calls == expected + 1


def test_grads_are_the_ascent_gradient_but_for_random_starts():
    """Another batch's gradient directs SAM's ascent; R-SAM takes its own at its start."""
    updates = {}
    for name in ("sam", "rsam"):
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), make(name))
        for grads in (OTHER, None):
            found, _ = tx.update(grads, tx.init(PARAMS), PARAMS, grad_fn=grad)
            updates[name, grads is None] = found
    point, _ = make("sam").perturb_fn(PARAMS, OTHER, make("sam").init(PARAMS))
    assert_close(updates["sam", False], jax.tree.map(jnp.negative, grad(point)), 1e-6)
    assert not same(updates["sam", False], updates["sam", True])
    assert_same(updates["rsam", False], updates["rsam", True])


@pytest.mark.parametrize(
    ("name", "steps", "given"), [("sam", 2, True), ("fsam", 3, False), ("rsam", 2, True)]
)
def test_ascent_steps_are_a_loop(name, steps, given):
    """n times: gradient at the (started) point, perturb from there."""
    method, grads = make(name), OTHER if given else None
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, ascent_steps=steps)
    point, method_state = PARAMS, method.init(PARAMS)
    for i in range(steps):
        g = grads if not i and given else grad(point)
        g = grad(method.start_fn(point, method_state)) if method.has_start else g
        point, method_state = method.perturb_fn(point, g, method_state)
    expected = jax.tree.map(jnp.negative, grad(point))
    step = lambda s: tx.update(grads, s, PARAMS, grad_fn=grad)
    assert_same(step(tx.init(PARAMS))[0], expected)  # outside of jit, to the bit
    updates, state = jax.jit(step)(tx.init(PARAMS))
    assert_close((updates, state.perturbation_state), (expected, method_state), 1e-5)


def test_schedules_do_not_count_ascent_steps():
    method, w = sam_optax.sam(lambda t: 0.1 * (t + 1)), jnp.array([3.0, 4.0])
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), method, ascent_steps=3)
    state = tx.init(w)
    for t in range(2):
        points = []
        grad_fn = lambda p, points=points: points.append(p) or p
        _, state = tx.update(w, state, w, grad_fn=grad_fn)
        assert norm(points[-1] - w) == pytest.approx(3 * 0.1 * (t + 1), rel=1e-5)
        assert int(state.perturbation_state.step) == t + 1


def test_same_as_optax_contrib_sam():
    """``sync_period=n + 1`` in its opaque mode, with normalized gradient ascent."""
    ours = sam_optax.sharpness_aware(BASE, sam_optax.sam(0.2), ascent_steps=2)
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.2))
    theirs = optax.contrib.sam(BASE, ascent, sync_period=3, opaque_mode=True)

    def run(tx):
        params, state = PARAMS, tx.init(PARAMS)
        for shift in SHIFTS[:2]:
            grad_fn = lambda p, i=0, shift=shift: grad(p, shift)
            updates, state = tx.update(grad(params, shift), state, params, grad_fn=grad_fn)
            params = optax.apply_updates(params, updates)
        return params

    assert_close(run(ours), run(theirs), 1e-5)
