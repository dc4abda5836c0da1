"""What every method does, alone and inside ``sharpness_aware``: transformations of JAX."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_close, assert_same, norm, signature, vector
from methods import ASCEND_AT_ZERO, KINDS, NAMES, OURS, make, subject

import sam_optax

PARAMS = {
    "conv": jnp.array([[[1.0, -2.0]]]),
    "dense": {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])},
}
every_method = pytest.mark.parametrize("name", NAMES)
# Inside sharpness_aware, one of each kind where the formula makes no difference.
every_subject = pytest.mark.parametrize(
    ("name", "base"), [(name, None) for name in NAMES] + [(name, "sgd") for name in KINDS]
)
one_of_a_kind = pytest.mark.parametrize("name", KINDS)


def gradient(params):
    return jax.tree.map(lambda x: x + 0.1 * x * jnp.abs(x) ** 2, params)


def step(tx, params, state):
    """One step: the params, moved by what the transformation returns, and the state."""
    updates, state = tx.update(gradient(params), state, params, grad_fn=gradient)
    return optax.apply_updates(params, updates), state


@functools.cache
def reference(name, base, steps=3):
    """Params and state after some steps outside of jit."""
    tx = subject(name, base)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = step(tx, params, state)
    return params, state


def fresh(tree):
    """A copy that may be donated."""
    return jax.tree.map(jnp.copy, tree)


@every_method
@pytest.mark.parametrize("base", [None, "sgd", "adamw"])
def test_protocol(name, base):
    tx = subject(name, base)
    assert isinstance(tx, optax.GradientTransformation)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx
    assert list(inspect.signature(init).parameters) == ["params"]
    parameters = inspect.signature(update).parameters
    assert list(parameters)[:3] == ["updates", "state", "params"]
    assert parameters["params"].default is None
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if base is None:
        assert isinstance(tx, sam_optax.Perturbation)


@every_subject
@pytest.mark.fast("sam-None", "fsam-sgd")
def test_init_and_update_are_pure(name, base):
    tx = subject(name, base)
    params, state, grads = PARAMS, tx.init(PARAMS), gradient(PARAMS)
    before = fresh((params, state, grads))
    first = tx.update(grads, state, params, grad_fn=gradient)
    assert_same(tx.update(grads, state, params, grad_fn=gradient), first)
    assert_same((params, state, grads), before)
    assert_same(tx.init(PARAMS), state)


@pytest.mark.parametrize(
    ("name", "base"),
    [(name, base) for name in NAMES for base in (None, "sgd")]
    + [("sam", "adamw"), ("rsam", "adamw")],
)
def test_jit_without_a_retrace_and_with_donation(name, base):
    """Params and state are donated from the first step on: no state aliases params."""
    tx = subject(name, base)
    counted = Counted(lambda params, state: step(tx, params, state))
    jitted = jax.jit(counted, donate_argnums=(0, 1))
    params = fresh(PARAMS)
    state = tx.init(params)
    expected = signature((params, state))
    for i in range(5):
        donated = params
        params, state = jitted(params, state)
        assert all(x.is_deleted() for x in jax.tree.leaves(donated))
        assert signature((params, state)) == expected
        if i == 2:
            assert_close((params, state), reference(name, base), 1e-5)
    assert counted.calls == 1


@every_method
@pytest.mark.fast("fsam")
def test_weak_types_are_stable(name):
    """Params made of Python numbers are weakly typed, and stay so; nothing retraces."""
    tx = subject(name, "sgd")
    weak = {"kernel": jnp.asarray(1.0), "bias": jnp.full((), 2.0)}
    assert weak["kernel"].weak_type
    counted = Counted(lambda p, s: tx.update(gradient(p), s, p, grad_fn=gradient))
    jitted = jax.jit(counted)
    state = tx.init(weak)
    for _ in range(3):
        before = signature(state)
        updates, state = jitted(weak, state)
        assert signature(state)[0] == before[0]
        assert signature(updates) == signature(weak)
        assert all(np.isfinite(vector(updates)))
    # optax's trace is weakly typed at first or not, so it may take one more trace than ours.
    assert counted.calls <= 2
    method = make(name)
    eps, new_state = method.update(gradient(weak), method.init(weak), weak)
    if name in OURS:
        assert signature(eps) == signature(weak)
        assert signature(new_state) == signature(method.init(weak))


@every_subject
@pytest.mark.fast("fsam-sgd")
def test_scan(name, base):
    tx = subject(name, base)
    body = lambda carry, _: (step(tx, *carry), None)
    result, _ = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), length=3)
    assert_close(result, reference(name, base), 1e-5)


@every_subject
@pytest.mark.fast("fsam-sgd")
@pytest.mark.sample("*-sgd", "sam-None", "rsam-None")
def test_vmap(name, base):
    tx = subject(name, base)
    scales = jnp.array([1.0, -2.0])
    many = jax.tree.map(lambda x: scales.reshape(-1, *(1,) * x.ndim) * x, PARAMS)
    states = jax.vmap(tx.init)(many)
    results = jax.vmap(functools.partial(step, tx))(many, states)
    for i, scale in enumerate(scales):
        params = jax.tree.map(lambda x, scale=scale: scale * x, PARAMS)
        alone = step(tx, params, tx.init(params))
        assert_close(jax.tree.map(lambda x, i=i: x[i], results), alone, 1e-5)


@one_of_a_kind
@pytest.mark.slow
def test_pmap(name):
    tx = subject(name, "sgd")
    add_axis = lambda tree: jax.tree.map(lambda x: x[None], tree)
    params, state = add_axis(PARAMS), add_axis(tx.init(PARAMS))
    stepped = jax.pmap(functools.partial(step, tx), devices=jax.devices()[:1])(params, state)
    alone = add_axis(step(tx, PARAMS, tx.init(PARAMS)))
    assert_close(stepped, alone, 1e-5)


@every_subject
def test_state_does_not_alias_params(name, base):
    state = subject(name, base).init(PARAMS)
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(PARAMS)}
    own = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.size]
    assert pointers.isdisjoint(own)
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("base", [None, "sgd"])
@pytest.mark.parametrize("name", OURS)
def test_zero_gradient(name, base):
    tx = subject(name, base)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    state = tx.init(PARAMS)
    for _ in range(2):
        # Nor is there a NaN on the way, which would stop a user who is looking for one.
        with jax.debug_nans(True):
            updates, state = tx.update(zeros, state, PARAMS, grad_fn=lambda p: zeros)
        assert np.all(np.isfinite(vector((updates, state))))
        # Of a random start, the noise is left.
        ascends = name in ASCEND_AT_ZERO or (base is None and make(name).has_start)
        assert norm(updates) == 0 or ascends


@every_subject
@pytest.mark.fast("sam-*")
def test_extra_arguments_are_tolerated(name, base):
    tx = subject(name, base)
    state = tx.init(PARAMS)
    update = functools.partial(tx.update, gradient(PARAMS), state, PARAMS, grad_fn=gradient)
    assert_same(update(value=jnp.asarray(1.0), unknown=1), update())
    assert_close(update(value=jnp.asarray(1.0), unknown="text", function=abs), update(), 1e-6)


@one_of_a_kind
@pytest.mark.sample("sam", "asam", "fsam", "only_rsam", "ssam", "momentum")
@pytest.mark.slow
def test_no_tracer_leaks(name):
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1),
        make(name),
        ascent_steps=1 if make(name).single_pass else 2,
        when=sam_optax.every(2),
        skip_nonfinite=True,
    )
    with jax.checking_leaks():
        jax.jit(lambda p: step(tx, p, tx.init(p)))(PARAMS)


@one_of_a_kind
@pytest.mark.slow
def test_inject_hyperparams(name):
    """Around the whole; edits of the learning rate act and nothing retraces."""
    tx = optax.inject_hyperparams(lambda lr: sam_optax.sharpness_aware(optax.sgd(lr), make(name)))(
        lr=0.1
    )
    counted = Counted(lambda s: tx.update(gradient(PARAMS), s, PARAMS, grad_fn=gradient)[0])
    jitted = jax.jit(counted)
    state = tx.init(PARAMS)
    full = jitted(state)
    state.hyperparams["lr"] = jnp.asarray(0.05, state.hyperparams["lr"].dtype)
    assert_close(jitted(state), jax.tree.map(lambda x: 0.5 * x, full), 1e-5)
    assert counted.calls <= 2  # weak types of optax's first state aside


@one_of_a_kind
@pytest.mark.slow
def test_multi_steps(name):
    tx = optax.MultiSteps(subject(name, "sgd"), every_k_schedule=2)
    params, state = PARAMS, tx.init(PARAMS)
    expected = signature(state)
    # Before optax 0.2.5 it takes functions that are pytrees only.
    grad_fn = jax.tree_util.Partial(gradient)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(gradient(params), state, params, grad_fn=grad_fn)
        return (optax.apply_updates(params, updates), state), params

    (params, state), history = jax.lax.scan(body, (params, state), length=4)
    assert signature(state) == expected
    assert int(state.inner_opt_state.step) == 2
    kernels = np.asarray(history["dense"]["kernel"])
    np.testing.assert_array_equal(kernels[0], kernels[1])  # nothing moves at the odd steps
    np.testing.assert_array_equal(kernels[2], kernels[3])
    assert not np.array_equal(kernels[1], kernels[2])
