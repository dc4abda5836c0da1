"""`alternating`: two calls are one step of `sharpness_aware`, in loops that know nothing of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, batches, init_mlp, leaves, mlp_loss, same, signature
from methods import make

import sam_optax
from sam_optax import alternating, eval_params

STEPS = 7
GRAD = jax.jit(jax.grad(mlp_loss))
BASE = optax.sgd(optax.cosine_decay_schedule(0.02, STEPS), momentum=0.9)
SGD, W = optax.sgd(0.1), jnp.ones(2)


def roomy_params():
    """Params in ±[.5, 1.5], which these methods and rates move by less than half: exactly."""
    return jax.tree.map(lambda w: jnp.sign(w) * (0.5 + jnp.abs(w) % 1), init_mlp())


def grad_fns():
    """The gradient function of each step's batch."""
    return [functools.partial(GRAD, x=x, y=y) for x, y in zip(*batches(STEPS), strict=True)]


def sharp_steps(perturbation, functions, base=BASE, **options):
    """Params and state after each step of `sharpness_aware`."""
    tx = sam_optax.sharpness_aware(base, perturbation, **options)
    w, state = roomy_params(), tx.init(roomy_params())
    for grad_fn in functions:
        updates, state = tx.update(None, state, w, grad_fn=grad_fn)
        w = optax.apply_updates(w, updates)
        yield w, state


def alternating_steps(perturbation, functions, base=BASE, **options):
    """The unperturbed params and the state after the calls of each training step."""
    tx = alternating(base, perturbation, **options)
    params, state = roomy_params(), tx.init(roomy_params())
    for grad_fn in functions:
        before = state.step + state.skipped
        while state.step + state.skipped == before:
            updates, state = tx.update(grad_fn(params), state, params)
            params = optax.apply_updates(params, updates)
        yield eval_params(params, state), state


def difference_of_gradients():
    """A descent that needs both gradients."""

    def update(updates, state, params=None, *, ascent_grads, **extra):
        return jax.tree.map(lambda g, a: g - 0.3 * a, updates, ascent_grads), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def test_two_calls_are_one_step_of_known_numbers():
    """L = x², ρ = 1: the sharp gradient at 3 is 8; the second call starts at 4 and ends at 2."""
    tx = alternating(optax.sgd(0.125), sam_optax.sam(1.0))
    x, state = jnp.array(3.0), tx.init(jnp.array(3.0))
    for expected, w in [(4.0, 3.0), (2.0, 2.0), (3.0, 2.0)]:
        updates, state = tx.update(2 * x, state, x)
        x = optax.apply_updates(x, updates)
        assert (float(x), float(eval_params(x, state))) == (expected, w)


