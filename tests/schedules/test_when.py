"""Steps that do not perturb: ``when``, ``every``, ``after``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RuntimeCounted, assert_close, assert_same, norm, same, vector
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
# Shared instances, so that what they compile is shared.
PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0, jnp.float32)}


def gradient(p):
    return jax.tree.map(lambda x: 2 * x, p)


def stepper(tx, jit, grad_fn=gradient):
    step = lambda g, s, p: tx.update(g, s, p, grad_fn=grad_fn)
    return jax.jit(step) if jit else step


# ---------------------------------------------------------------- when


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every(k):
    answers = [bool(sam_optax.every(k)(jnp.asarray(t))) for t in range(7)]
    assert answers == [t % k == 0 for t in range(7)]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_after(n):
    answers = [bool(sam_optax.after(n)(jnp.asarray(t))) for t in range(7)]
    assert answers == [t >= n for t in range(7)]


@pytest.mark.parametrize(
    ("function", "value", "error", "words"),
    [
        (sam_optax.every, 0, ValueError, ["k ", "0", "1"]),
        (sam_optax.every, 2.0, TypeError, ["k ", "2.0"]),
        (sam_optax.after, -1, ValueError, ["n ", "-1", "0"]),
        (sam_optax.after, "1", TypeError, ["n ", "'1'"]),
    ],
)
def test_bad_arguments(function, value, error, words):
    with pytest.raises(error) as caught:
        function(value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("sam-*")
def test_plain_steps_are_the_base_optimizers(name, jit, given):
    """Bit for bit; one gradient at most; and the perturbation's state waits."""
    base, method = optax.sgd(0.1, momentum=0.9), make(name)
    grad_fn = RuntimeCounted(gradient)
    tx = sam_optax.sharpness_aware(base, method, when=sam_optax.every(2))
    step = stepper(tx, jit, grad_fn)
    base_update = jax.jit(base.update) if jit else base.update
    params, state = PARAMS, tx.init(PARAMS)
    per_sharp_step = 2 if name == "rsam" or not given else 1
    for t in range(4):
        before, grad_fn.evaluations = state, 0
        updates, state = step(gradient(params) if given else None, state, params)
        jax.effects_barrier()
        assert int(state.step) == t + 1
        if t % 2 == 0:
            inner = before.perturbation_state
            ascent = gradient(method.start_fn(params, inner))
            point, inner = method.perturb_fn(params, ascent, inner)
            grads = gradient(point)
            assert grad_fn.evaluations == per_sharp_step
        else:
            inner = before.perturbation_state
            grads = gradient(params)
            assert grad_fn.evaluations == (0 if given else 1)
        expected = base_update(grads, before.base_state, params)
        if t % 2 == 0:
            assert_close((updates, state.base_state), expected, 1e-6)
            assert_close(state.perturbation_state, inner, 1e-6)
        else:
            assert_same((updates, state.base_state), expected)
            assert_same(state.perturbation_state, inner)
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", ["sam", "rsam"])
@pytest.mark.slow
def test_loss_is_traced_once(name, given):
    grad_fn = RuntimeCounted(gradient)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name), when=sam_optax.every(2))
    grads = gradient(PARAMS) if given else None
    stepper(tx, True, grad_fn)(grads, tx.init(PARAMS), PARAMS)
    assert grad_fn.calls == 1


@pytest.mark.parametrize("answer", [True, False, np.bool_(True), jnp.asarray(False)])
@pytest.mark.parametrize("jit", [True, False])
def test_when_may_answer_with_any_boolean(answer, jit):
    steps = []

    def when(step):
        steps.append(step)
        return answer

    tx = sam_optax.sharpness_aware(optax.sgd(1.0), make("sam"), when=when)
    updates, _ = stepper(tx, jit)(None, tx.init(PARAMS), PARAMS)
    assert same(updates, jax.tree.map(jnp.negative, gradient(PARAMS))) is not bool(answer)
    assert steps[0].dtype == jnp.int32
    assert steps[0].shape == ()


SCHEDULED = {
    "sam": sam_optax.sam,
    "asam": sam_optax.asam,
    "fsam": sam_optax.fsam,
    "rsam": lambda rho: sam_optax.rsam(rho, key=KEY),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_count_the_steps_that_did_not_perturb(name):
    points = []

    def grad_fn(p):
        points.append(p)
        return jax.tree.map(lambda x: x + len(points), p)

    method = SCHEDULED[name](lambda t: 0.1 * (t + 1))
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), method, when=sam_optax.every(3))
    state = tx.init({"bias": jnp.array([3.0, 4.0])})
    params = {"bias": jnp.array([3.0, 4.0])}  # a bias: ASAM's T is 1
    for t in range(7):
        _, state = tx.update(None, state, params, grad_fn=grad_fn)
        moved = norm(jax.tree.map(jnp.subtract, points[-1], params))
        assert moved == pytest.approx(0.1 * (t + 1) if t % 3 == 0 else 0, rel=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_a_descent_gets_the_gradient_as_ascent_gradient_at_plain_steps(jit):
    def update(updates, state, params=None, *, ascent_grads, **extra):
        return jax.tree.map(jnp.subtract, updates, ascent_grads), state

    descent = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = sam_optax.sharpness_aware(
        optax.identity(), make("sam"), descent=descent, when=sam_optax.after(1)
    )
    state = tx.init(PARAMS)
    updates, state = stepper(tx, jit)(None, state, PARAMS)
    assert norm(updates) == 0
    updates, state = stepper(tx, jit)(None, state, PARAMS)
    assert norm(updates) == pytest.approx(0.6, rel=1e-5)


@pytest.mark.parametrize("perturb_dtype", [None, jnp.float32])
def test_wider_gradients_may_be_given(perturb_dtype):
    """float32 gradients, as accumulated ones are, of bfloat16 params whose grad_fn is bfloat16."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), make("sam"), when=sam_optax.every(2), perturb_dtype=perturb_dtype
    )
    step, state = stepper(tx, jit=True), tx.init(params)
    for _ in range(2):
        updates, state = step(gradient(PARAMS), state, params)
        assert np.all(np.isfinite(vector(updates)))


@pytest.mark.parametrize("when", [lambda step: sam_optax.every(2), lambda step: jnp.ones(2) > 0])
def test_a_when_that_returns_no_scalar(when):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("sam"), when=when)
    with pytest.raises(TypeError, match="when must return whether the step perturbs"):
        tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient)
