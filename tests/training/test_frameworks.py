"""Equinox modules and plain pytrees with leaves that are not trained."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_steps import sgd_with

import sam_optax


def test_an_unfiltered_equinox_module_is_refused():
    model, tx = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0)), sgd_with("sam")
    grad_fn = eqx.filter_grad(lambda model: jnp.sum(model(jnp.ones(3))))
    with pytest.raises(TypeError, match=r"activation.*[Ff]ilter"):
        tx.init(model)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    with pytest.raises(TypeError, match=r"activation.*[Ff]ilter"):
        tx.update(grad_fn(model), state, model, grad_fn=grad_fn)


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