CASES = {
    "sam": ("sam", {}, {}),
    "fsam": ("fsam", {}, {}),
    "rsam": ("rsam", {"gamma": 0.02}, {"base": optax.adamw(0.01, weight_decay=0.1)}),
    "momentum": ("momentum", {}, {}),
    "every third": ("sam_scheduled", {"start": 0.0}, {"when": sam_optax.every(3)}),
    "not the first": ("fsam", {}, {"when": lambda step: step % 2 == 1}),
    "a start, later": (
        "rsam_scheduled",
        {"gamma": 0.03, "noise_scale": "norm"},
        {"when": sam_optax.after(2)},
    ),
    "at random": ("sam", {}, {"when": sam_optax.bernoulli(0.5, key=jax.random.key(6))}),
    "precision": (
        "bsam",
        {"initial_precision": 100.0},
        {"base": optax.scale(-0.1), "descent": sam_optax.scale_by_precision()},
    ),
    "descent": ("sam", {}, {"descent": difference_of_gradients(), "when": sam_optax.every(2)}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_sharpness_aware_to_the_bit(case):
    """Schedules among them: they count training steps, not calls."""
    name, of_method, options = CASES[case]
    perturbation = make(name, 0.05, **of_method)
    pairs = zip(
        alternating_steps(perturbation, grad_fns(), **options),
        sharp_steps(perturbation, grad_fns(), **options),
        strict=True,
    )
    for (w, state), (expected, core) in pairs:
        assert_same(w, expected)
        assert_same(state.perturbation_state, core.perturbation_state)
        assert_same(state.base_state, core.base_state)
    assert not same(w, roomy_params())


def functions_that_fail():
    """Batches 2 and 3 at the first gradient, batch 4 at the second."""

    def failing(grad_fn, first):
        numbers = itertools.count()

        def evaluate(params):
            factor = jnp.inf if next(numbers) >= first else 1.0
            return jax.tree.map(lambda g: g * factor, grad_fn(params))

        return evaluate

    # A random start ignores its very first gradient.
    return [failing(*pair) for pair in zip(grad_fns(), (3, 2, 0, 0, 1, 2, 2), strict=True)]


@pytest.mark.parametrize(
    ("method", "when"),
    [(make("fsam", 0.05), sam_optax.every(2)), (make("rsam_scheduled", 0.05, gamma=0.02), None)],
    ids=["fsam", "rsam"],
)
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(method, when):
    options = {"when": when, "skip_nonfinite": True}
    steps = alternating_steps(method, functions_that_fail(), **options)
    expected_steps = sharp_steps(method, functions_that_fail(), **options)
    for (w, state), (expected, core) in zip(steps, expected_steps, strict=True):
        assert_same(w, expected)
        assert_same(state.perturbation_state, core.perturbation_state)
        assert_same((state.base_state, state.skipped), (core.base_state, core.skipped))
    assert int(state.skipped) == 3


def test_eager_state_is_donated_at_every_call():
    """Outside of jit, too, the state holds no buffer of the params, and none twice."""
    tx = alternating(BASE, make("fsam", 0.05), skip_nonfinite=True)
    params, state = roomy_params(), tx.init(roomy_params())
    for i, grad_fn in enumerate(grad_fns()[:4]):
        held = jax.tree.leaves((params, state))
        assert len({leaf.unsafe_buffer_pointer() for leaf in held}) == len(held)
        grads = jax.tree.map(lambda g, i=i: g * (jnp.nan if i == 1 else 1), grad_fn(params))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)


def test_the_state_holds_one_copy_of_the_params():
    state = alternating(SGD, sam_optax.sam()).init(W)
    assert len([leaf for leaf in jax.tree.leaves(state) if leaf.size > 1]) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.slow
def test_error_of_a_move_is_bounded_and_does_not_add_up(dtype):
    """Small and zero params under large moves: within epsilon × length of each move."""
    params = jax.tree.map(
        lambda w: (w * jnp.abs(w) ** 3).at[..., 0].set(0).astype(dtype), init_mlp()
    )
    method = make("rsam", 0.05)
    tx = alternating(optax.sgd(0.3), method)
    state, (x, y) = tx.init(params), batches(12)
    epsilon, inexact = float(jnp.finfo(dtype).eps), 0
    for i in range(24):
        before, grads = params, GRAD(params, x[i // 2].astype(dtype), y[i // 2].astype(dtype))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if state.phase != 0:
            continue
        target = method.start_fn(eval_params(params, state), state.perturbation_state)
        for p, t, q in zip(*(leaves(tree) for tree in (before, target, params)), strict=True):
            assert np.all(np.abs(q - t) <= epsilon * np.abs(t - p))
            inexact += np.sum(q != t)
    assert inexact > 0  # the bound had something to bound


def test_leaves_of_every_kind():
    """Integers, holes, frozen and low-precision leaves, complex numbers, weak types."""
    params = {
        "w": jnp.array([3.0, -4.0]),
        "half": jnp.array([1.0, 2.0], jnp.bfloat16),
        "z": jnp.array([1 + 2j]),
        "weak": jnp.asarray(2.0),
        "frozen": jnp.array([1.0, 0.0]),
        "n": jnp.arange(3),
        "none": None,
    }
    frozen = {name: name == "frozen" for name in params}
    base = optax.chain(optax.sgd(0.1), optax.masked(optax.set_to_zero(), frozen))
    grads = {
        name: None if p is None else jnp.full_like(p, 50) if name == "n" else 0.5 * p
        for name, p in params.items()
    }
    tx, core = (f(base, sam_optax.sam(0.1)) for f in (alternating, sam_optax.sharpness_aware))
    live, state = params, tx.init(params)
    for _ in range(2):
        updates, new_state = tx.update(grads, state, live)
        assert signature(updates) == signature(live)
        assert signature(new_state) == signature(state)
        live, state = optax.apply_updates(live, updates), new_state
    assert_same((live["n"], live["frozen"]), (params["n"], params["frozen"]))
    updates, _ = core.update(grads, core.init(params), params, grad_fn=lambda _: grads)
    w = {**optax.apply_updates(params, updates), "n": params["n"]}
    assert_close(eval_params(live, state), w, rtol=0)


def test_wide_gradients_of_bfloat16_params():
    """Case 37."""
    tx = alternating(optax.sgd(0.1, momentum=0.9), sam_optax.sam(0.1), skip_nonfinite=True)
    w, state = W.astype(jnp.bfloat16), tx.init(W.astype(jnp.bfloat16))
    assert signature(jax.eval_shape(tx.update, W, state, w)) == signature((w, state))


def test_float0_gradients_of_integer_leaves():
    params = {"w": jnp.array([3.0, -4.0]), "n": jnp.arange(3)}
    grad_fn = jax.grad(lambda p: jnp.sum(p["w"] ** 2 * p["n"][:2]), allow_int=True)
    tx = alternating(optax.masked(optax.sgd(0.1), {"w": True, "n": False}), sam_optax.sam(0.1))
    update = jax.jit(lambda state, params: tx.update(grad_fn(params), state, params))
    updates, state = update(tx.init(params), params)
    assert updates["n"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(updates["w"], [0.0, -0.1], atol=1e-6)
    assert state.params["n"] is None


TX = alternating(SGD, sam_optax.sam())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: TX.update(W, TX.init(W)), r"update\(grads, state, params\).*params=None"),
        (lambda: TX.update(None, TX.init(W), W), "grads=None"),
        (lambda: alternating(0.1, sam_optax.sam()), "base_tx"),
        (lambda: alternating(SGD, 0.05), "perturbation"),
        (lambda: alternating(SGD, sam_optax.sam(), when=2), "when"),
        (lambda: alternating(SGD, optax.chain(make("rsam"))).init(W), "random start"),
    ],
)
def test_errors_say_what_to_pass(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
