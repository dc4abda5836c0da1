"""Every kind of method in JAX's modes: debugging, checking, promotion, rematerialization."""

import contextlib
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Compilations, assert_close
from jax.experimental import checkify
from methods import KINDS, OPTIONS, WHOLE, make

import sam_optax

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])}
BASE = optax.sgd(0.05, momentum=0.9)
CASES = [(name, "plain") for name in KINDS]
CASES += [("sam", option) for option in OPTIONS if option != "plain"]
CASES += [(name, "whole") for name in WHOLE]


def loss(params, group=0.5):
    """On a batch of two groups, 0 and 1, and without a group on both."""
    slope = 2 * group - 1
    return sum(jnp.sum(x**4 + x * jnp.asarray(slope, x.dtype)) for x in jax.tree.leaves(params))


grad_fn = jax.grad(loss)


@functools.cache
def optimizer(name, option):
    if option == "whole":
        return WHOLE[name](BASE)
    return sam_optax.sharpness_aware(BASE, make(name), **OPTIONS[option])


def step(tx, params, state):
    updates, state = tx.update(None, state, params, grad_fn=grad_fn)
    return optax.apply_updates(params, updates), state


@functools.cache
def after_two_steps(name, option):
    tx = optimizer(name, option)
    state = PARAMS, tx.init(PARAMS)
    jitted = jax.jit(functools.partial(step, tx))
    return jitted(*jitted(*state))[0]


MODES = {
    "debugging": lambda: [jax.debug_nans(True), jax.debug_infs(True), jax.debug_key_reuse(True)],
    "promotion": lambda: [jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")],
    "disable_jit": lambda: [jax.disable_jit()],
    "check_tracer_leaks": lambda: [jax.checking_leaks()],
}
FEW = {"sam", "asam", "rsam"}
SLOW = {"disable_jit", "check_tracer_leaks"}


def often(option, mode):
    """Whether a case is for every day: what costs little, and options in one mode."""
    return mode not in SLOW and (option == "plain" or mode == "debugging")


@pytest.mark.parametrize(
    ("name", "option", "mode"),
    [
        pytest.param(*case, mode, marks=[] if often(case[1], mode) else [pytest.mark.slow])
        for case in CASES
        for mode in MODES
        if mode != "check_tracer_leaks" or case[0] == "sam"  # the methods are in test_conformance
    ],
)
@pytest.mark.fast("sam-plain-debugging", "fsam-plain-debugging")
def test_mode(name, option, mode):
    tx = optimizer(name, option)

    def one(params, state):
        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    run = one if mode == "disable_jit" else jax.jit(one)
    with contextlib.ExitStack() as stack:
        for context in MODES[mode]():
            stack.enter_context(context)
        for _ in range(2):  # init, too, twice
            state = tx.init(PARAMS)
        params, state = run(PARAMS, state)
        params, state = run(params, state)
    assert_close(params, after_two_steps(name, option), rtol=1e-5)


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.fast("sam-plain", "rsam-plain")
def test_checkify(name, option):
    tx = optimizer(name, option)
    errors = checkify.float_checks | checkify.user_checks
    checked = jax.jit(checkify.checkify(functools.partial(step, tx), errors=errors))
    error, (params, _) = checked(PARAMS, tx.init(PARAMS))
    assert error.get() is None
    assert np.all(np.isfinite(params["kernel"]))


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.exhaustive) for n in KINDS]
)
@pytest.mark.fast("sam")
def test_derivatives_through_a_step(name):
    """With and without rematerialization, and finite also where all gradients are zero."""
    tx = optimizer(name, "plain")

    def outcome(params, scale=1.0):
        scaled = lambda p: jax.tree.map(lambda g: scale * g, grad_fn(p))
        updates, _ = tx.update(None, tx.init(params), params, grad_fn=scaled)
        return loss(optax.apply_updates(params, updates))

    @jax.jit
    def derivatives(params, zero):
        slopes = jax.grad(outcome), jax.grad(jax.checkpoint(outcome))
        return *(slope(params) for slope in slopes), jax.grad(outcome, argnums=(0, 1))(params, zero)

    plain, again, at_zero = derivatives(PARAMS, 0.0)
    assert_close(again, plain, rtol=1e-5)
    if name == "by_hand":  # a norm of optax's, which has no derivative there
        return
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(at_zero))


def eager_steps():
    key = jax.random.key(0)
    gradient = jax.jit(grad_fn)  # or most of the time goes into differentiating
    sam = sam_optax.sam(0.1)
    aware = sam_optax.sharpness_aware
    accumulated = lambda: sam_optax.accumulate(gradient, 5)
    return {
        "plain": (aware(BASE, sam), lambda: gradient),
        "groups": (aware(BASE, sam, groups=5), lambda: lambda p, i: gradient(p, i)),
        "accumulate": (aware(BASE, sam), accumulated),
        "samples": (
            aware(BASE, sam_optax.low_pass(0.1, 4, key=key)),
            lambda: lambda p: gradient(p),
        ),
        "steps": (aware(BASE, sam, ascent_steps=4), lambda: lambda p: gradient(p)),
        "skip": (aware(BASE, sam, skip_nonfinite=True), lambda: lambda p: gradient(p)),
        "info": (aware(BASE, sam, info=True), lambda: lambda p: gradient(p)),
        "every": (aware(BASE, sam, when=sam_optax.every(2)), lambda: lambda p: gradient(p)),
        "fsam": (aware(BASE, sam_optax.fsam(0.1)), lambda: lambda p: gradient(p)),
        "rsam": (aware(BASE, sam_optax.rsam(0.1, key=key)), lambda: lambda p: gradient(p)),
    }


@pytest.mark.parametrize("name", eager_steps())
@pytest.mark.fast("plain", "groups", "fsam")
def test_nothing_compiles_after_the_first_steps_without_jit(name):
    """With a new gradient function at every step, as a loop over batches writes it."""
    tx, make_grad_fn = eager_steps()[name]
    params, state = PARAMS, tx.init(PARAMS)

    def steps(n):
        nonlocal params, state
        for _ in range(n):
            updates, state = tx.update(None, state, params, grad_fn=make_grad_fn())
            params = optax.apply_updates(params, updates)

    steps(2)
    with Compilations() as compilations:
        steps(4)
    assert compilations.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["groups", "accumulate", "samples", "rsam"])
def test_memory_is_flat_without_jit(name):
    tx, make_grad_fn = eager_steps()[name]
    params, state = PARAMS, tx.init(PARAMS)
    alive = []
    for i in range(40):
        updates, state = tx.update(None, state, params, grad_fn=make_grad_fn())
        params = optax.apply_updates(params, updates)
        if i in (10, 39):
            gc.collect()
            alive.append(len(jax.live_arrays()))
    assert alive[1] <= alive[0] + 2
