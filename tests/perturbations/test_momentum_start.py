"""Ascent along past gradients: the formula, whose momentum it is, and one gradient a step."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.tree_utils as otu
import pytest
import references_family as ref
from family import BASE, LR, MOMENTUM, START, as_tree, gap, gradient, numpy_gradients, run
from helpers import assert_close, assert_same, norm, vector, x64

import sam_optax

partition = getattr(optax, "partition", optax.multi_transform)  # the older name

RHO = 0.3
METHOD = sam_optax.momentum_start(sam_optax.sam(RHO), 0.6)
OF_BASE = sam_optax.momentum_start(sam_optax.sam(RHO))


def reference(gradient_of):
    return ref.train(START, numpy_gradients(), gradient_of, LR, MOMENTUM)


def test_is_the_formula():
    points, _ = run(sam_optax.sharpness_aware(BASE, METHOD))
    assert gap(points, reference(ref.momentum_ascent(RHO, 0.6))) < 1e-12
    for wrong in ((0.3, 1.0), (0.6, -1.0)):
        assert gap(points, reference(ref.momentum_ascent(RHO, *wrong))) > 1e-3


@pytest.mark.parametrize(
    ("in_loss", "expected"), [(0.5, (0.04253, 3.26201)), (0.0, (0.03720, 3.11963))]
)
def test_the_momentum_of_the_base_contains_its_weight_decay(in_loss, expected):
    """The decay is that of w + ε as part of the loss, and that of w as part of the base."""
    with x64():
        base = optax.chain(optax.add_decayed_weights(0.5 - in_loss), optax.sgd(0.1, momentum=0.9))
        method = sam_optax.momentum_start(optax.chain(sam_optax.sam(1.0), optax.scale(-1.0)))
        tx = sam_optax.sharpness_aware(base, method)
        grad_fn = jax.grad(lambda w: 0.5 * w[0] ** 2 + w[1] + 0.5 * in_loss * jnp.sum(w**2))
        w = jnp.array([0.1, 5.0])
        state = tx.init(w)
        assert not jax.tree.leaves(state.perturbation_state)  # it costs no memory
        for _ in range(3):
            updates, state = tx.update(None, state, w, grad_fn=grad_fn)
            w = optax.apply_updates(w, updates)
        np.testing.assert_allclose(w, expected, atol=6e-6)


ADAMW = optax.inject_hyperparams(optax.adamw)(LR, weight_decay=0.1)


def along_the_buffer(base, when):
    """Params after four steps at w + ρ m/‖m‖, m the base's buffer, in a loop written by hand."""
    params = as_tree(START, jnp.float32)
    state = base.init(params)
    for t in range(4):
        (m,) = otu.tree_get_all_with_path(state, "trace") or otu.tree_get_all_with_path(state, "mu")
        scale = RHO / norm(m[1]) if t and when(jnp.asarray(t)) else 0.0
        point = jax.tree.map(lambda w, m: w + scale * m, params, m[1])  # noqa: B023
        updates, state = base.update(gradient(point, t), state, params)
        params = optax.apply_updates(params, updates)
    return params


def in_sharpness_aware(base, when):
    tx = sam_optax.sharpness_aware(base, OF_BASE, when=when)
    params = as_tree(START, jnp.float32)
    state = tx.init(params)
    for t in range(4):
        grad_fn = lambda p: gradient(p, t)  # noqa: B023
        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        params = optax.apply_updates(params, updates)
    return params


def in_alternating(base, when):
    tx = sam_optax.alternating(base, OF_BASE, when=when)
    params = as_tree(START, jnp.float32)
    state = tx.init(params)
    for t in (0, 0, 1, 2, 3):  # one call more, to the first start
        updates, state = tx.update(gradient(params, t), state, params)
        params = optax.apply_updates(params, updates)
    return sam_optax.eval_params(params, state)


@pytest.mark.parametrize("when", [sam_optax.after(0), sam_optax.every(2)])
@pytest.mark.parametrize(
    ("base", "entrance"),
    [(BASE, in_sharpness_aware), (ADAMW, in_sharpness_aware), (ADAMW, in_alternating)],
)
def test_along_the_base_optimizers_buffer(base, entrance, when):
    """Which contains the steps that do not perturb."""
    found = entrance(base, when)
    assert_close(found, along_the_buffer(base, when), 1e-5)
    without = along_the_buffer(base, when=lambda t: False)
    assert np.abs(vector(found) - vector(without)).max() > 1e-3


def test_the_average_does_not_contain_the_steps_that_do_not_perturb():
    tx = sam_optax.sharpness_aware(BASE, METHOD, when=sam_optax.every(2))
    _, states = run(tx, 2)
    assert_same(states[1].perturbation_state, states[0].perturbation_state)


class Named(NamedTuple):
    """Params with the names of the buffers."""

    mu: jax.Array
    trace: jax.Array


