"""Steps that do not perturb: ``when``, ``every``, ``after``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RuntimeCounted, assert_close, assert_same, norm, same
from methods import FOUR, make, often

import sam_optax

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0, jnp.float32)}


def gradient(p):
    return jax.tree.map(lambda x: 2 * x, p)


def stepper(tx, grad_fn=gradient):
    return jax.jit(lambda g, s, p: tx.update(g, s, p, grad_fn=grad_fn))


def test_every_and_after():
    steps = jnp.arange(7)
    for n in (1, 2, 3):
        assert [bool(sam_optax.every(n)(t)) for t in steps] == [t % n == 0 for t in range(7)]
    for n in (0, 1, 5):
        assert [bool(sam_optax.after(n)(t)) for t in steps] == [t >= n for t in range(7)]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", often(FOUR, "sam", "rsam"))
def test_plain_steps_are_the_base_optimizers(name, given):
    """Bit for bit; one gradient at most; and the perturbation's state waits."""
    base, method = optax.sgd(0.1, momentum=0.9), make(name)
    grad_fn = RuntimeCounted(gradient)
    tx = sam_optax.sharpness_aware(base, method, when=sam_optax.every(2))
    step, base_update = stepper(tx, grad_fn), jax.jit(base.update)
    params, state = PARAMS, tx.init(PARAMS)
    for t in range(4):
        before, grad_fn.evaluations = state, 0
        updates, state = step(gradient(params) if given else None, state, params)
        jax.effects_barrier()
        assert int(state.step) == t + 1
        inner = before.perturbation_state
        if t % 2 == 0:
            ascent = gradient(method.start_fn(params, inner))
            point, inner = method.perturb_fn(params, ascent, inner)
            expected = base_update(gradient(point), before.base_state, params)
            assert grad_fn.evaluations == (2 if name == "rsam" or not given else 1)
            assert_close((updates, state.base_state), expected, 1e-6)
            assert_close(state.perturbation_state, inner, 1e-6)
        else:
            expected = base_update(gradient(params), before.base_state, params)
            assert grad_fn.evaluations == (0 if given else 1)
            assert_same((updates, state.base_state), expected)
            assert_same(state.perturbation_state, inner)
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("answer", [True, False, np.bool_(True), jnp.asarray(False)])
@pytest.mark.parametrize("jit", [True, False])
def test_when_may_answer_with_any_boolean(answer, jit):
    steps = []

    def when(step):
        steps.append(step)
        return answer

    tx = sam_optax.sharpness_aware(optax.sgd(1.0), make("sam"), when=when)
    step = lambda s: tx.update(None, s, PARAMS, grad_fn=gradient)
    updates, _ = (jax.jit(step) if jit else step)(tx.init(PARAMS))
    assert same(updates, jax.tree.map(jnp.negative, gradient(PARAMS))) is not bool(answer)
    assert steps[0].dtype == jnp.int32
    assert steps[0].shape == ()


def test_a_descent_gets_the_gradient_as_ascent_gradient_at_plain_steps():
    def update(updates, state, params=None, *, ascent_grads, **extra):
        return jax.tree.map(jnp.subtract, updates, ascent_grads), state

    descent = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = sam_optax.sharpness_aware(
        optax.identity(), make("sam"), descent=descent, when=sam_optax.after(1)
    )
    step, state = stepper(tx), tx.init(PARAMS)
    for expected in (0, 0.6):
        updates, state = step(None, state, PARAMS)
        assert norm(updates) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sam_optax.every(0), ValueError, "k must be at least 1, got 0"),
        (lambda: sam_optax.every(2.0), TypeError, "k must be a static integer.*2.0"),
        (lambda: sam_optax.after(-1), ValueError, "n must be at least 0, got -1"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("when", [lambda step: sam_optax.every(2), lambda step: jnp.ones(2) > 0])
def test_a_when_that_returns_no_scalar(when):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make("sam"), when=when)
    with pytest.raises(TypeError, match="when must return whether the step perturbs"):
        tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient)
