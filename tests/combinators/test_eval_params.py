"""`eval_params` of optimizers that hold `alternating` in parts, and of what NNX hands over."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
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
TX = alternating(optax.sgd(0.125), sam_optax.sam(0.1))
FROZEN = {"frozen": optax.set_to_zero()}


def call(tx, params, state):
    grads = jax.tree.map(lambda p: p if jnp.issubdtype(p.dtype, jnp.floating) else 0 * p, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


OPTIMIZERS = {
    # name -> optimizer, leaves that alternating moves
    "partition": (optax.partition({"first": TX, "second": TX, **FROZEN}, LABELS), ("a", "b")),
    "partition in a chain": (
        optax.chain(
            optax.identity(),
            optax.partition({"first": TX, "second": optax.sgd(0.1), **FROZEN}, LABELS),
        ),
        ("a",),
    ),
}


@pytest.mark.parametrize(("tx", "moved"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parts_of_the_params(tx, moved):
    """After one call w is where it was, in the leaves that are perturbed; after two, w is it."""
    params, state = call(tx, PARAMS, tx.init(PARAMS))
    for name in moved:
        assert not same(params[name]["kernel"], PARAMS[name]["kernel"])
        assert_same(eval_params(params, state)[name]["kernel"], PARAMS[name]["kernel"])
    result = eval_params(params, state)
    assert_same((result["b"]["bias"], result["n"]), (PARAMS["b"]["bias"], PARAMS["n"]))
    if "b" not in moved:
        # Another optimizer's leaf is where that has led it.
        assert_same(result["b"], params["b"])
    after, state = call(tx, params, state)
    for name in moved:
        assert_same(eval_params(after, state)[name], after[name])


W = {"w": jnp.array([10.0, 3.0])}
STATE = TX.init(W)


@pytest.mark.parametrize(
    ("params", "state", "match"),
    [
        (W, optax.sgd(0.1, momentum=0.9).init(W), r"contains alternating.*got tuple.*use these"),
        (W, (STATE, STATE), r"two states of alternating.*'w'.*pass the state of one optimizer"),
        ({"v": W["w"]}, STATE, r"state holds \['w'\].*nnx\.state\(model, wrt\)"),
        (W["w"], STATE, "which params of structure"),
    ],
)
def test_other_params_and_states_are_refused(params, state, match):
    """Case 54 among them."""
    with pytest.raises(ValueError, match=match):
        eval_params(params, state)


def test_what_nnx_hands_over():
    nnx = pytest.importorskip("flax.nnx")
    labels = lambda tree: jax.tree.map(lambda x: "kernel" if x.ndim > 1 else "bias", tree)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = optax.partition({"kernel": TX, "bias": TX}, labels)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kernel = jnp.array(model.kernel[...])
    x = jnp.ones((1, 2))

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(jnp.square(model(x) - 1)))(model))

    step(model, optimizer)
    w = eval_params(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert jax.tree.structure(w) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert_same((w.kernel[...], w.bias[...]), (kernel, jnp.zeros(3)))
    # The model itself is as it was, and takes the result.
    assert not same(model.kernel[...], kernel)
    nnx.update(model, w)
    assert_same(model.kernel[...], kernel)
    with pytest.raises(ValueError, match=r"nnx\.state\(model, wrt\)"):
        eval_params(model, optimizer.opt_state)


ADAM = alternating(optax.adam(1.0), sam_optax.sam(1.0))
HALF = optax.scale(0.5)


@pytest.mark.parametrize(
    ("tx", "found"),
    [
        (optax.chain(ADAM, optax.transforms.freeze({"w": True})), "followed by another"),
        (optax.chain(optax.clip(1.0), optax.chain(ADAM, HALF)), "followed by another"),
        (optax.chain(optax.chain(optax.clip(1.0), ADAM), HALF), "followed by another"),
        (optax.chain(optax.apply_if_finite(ADAM, 3), HALF), "followed by another"),
        (optax.chain(optax.masked(ADAM, {"w": True}), HALF), "followed by another"),
        (optax.chain(optax.MultiSteps(ADAM, 1).gradient_transformation(), HALF), "followed by"),
        (optax.contrib.schedule_free(ADAM, 0.1), "ScheduleFreeState"),
        (optax.contrib.mechanize(ADAM), "MechanicState"),
    ],
)
def test_what_changes_the_updates_behind_it_is_refused(tx, found):
    """Case 65: a leaf frozen at 10 would be returned as trained."""
    params, state = call(tx, W, tx.init(W))
    with pytest.raises(ValueError, match=rf"{found}.*alternating\(optax\.chain\(base_tx"):
        eval_params(params, state)


def test_lookahead_is_refused():
    """Case 64."""
    tx = optax.lookahead(alternating(optax.sgd(0.0), sam_optax.sam()), 3, 0.5)
    params = optax.LookaheadParams.init_synced(W)
    with pytest.raises(ValueError, match=r"LookaheadState.*optax\.lookahead cannot be used"):
        eval_params(params.fast, tx.init(params))
    with pytest.raises(ValueError, match="LookaheadState"):
        next(sam_optax.repeat_batches([1.0], lambda: tx.init(params)))


def test_what_stands_before_it_or_acts_on_other_leaves_is_not_refused():
    tx = optax.chain(optax.clip(1.0), optax.chain(optax.apply_if_finite(ADAM, 3)))
    assert_same(eval_params(*call(tx, W, tx.init(W))), W)
    params = {**W, "b": jnp.array(1.0)}
    only = lambda tx, name: optax.masked(tx, {key: key == name for key in params})
    tx = optax.chain(only(ADAM, "w"), only(optax.sgd(0.5), "b"))
    moved, state = call(tx, params, tx.init(params))
    assert_same(eval_params(moved, state), {"w": params["w"], "b": moved["b"]})
