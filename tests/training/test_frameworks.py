"""Equinox modules and plain pytrees with leaves that are not trained."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, same
from training_steps import sgd_with

import sam_optax
from sam_optax.training import TrainState

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
Y = jnp.sin(X[:, :1])


def eqx_model() -> Any:
    return eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=jax.random.key(0))


def eqx_loss(model: Any) -> jax.Array:
    return jnp.mean(jnp.square(jax.vmap(model)(X) - Y))


def test_equinox_frozen_leaves_are_none():
    """Only the last layer is trained: the rest is None in params and gradient, and stays."""
    model, tx = eqx_model(), sgd_with("fsam")
    trained = jax.tree.map(eqx.is_inexact_array, model.layers[-1])
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[-1], spec, replace=trained)
    params, static = eqx.partition(model, spec)
    assert params.layers[0].weight is None

    def loss_fn(params):
        return eqx_loss(eqx.combine(params, static))

    state, _ = TrainState.create(apply_fn=None, params=params, tx=tx).apply_loss(loss_fn)
    assert_same(eqx.combine(state.params, static).layers[0].weight, model.layers[0].weight)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=eqx.filter_grad(loss_fn))
    new = eqx.apply_updates(params, updates)
    assert_same(new, state.params)
    assert not same(new, params)


def test_an_unfiltered_equinox_module_is_refused():
    model, tx = eqx_model(), sgd_with("sam")
    with pytest.raises(TypeError, match=r"activation.*[Ff]ilter"):
        tx.init(model)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    grads = eqx.filter_grad(eqx_loss)(model)
    with pytest.raises(TypeError, match=r"activation.*[Ff]ilter"):
        tx.update(grads, state, model, grad_fn=eqx.filter_grad(eqx_loss))
    plain = TrainState.create(apply_fn=None, params=model, tx=optax.identity())
    with pytest.raises(TypeError, match=r"activation.*filter it out.*eqx\.partition"):
        plain.apply_loss(eqx_loss)


def test_plain_pytrees_with_leaves_that_are_not_trained():
    """Integers and None pass through, a frozen subtree has update 0 and is seen (case 28)."""
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
