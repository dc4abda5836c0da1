"""Lookbehind-SAM: several ascents on one batch, with a step of the base optimizer after each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_close, signature, vector, x64

import sam_optax

W = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}
SAM = sam_optax.sam(0.3)
BASES = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.chain(
        optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "adamw": lambda: optax.adamw(0.1),
}


def gradient(params):
    return jax.tree.map(lambda x: x**3 if jnp.issubdtype(x.dtype, jnp.inexact) else x, params)


def steps(tx, n=3, jit=False, params=W, given=False):
    state = tx.init(params)

    def step(params, state):
        grads = gradient(params) if given else None
        updates, state = tx.update(grads, state, params, grad_fn=gradient)
        return optax.apply_updates(params, updates), state

    for _ in range(n):
        params, state = (jax.jit(step) if jit else step)(params, state)
    return params, state


def test_one_ascent_and_the_whole_way_are_sam():
    base = optax.sgd(0.1, momentum=0.9)
    found, _ = steps(sam_optax.lookbehind(base, SAM, 1, 1.0))
    assert_close(found, steps(sam_optax.sharpness_aware(base, SAM))[0], 1e-6)


def test_with_momentum_it_has_the_values_of_the_public_code():
    """L = Σ cosh w, w₀ = (1, −0.5); momentum 0.9, learning rate 0.1, ρ = 0.3, k = 3, α = 0.5."""
    with x64():
        tx = sam_optax.lookbehind(optax.sgd(0.1, momentum=0.9), SAM, 3, 0.5)
        w = jnp.array([1.0, -0.5])
        state = tx.init(w)
        for _ in range(3):
            updates, state = tx.update(None, state, w, grad_fn=jnp.sinh)
            w = w + updates
        np.testing.assert_allclose(w, [-1.16512, 0.49962], atol=1e-5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("alpha", [0.4, "adaptive", optax.linear_schedule(0.2, 1.0, 2)])
@pytest.mark.parametrize("jit", [False, True])
def test_it_is_the_loop_written_by_hand(base, alpha, jit):
    k, base_tx = 3, BASES[base]()
    w, base_state = W, base_tx.init(W)
    for step in range(2):
        point = fast = w
        first = None
        for _ in range(k):
            g = gradient(point)
            norm = np.linalg.norm(vector(g))
            point = jax.tree.map(lambda p, x: p + 0.3 * x / norm, point, g)  # noqa: B023
            moves, base_state = base_tx.update(gradient(point), base_state, fast)
            fast = optax.apply_updates(fast, moves)
            first = fast if first is None else first

        def interpolated(w, f, f_1):
            share = alpha(step) if callable(alpha) else alpha  # noqa: B023
            if alpha == "adaptive":
                a, b = np.ravel(f_1 - w), np.ravel(f - w)
                share = (a @ b / np.linalg.norm(a) / np.linalg.norm(b) + 1) / 2
            return w + share * (f - w)

        w = jax.tree.map(interpolated, w, fast, first)
    found, state = steps(sam_optax.lookbehind(base_tx, SAM, k, alpha), 2, jit)
    assert_close(found, w, 1e-5)
    assert_close(state.base_state, base_state, 1e-5)


@pytest.mark.parametrize("given", [True, False])
def test_a_step_takes_k_more_gradients_than_are_given(given):
    for k in (1, 2, 4):
        counted = Counted(gradient)
        tx = sam_optax.lookbehind(optax.sgd(0.1), SAM, k)
        tx.update(gradient(W) if given else None, tx.init(W), W, grad_fn=counted)
        assert counted.calls == k + (not given)


def test_under_jit_it_is_one_loop():
    tx = sam_optax.lookbehind(optax.sgd(0.1), SAM, 5)
    step = lambda w, s: tx.update(None, s, w, grad_fn=gradient)
    loops = [
        e for e in jax.make_jaxpr(step)(W, tx.init(W)).eqns if e.primitive.name in ("while", "scan")
    ]
    assert len(loops) == 1


def test_perturbations_with_state_and_low_precision():
    params = {"w": jnp.ones(2, jnp.bfloat16), "none": None}
    tx = sam_optax.lookbehind(optax.sgd(0.1, momentum=0.9), sam_optax.fsam(0.3), 2)
    state = tx.init(params)
    found, after = steps(tx, 1, True, params)
    assert signature(after) == signature(state)
    assert signature(found) == signature(params)
    assert after.perturbation_state[0].count == 2


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"alpha": 1.5}, r"alpha must be in \[0, 1\]"),
        ({"alpha": "other"}, "alpha must be"),
        ({"perturbation": sam_optax.rsam(key=0)}, "must not have a start"),
        ({"base_tx": SAM, "perturbation": optax.sgd(0.1)}, "Exchange the arguments"),
    ],
)
def test_what_is_out_of_range(arguments, match):
    with pytest.raises((TypeError, ValueError), match=match):
        sam_optax.lookbehind(**{"base_tx": optax.sgd(0.1), "perturbation": SAM, **arguments})


@pytest.mark.parametrize("grads", [jnp.ones(()), {"other": jnp.ones(2)}])
def test_grads_must_be_a_gradient(grads):
    params = {"w": jnp.ones(2)}
    tx = sam_optax.lookbehind(optax.sgd(0.1), SAM, 2)
    with pytest.raises((TypeError, ValueError), match="grads must"):
        tx.update(grads, tx.init(params), params, grad_fn=lambda p: p)
