"""Equinox, Haiku and plain pytrees: the loops that users write, as tested examples."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, same
from methods import FOUR
from training_steps import perturbation_of

import sam_optax
from sam_optax.training import TrainState

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
Y = jnp.sin(X[:, :1])


def tx_of(method: str) -> optax.GradientTransformationExtraArgs:
    return sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of(method))


def eqx_model() -> Any:
    return eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=jax.random.key(0))


def eqx_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jax.vmap(model)(x) - y))


@pytest.mark.parametrize("method", ["sam", "rsam"])
@pytest.mark.slow
def test_equinox(method):
    model, tx = eqx_model(), tx_of(method)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step_fn(model, opt_state, x, y):
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss_fn(params):
            return eqx_loss(eqx.combine(params, static), x, y)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params, grad_fn=eqx.filter_grad(loss_fn))
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(20):
        model, opt_state, loss = step_fn(model, opt_state, X, Y)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    # The same steps on the list of arrays that the model holds.
    params, static = eqx.partition(eqx_model(), eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(params)

    def plain_loss(leaves):
        return eqx_loss(eqx.combine(jax.tree.unflatten(structure, leaves), static), X, Y)

    state = TrainState.create(apply_fn=None, params=leaves, tx=tx_of(method))
    plain_step = jax.jit(lambda state: state.apply_loss(plain_loss)[0])
    for _ in range(20):
        state = plain_step(state)
    assert_close(eqx.filter(model, eqx.is_inexact_array), state.params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.fast("sam")
def test_equinox_frozen_leaves_are_none(method):
    """Only the last layer is trained: the rest is None in params and gradient, and stays."""
    model, tx = eqx_model(), tx_of(method)
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[-1], spec, replace=jax.tree.map(
        eqx.is_inexact_array, model.layers[-1]))  # fmt: skip
    params, static = eqx.partition(model, spec)
    assert params.layers[0].weight is None

    def loss_fn(params):
        return eqx_loss(eqx.combine(params, static), X, Y)

    updates, _ = tx.update(None, tx.init(params), params, grad_fn=eqx.filter_grad(loss_fn))
    new = eqx.apply_updates(model, updates)
    assert_same(new.layers[0].weight, model.layers[0].weight)
    assert not same(new.layers[-1].weight, model.layers[-1].weight)
    # Through TrainState too: None is no leaf.
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state, _ = state.apply_loss(loss_fn)
    assert_same(eqx.combine(state.params, static).layers[-1].weight, new.layers[-1].weight)


def test_an_unfiltered_equinox_module_is_refused():
    model, tx = eqx_model(), tx_of("sam")
    with pytest.raises(TypeError, match=r"activation.*[Ff]ilter"):
        tx.init(model)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    grads = eqx.filter_grad(eqx_loss)(model, X, Y)
    with pytest.raises(TypeError, match=r"activation.*[Ff]ilter"):
        tx.update(grads, state, model, grad_fn=lambda m: eqx.filter_grad(eqx_loss)(m, X, Y))
    plain = TrainState.create(apply_fn=None, params=model, tx=optax.identity())
    with pytest.raises(TypeError, match=r"activation.*filter it out.*eqx\.partition"):
        plain.apply_loss(lambda m: eqx_loss(m, X, Y))


@pytest.mark.parametrize("method", ["fsam"])
@pytest.mark.slow
def test_haiku(method):
    """BatchNorm state and dropout in Haiku: functional, so its statistics are an aux output."""

    def forward(x):
        x = jnp.tanh(hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), is_training=True))
        return hk.Linear(1)(hk.dropout(hk.next_rng_key(), 0.2, x))

    net, tx = hk.transform_with_state(forward), tx_of(method)
    params, net_state = jax.jit(net.init)(jax.random.key(0), X)

    @jax.jit
    def step_fn(params, net_state, opt_state, key):
        def loss_fn(params):
            out, new = net.apply(params, net_state, key, X)
            return jnp.mean(jnp.square(out - Y)), new

        grad_fn = jax.grad(loss_fn, has_aux=True)
        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(
            grads, opt_state, params, grad_fn=lambda params: grad_fn(params)[0]
        )
        return optax.apply_updates(params, updates), new, opt_state, loss

    opt_state, losses = tx.init(params), []
    for step in range(20):
        key = jax.random.fold_in(jax.random.key(1), step)
        params, net_state, opt_state, loss = step_fn(params, net_state, opt_state, key)
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    # hk.BatchNorm counts the passes that updated its statistics.
    counters = [v for name, v in net_state.items() if "mean_ema" in name]
    assert [int(c["counter"]) for c in counters] == [20]


@pytest.mark.slow
def test_haiku_random_start_with_the_statistics_of_its_start():
    """``value_and_grad_fn``, for a hand-written loop with a random start: two passes, not three."""
    net = hk.transform_with_state(lambda x: hk.Linear(1)(hk.BatchNorm(True, True, 0.9)(x, True)))
    params, net_state = jax.jit(net.init)(jax.random.key(0), X)
    tx = tx_of("rsam")

    def loss_fn(params):
        out, new = net.apply(params, net_state, None, X)
        return jnp.mean(jnp.square(out - Y)), (new, params)

    opt_state = tx.init(params)
    start = perturbation_of("rsam").start_fn(params, opt_state.perturbation_state)
    updates, new_state = tx.update(
        None, opt_state, params, value_and_grad_fn=jax.value_and_grad(loss_fn, has_aux=True)
    )
    new_state, (loss, (_, point)) = sam_optax.pop_first_pass(new_state)
    assert jax.tree.structure(new_state) == jax.tree.structure(opt_state)
    assert_same(point, start)
    assert_same(loss, loss_fn(start)[0])
    by_grad_fn, _ = tx.update(
        None, opt_state, params, grad_fn=lambda p: jax.grad(loss_fn, has_aux=True)(p)[0]
    )
    assert_same(updates, by_grad_fn)


def test_plain_pytrees_with_leaves_that_are_not_trained():
    """Integers and None pass through, a frozen subtree has update 0 and is seen."""
    params = {"w": jnp.array([3.0, 4.0]), "n": jnp.array([2, 7]), "hole": None, "b": jnp.array(5.0)}

    def loss_fn(params):
        return 0.5 * jnp.sum(params["w"] ** 2) + params["b"] * jnp.sum(params["w"])

    def grad_fn(params):
        return jax.grad(loss_fn, allow_int=True)(params)

    base = optax.partition(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        {"w": "train", "n": "freeze", "hole": None, "b": "freeze"},
    )
    perturbation = sam_optax.perturb_only(
        sam_optax.sam(rho=0.5), {"w": True, "n": False, "hole": None, "b": False}
    )
    tx = sam_optax.sharpness_aware(base, perturbation)
    updates, _ = tx.update(grad_fn(params), tx.init(params), params, grad_fn=grad_fn)
    # g = w + 5 = (8, 9), ε = .5 g/‖g‖, the sharp gradient is w + ε + 5.
    eps = 0.5 * np.array([8.0, 9.0]) / np.hypot(8.0, 9.0)
    np.testing.assert_allclose(updates["w"], -0.1 * (np.array([8.0, 9.0]) + eps), rtol=1e-6)
    assert updates["b"] == 0
    assert updates["hole"] is None
