"""`eval_params` of optimizers that hold `alternating` in parts, and of what NNX hands over."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, same

import sam_optax
from sam_optax import alternating, eval_params

if not hasattr(optax, "partition"):
    pytest.skip("optax.partition is newer than this optax", allow_module_level=True)

PARAMS = {
    "a": {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.array([1.0])},
    "b": {"kernel": jnp.array([-2.0, 0.5]), "bias": jnp.array([2.0])},
    "n": jnp.arange(3),
    "hole": None,
}
LABELS = {
    "a": {"kernel": "first", "bias": "first"},
    "b": {"kernel": "second", "bias": "frozen"},
    "n": "frozen",
    "hole": None,
}
IS_FIRST = jax.tree.map(lambda label: label == "first", LABELS)


def sam_alternating(rho=0.1):
    return alternating(optax.sgd(0.125), sam_optax.sam(rho))


def grads_of(params):
    return jax.tree.map(lambda p: p if jnp.issubdtype(p.dtype, jnp.floating) else 0 * p, params)


def call(tx, params, state):
    updates, state = tx.update(grads_of(params), state, params)
    return optax.apply_updates(params, updates), state


def partitioned():
    transforms = {"first": sam_alternating(), "second": sam_alternating(0.5)}
    return optax.partition({**transforms, "frozen": optax.set_to_zero()}, LABELS)


OPTIMIZERS = {
    # name -> optimizer, leaves that alternating moves
    "masked": (
        optax.chain(
            optax.masked(sam_alternating(), IS_FIRST),
            optax.masked(optax.set_to_zero(), jax.tree.map(lambda first: not first, IS_FIRST)),
        ),
        ("a",),
    ),
    "partition": (partitioned(), ("a", "b")),
    "multi_transform in a chain": (
        optax.chain(
            optax.identity(),
            optax.multi_transform(
                {"first": sam_alternating(), "second": optax.sgd(0.1), "frozen": optax.sgd(0.0)},
                LABELS,
            ),
        ),
        ("a",),
    ),
}


@pytest.mark.parametrize(("tx", "moved"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_parts_of_the_params(tx, moved, jitted):
    """After one call w is where it was, in the leaves that are perturbed; after two, w is it."""
    init, step = tx.init, lambda params, state: call(tx, params, state)
    if jitted:
        init, step = jax.jit(init), jax.jit(step)
    params, state = step(PARAMS, init(PARAMS))
    for name in moved:
        assert not same(params[name]["kernel"], PARAMS[name]["kernel"])
        assert_same(eval_params(params, state)[name]["kernel"], PARAMS[name]["kernel"])
    result = eval_params(params, state)
    assert_same(result["b"]["bias"], PARAMS["b"]["bias"])
    assert_same(result["n"], PARAMS["n"])
    if "b" not in moved:
        # Another optimizer's leaf is where that has led it.
        assert_same(result["b"], params["b"])
    after, state = step(params, state)
    for name in moved:
        assert_same(eval_params(after, state)[name], after[name])


def test_a_step_of_each_label_is_that_of_its_leaves_alone():
    """Radii and norms of one label: ε = ρ g/‖g‖ over its leaves, by hand."""
    tx = partitioned()
    params, _ = call(tx, PARAMS, tx.init(PARAMS))
    first = np.array([3.0, 4.0, 1.0])
    eps = 0.1 * first / np.linalg.norm(first)
    got = np.concatenate([params["a"]["kernel"], params["a"]["bias"]])
    np.testing.assert_allclose(got, first + eps, rtol=1e-6)
    second = np.array([-2.0, 0.5])
    eps = 0.5 * second / np.linalg.norm(second)
    np.testing.assert_allclose(params["b"]["kernel"], second + eps, rtol=1e-6)


def test_other_params_and_states_are_refused():
    tx = sam_alternating()
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"contains alternating.*got tuple.*use these"):
        eval_params(params, optax.sgd(0.1, momentum=0.9).init(params))
    with pytest.raises(ValueError, match=r"two states of alternating.*'w'.*one optimizer"):
        eval_params(params, (state, state))
    with pytest.raises(ValueError, match=r"state holds \['w'\].*nnx\.state\(model, wrt\)"):
        eval_params({"v": jnp.ones(2)}, state)
    with pytest.raises(ValueError, match="which params of structure"):
        eval_params(jnp.ones(2), state)


@pytest.mark.parametrize("kind", ["whole", "masked", "partition"])
def test_what_nnx_hands_over(kind):
    nnx = pytest.importorskip("flax.nnx")

    def is_kernel(tree):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)

    def labels(tree):
        return jax.tree.map(lambda kernel: "kernel" if kernel else "bias", is_kernel(tree))

    tx = {
        "whole": sam_alternating(),
        "masked": optax.masked(sam_alternating(), is_kernel),
        "partition": optax.partition(
            {"kernel": sam_alternating(), "bias": sam_alternating(1)}, labels
        ),
    }[kind]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kernel = jnp.array(model.kernel[...])
    x = jnp.ones((1, 2))

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.sum(jnp.square(model(x) - 1)))(model)
        optimizer.update(model, grads)

    step(model, optimizer)
    assert not same(model.kernel[...], kernel)
    w = eval_params(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert jax.tree.structure(w) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert_same(w.kernel[...], kernel)
    # The model itself is as it was, and takes the result.
    assert not same(model.kernel[...], kernel)
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    assert_same(nnx.merge(graphdef, w, rest).kernel[...], kernel)
    if kind != "masked":
        assert_same(w.bias[...], jnp.zeros(3))
    step(model, optimizer)
    nnx.update(model, eval_params(nnx.state(model, nnx.Param), optimizer.opt_state))
    assert not same(model.kernel[...], kernel)
    with pytest.raises(ValueError, match=r"nnx\.state\(model, wrt\)"):
        eval_params(model, optimizer.opt_state)


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda tx: optax.chain(tx, optax.transforms.freeze({"w": True})), "followed by another"),
        (lambda tx: optax.chain(tx, optax.scale(0.5)), "followed by another"),
        (lambda tx: optax.chain(optax.clip(1.0), optax.chain(tx, optax.scale(0.5))), "followed"),
        (lambda tx: optax.chain(optax.chain(optax.clip(1.0), tx), optax.scale(0.5)), "followed"),
        (lambda tx: optax.contrib.schedule_free(tx, 0.1), "ScheduleFreeState"),
        (lambda tx: optax.contrib.mechanize(tx), "MechanicState"),
    ],
)
def test_what_changes_the_updates_behind_it_is_refused(wrap, found, calls):
    """A leaf frozen at 10 would be returned as trained."""
    params = {"w": jnp.array([10.0, 3.0])}
    tx = wrap(alternating(optax.adam(1.0), sam_optax.sam(1.0)))
    state = tx.init(params)
    for _ in range(calls):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
    with pytest.raises(ValueError, match=rf"{found}.*alternating\(optax\.chain\(base_tx"):
        eval_params(params, state)


def test_lookahead_is_refused():
    tx = optax.lookahead(alternating(optax.sgd(0.0), sam_optax.sam()), 3, 0.5)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"LookaheadState.*optax\.lookahead cannot be used"):
        eval_params(params.fast, tx.init(params))
    with pytest.raises(ValueError, match="LookaheadState"):
        next(sam_optax.repeat_batches([1.0], lambda: tx.init(params)))


def test_what_stands_before_it_is_not():
    params = {"w": jnp.array([10.0, 3.0])}
    tx = optax.chain(optax.clip(1.0), alternating(optax.adam(1.0), sam_optax.sam(1.0)))
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    assert_same(eval_params(optax.apply_updates(params, updates), state), params)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.masked(tx, {"w": True}),
        lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    ],
)
def test_what_follows_a_wrapper_around_it_is_refused(wrap):
    params = {"w": jnp.array([10.0, 3.0])}
    inner = wrap(alternating(optax.sgd(1.0), sam_optax.sam(1.0)))
    for tx in (optax.chain(inner, optax.scale(2.0)), optax.chain(inner)):
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        if len(state) == 2:
            with pytest.raises(ValueError, match="is followed by another transformation"):
                eval_params(params, state)
        else:
            eval_params(params, state)


def test_an_optimizer_of_other_leaves_may_follow():
    params = {"w": jnp.array([10.0, 3.0]), "b": jnp.array(1.0)}
    only = lambda tx, name: optax.masked(tx, {key: key == name for key in params})
    tx = optax.chain(
        only(alternating(optax.sgd(1.0), sam_optax.sam(1.0)), "w"), only(optax.sgd(0.5), "b")
    )
    updates, state = tx.update(params, tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    assert_same(eval_params(moved, state), {"w": params["w"], "b": moved["b"]})
