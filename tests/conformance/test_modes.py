"""Every kind of method in JAX's transformations and modes, and inside optax's wrappers."""

import contextlib
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Compilations, Counted, assert_close, signature
from jax.experimental import checkify
from methods import KINDS, OPTIONS, WHOLE, make, often, subject

import sam_optax

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])}
BASE = optax.sgd(0.05, momentum=0.9)
CASES = [(name, "plain") for name in KINDS]
CASES += [("sam", option) for option in OPTIONS if option != "plain"]
CASES += [(name, "whole") for name in WHOLE]
every_kind = pytest.mark.parametrize("name", often(KINDS, "fsam"))


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
    jitted = jax.jit(functools.partial(step, tx))
    return jitted(*jitted(PARAMS, tx.init(PARAMS)))


# ---------------------------------------------------------------- transformations


@every_kind
def test_scan(name):
    tx = optimizer(name, "plain")
    body = lambda carry, _: (step(tx, *carry), None)
    result, _ = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), length=2)
    assert_close(result, after_two_steps(name, "plain"), rtol=1e-5)


@every_kind
@pytest.mark.parametrize("mapped", ["vmap", "pmap"])
def test_maps_over_models(name, mapped):
    tx = optimizer(name, "plain")
    members = [PARAMS, jax.tree.map(lambda x: -2 * x, PARAMS)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *members)
    one = functools.partial(step, tx)
    both = jax.jit(jax.vmap(one)) if mapped == "vmap" else jax.pmap(one)
    results = both(together, jax.vmap(tx.init)(together))
    for i, params in enumerate(members):
        alone = jax.jit(one)(params, tx.init(params))
        assert_close(jax.tree.map(lambda x, i=i: x[i], results), alone, rtol=1e-5)


@pytest.mark.parametrize("name", often(["sam", "asam", "rsam"], "sam"))
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
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(at_zero))


# ---------------------------------------------------------------- modes

MODES = {
    "debugging": lambda: [jax.debug_nans(True), jax.debug_infs(True), jax.debug_key_reuse(True)],
    "promotion": lambda: [jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")],
    "disable_jit": lambda: [jax.disable_jit()],
    "check_tracer_leaks": lambda: [jax.checking_leaks()],
}
DAILY = {("sam", "plain", "debugging"), ("fsam", "plain", "promotion")}


@pytest.mark.parametrize(
    ("name", "option", "mode"),
    [
        pytest.param(*case, mode, marks=[] if (*case, mode) in DAILY else [pytest.mark.slow])
        for case in CASES
        for mode in MODES
    ],
)
def test_mode(name, option, mode):
    tx = optimizer(name, option)
    one = functools.partial(step, tx)  # anew, so that it is traced in the mode
    run = one if mode == "disable_jit" else jax.jit(lambda *args: one(*args))
    with contextlib.ExitStack() as stack:
        for context in MODES[mode]():
            stack.enter_context(context)
        result = run(*run(PARAMS, tx.init(PARAMS)))
    assert_close(result[0], after_two_steps(name, option)[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), CASES)
def test_checkify(name, option):
    tx = optimizer(name, option)
    errors = checkify.float_checks | checkify.user_checks
    checked = jax.jit(checkify.checkify(functools.partial(step, tx), errors=errors))
    error, (params, _) = checked(PARAMS, tx.init(PARAMS))
    assert error.get() is None
    assert np.all(np.isfinite(params["kernel"]))


# ---------------------------------------------------------------- without jit


def eager_steps():
    gradient = jax.jit(grad_fn)  # or most of the time goes into differentiating
    plain, aware = lambda: lambda p: gradient(p), sam_optax.sharpness_aware
    sam = sam_optax.sam(0.1)
    return {
        "plain": (aware(BASE, sam), plain),
        "groups": (aware(BASE, sam, groups=5), lambda: lambda p, i: gradient(p, i)),
        "accumulate": (aware(BASE, sam), lambda: sam_optax.accumulate(gradient, 5)),
        "samples": (aware(BASE, make("low_pass_samples")), plain),
        "steps": (aware(BASE, sam, ascent_steps=4), plain),
        "skip": (aware(BASE, sam, skip_nonfinite=True, info=True), plain),
        "every": (aware(BASE, sam, when=sam_optax.every(2)), plain),
        "fsam": (aware(BASE, make("fsam")), plain),
        "rsam": (aware(BASE, make("rsam")), plain),
    }


@pytest.mark.parametrize("name", often(eager_steps(), "plain", "groups"))
def test_eager_steps_compile_and_keep_nothing(name):
    """With a new gradient function at every step, as a loop over batches writes it."""
    tx, make_grad_fn = eager_steps()[name]
    params, state = PARAMS, tx.init(PARAMS)

    def steps(n):
        nonlocal params, state
        for _ in range(n):
            updates, state = tx.update(None, state, params, grad_fn=make_grad_fn())
            params = optax.apply_updates(params, updates)
        gc.collect()
        return len(jax.live_arrays())

    alive = steps(2)
    with Compilations() as compilations:
        assert steps(8) <= alive + 2
    assert compilations.count == 0


# ---------------------------------------------------------------- inside optax


@every_kind
def test_inject_hyperparams(name):
    """Around the whole; edits of the learning rate act and nothing retraces."""
    tx = optax.inject_hyperparams(lambda lr: sam_optax.sharpness_aware(optax.sgd(lr), make(name)))(
        lr=0.1
    )
    counted = Counted(lambda s: tx.update(grad_fn(PARAMS), s, PARAMS, grad_fn=grad_fn)[0])
    jitted, state = jax.jit(counted), tx.init(PARAMS)
    full = jitted(state)
    state.hyperparams["lr"] = jnp.asarray(0.05, state.hyperparams["lr"].dtype)
    assert_close(jitted(state), jax.tree.map(lambda x: 0.5 * x, full), 1e-5)
    assert counted.calls <= 2  # weak types of optax's first state aside


@every_kind
def test_multi_steps(name):
    tx = optax.MultiSteps(subject(name, "sgd"), every_k_schedule=2)
    expected = signature(tx.init(PARAMS))
    # Before optax 0.2.5 it takes functions that are pytrees only.
    gradient = jax.tree_util.Partial(grad_fn)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(gradient(params), state, params, grad_fn=gradient)
        return (optax.apply_updates(params, updates), state), params

    (_, state), history = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), length=4)
    assert signature(state) == expected
    assert int(state.inner_opt_state.step) == 2
    kernels = np.asarray(history["kernel"])
    np.testing.assert_array_equal(kernels[0], kernels[1])  # nothing moves at the odd steps
    np.testing.assert_array_equal(kernels[2], kernels[3])
    assert not np.array_equal(kernels[1], kernels[2])