@pytest.mark.parametrize("base", [BASE, ADAMW])
@pytest.mark.parametrize("make", [Named, lambda mu, trace: {"mu": mu, "trace": {"mu": trace}}])
def test_params_with_the_names_of_a_buffer(make, base):
    params = make(jnp.array([3.0, 4.0]), jnp.array([0.0]))
    state = jax.tree.map(lambda x: x + 2, base.init(params))  # every buffer is 2
    start = OF_BASE.start_fn(params, OF_BASE.init(params), base_state=state)
    np.testing.assert_allclose(vector(start) - vector(params), RHO / np.sqrt(3), rtol=1e-5)
    point, _ = OF_BASE.perturb_fn(params, None, OF_BASE.init(params), base_state=state)
    assert_close(point, start, 1e-6)


def test_of_a_part_of_the_params():
    params, only = as_tree(START, jnp.float32), {"a": False, "b": True}
    method = sam_optax.perturb_only(OF_BASE, only)
    state = jax.tree.map(lambda x: x + 2, optax.adam(LR).init(params))
    start = method.start_fn(params, method.init(params), base_state=state)
    assert_same(start["a"], params["a"])
    np.testing.assert_allclose(start["b"] - params["b"], RHO / np.sqrt(3), rtol=1e-5)


def test_leaves_without_momentum_are_not_perturbed():
    """As of a base optimizer that trains some leaves only."""
    labels = {"a": "trained", "b": "frozen"}
    parts = {"trained": optax.sgd(0.1, momentum=0.9), "frozen": optax.set_to_zero()}
    params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
    base_state = jax.tree.map(lambda x: x + 2, partition(parts, labels).init(params))
    start = OF_BASE.start_fn(params, OF_BASE.init(params), base_state=base_state)
    np.testing.assert_allclose(start["a"] - params["a"], RHO / np.sqrt(2), rtol=1e-5)
    assert_same(start["b"], params["b"])


def test_given_gradients_are_not_used():
    tx = sam_optax.sharpness_aware(BASE, METHOD)
    params = as_tree(START, jnp.float32)
    state = tx.init(params)._replace(perturbation_state=METHOD.init(params)._replace(ema=params))
    nan = jax.tree.map(lambda x: x * jnp.nan, params)
    steps = [tx.update(g, state, params, grad_fn=lambda p: p) for g in (None, nan)]
    assert_same(*steps)


@pytest.mark.slow
def test_groups_share_one_displacement():
    a, w = jnp.array([1.0, 3.0]), jnp.array(2.0)
    method = sam_optax.momentum_start(sam_optax.sam(RHO), 0.0)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, groups=2)
    state = tx.init(w)
    for expected in (2 * 2.0, 2 * (2.0 + RHO)):  # the mean of a is 2
        updates, state = tx.update(None, state, w, grad_fn=lambda p, i: a[i] * p)
        assert float(updates) == pytest.approx(-expected)


W = jnp.ones(2)
ERRORS = [
    (lambda: sam_optax.momentum_start(METHOD), "already has a start"),
    (lambda: sam_optax.sharpness_aware(BASE, METHOD, ascent_steps=2), "ascent_steps must be 1.*2"),
    (
        lambda: sam_optax.sharpness_aware(BASE, optax.chain(METHOD)).init(W),
        "momentum_start.*optax.chain",
    ),
    (
        lambda: OF_BASE.start_fn(W, OF_BASE.init(W)),
        r"base_state=opt_state to start_fn and perturb_fn.*decay=0\.9",
    ),
    (
        lambda: METHOD.perturb_fn(W, None, METHOD.init(W)),
        "with decay averages the gradients: pass grads",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("combinator", [sam_optax.sharpness_aware, sam_optax.alternating])
@pytest.mark.parametrize(
    ("base", "found"),
    [
        (optax.sgd(0.1), "none"),
        (
            optax.chain(optax.trace(0.9), optax.adam(0.1)),
            r"\[0\]TraceState.trace, \[1\]\[0\]ScaleByAdamState.mu",
        ),
    ],
)
def test_no_buffer_and_several(base, found, combinator):
    tx, params = combinator(base, OF_BASE), {"mu": jnp.ones(2)}
    with pytest.raises(ValueError, match=rf"exactly one, found: {found}\. .*decay=0\.9"):
        tx.update(params, tx.init(params), params, grad_fn=lambda p: p)


@pytest.mark.parametrize(
    ("base", "refused"),
    [
        (optax.chain(optax.clip(1.0), optax.rmsprop(0.1, momentum=0.9)), True),
        (optax.lars(0.1), True),  # no statistics, but −η g in the trace, as in the next
        (optax.chain(optax.scale(-0.1), optax.trace(0.9)), True),
        (optax.chain(optax.scale(-0.1), optax.scale_by_adam()), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.zero_nans(), BASE), False),
        (optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9), False),
        (partition({"a": optax.adamw(0.1)}, "a"), False),
    ],
)
def test_a_momentum_of_updates_is_refused(base, refused):
    """That of ``optax.rmsprop`` holds −η g/√v: an ascent along it would descend."""
    w = jnp.array([3.0])
    tx = sam_optax.sharpness_aware(base, OF_BASE)
    match = r"needs a momentum of gradients.*(trace|mu).*rmsprop"
    with pytest.raises(ValueError, match=match) if refused else contextlib.nullcontext():
        tx.update(None, tx.init(w), w, grad_fn=lambda w: w)
