"""Flax's overwrite-with-gradient collections: fp8 statistics, and a stand-in with known values."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OWG
from flax.training import train_state
from helpers import RuntimeCounted, assert_close, assert_same, same
from training_steps import perturbation_of

import sam_optax
from sam_optax.training import TrainState


def test_fp8_statistics_are_those_of_the_stock_class():
    model = nn.Dense(2, use_bias=False, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x, sgd = jnp.arange(1.0, 7.0).reshape(2, 3), optax.sgd(0.1)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    loss_fn = lambda variables: jnp.mean(jnp.square(model.apply(variables, x) - 1.0))
    tx = sam_optax.sharpness_aware(sgd, sam_optax.sam())
    ours = TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    ours, _ = jax.jit(lambda state: state.apply_loss(loss_fn))(ours)
    stock = train_state.TrainState.create(apply_fn=model.apply, params=variables, tx=sgd)
    stock = stock.apply_gradients(grads=jax.jit(jax.grad(loss_fn))(stock.params))
    assert_same(ours.params[OWG], stock.params[OWG])
    assert jax.tree.structure(ours.params) == jax.tree.structure(variables)
    assert not same(ours.params[OWG], variables[OWG])
    kernels = [state.params["params"]["kernel"] for state in (ours, stock)]
    assert float(jnp.max(jnp.abs(kernels[0] - kernels[1]))) > 1e-3


def stand_in(variables: Any) -> jax.Array:
    """½‖w‖² + s·(w₁ + w₂): the gradient of the statistic s tells at which w it was taken."""
    w, s = variables["params"], variables[OWG]
    return 0.5 * jnp.sum(w**2) + s * jnp.sum(w)


@pytest.mark.parametrize("how", ["apply_loss", "grads", "no grads"])
@pytest.mark.parametrize("method", ["sam", "rsam"])
def test_statistics_come_from_the_first_pass_and_are_not_perturbed(method, how):
    perturbation = perturbation_of(method)
    w, s = jnp.array([3.0, 4.0]), jnp.array(0.5)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), perturbation)
    state = TrainState.create(apply_fn=None, params={"params": w, OWG: s}, tx=tx)
    start = w
    if method == "rsam":
        start = perturbation.start_fn(w, perturbation.init(w))
    epsilon_point, _ = perturbation.perturb_fn(w, start + s, perturbation.init(w))
    counted = RuntimeCounted(stand_in)
    grad_fn = jax.grad(counted)
    if how == "apply_loss":
        new, value = state.apply_loss(counted)
        assert_close(value, stand_in({"params": start, OWG: s}), rtol=1e-6)
        first = start
    else:
        grads = grad_fn(state.params) if how == "grads" else None
        new = state.apply_gradients(grads=grads, grad_fn=grad_fn)
        first = w
    # s is the sum of w at the first pass; w moves against the gradient at w + ε, with s as it was.
    assert_close(new.params[OWG], jnp.sum(first), rtol=1e-6)
    assert_close(new.params["params"], w - 0.1 * (epsilon_point + s), rtol=1e-6)
    jax.effects_barrier()
    assert counted.evaluations == 2 + (method == "rsam" and how != "apply_loss")
