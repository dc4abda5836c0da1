"""TrainState: a step equals the hand-written one, and Flax's where nothing is to be added."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from helpers import assert_close, assert_same, same
from methods import FOUR, often
from training_steps import Batches, batch, create, loss, params, perturbation_of, sgd_with

import sam_optax
from sam_optax.training import TrainState

ON_BATCH = partial(loss, x=batch(0))
GRAD = jax.grad(ON_BATCH)


def hand_written(tx: optax.GradientTransformation, steps: int) -> Any:
    """Params, optimizer state and losses of a loop without a training state, op by op."""
    w, losses = params(), []
    state = tx.init(w)
    for step in range(steps):
        value_and_grad = jax.value_and_grad(partial(loss, x=batch(step)))
        value, grads = value_and_grad(w)
        updates, state = tx.update(grads, state, w, grad_fn=lambda w, f=value_and_grad: f(w)[1])
        w = optax.apply_updates(w, updates)
        losses.append(value)
    return w, state, losses


@pytest.mark.parametrize("method", often(FOUR, "fsam"))
def test_apply_loss_is_the_hand_written_step(method):
    tx = sgd_with(method)
    state = create(tx)
    losses = []
    for step in range(3):
        state, value = state.apply_loss(partial(loss, x=batch(step)))
        losses.append(value)
    w, opt_state, values = hand_written(tx, 3)
    assert_same((state.params, state.opt_state), (w, opt_state))
    assert state.step == 3
    # The loss of a random start is that of its start.
    assert same(losses, values) == (method != "rsam")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("method", often(FOUR, "fsam"))
def test_apply_gradients_is_the_hand_written_step(method, given):
    tx = sgd_with(method)
    state = create(tx)
    for step in range(3):
        grad_fn = jax.grad(partial(loss, x=batch(step)))
        grads = grad_fn(state.params) if given else None
        state = state.apply_gradients(grads=grads, grad_fn=grad_fn)
    w, opt_state, _ = hand_written(tx, 3)
    assert_same((state.params, state.opt_state), (w, opt_state))


def test_an_optimizer_without_ascent_ignores_the_gradient_function():
    tx = optax.adamw(0.1)
    stock = train_state.TrainState.create(apply_fn=loss, params=params(), tx=tx)
    stock = stock.apply_gradients(grads=GRAD(stock.params))
    for state in (
        create(tx).apply_gradients(grads=GRAD(params()), grad_fn=GRAD),
        create(tx).apply_gradients(grads=None, grad_fn=GRAD),
        create(tx).apply_gradients(grads=GRAD(params())),
        create(tx).apply_loss(ON_BATCH)[0],
    ):
        assert_same((state.params, state.opt_state), (stock.params, stock.opt_state))


@pytest.mark.parametrize("method", ["sam", "rsam"])
def test_subclass_fields_are_replaced_and_overrides_are_kept(method):
    class Averaged(Batches):
        average: Any

        def apply_gradients(self, *, grads, **kwargs):
            new = super().apply_gradients(grads=grads, **kwargs)
            return new.replace(average=jax.tree.map(lambda a, p: a + p, new.average, new.params))

    zeros = jax.tree.map(jnp.zeros_like, params())
    state = Averaged.create(
        apply_fn=loss, params=params(), tx=sgd_with(method), batch_stats=0.0, average=zeros
    )
    state, _ = state.apply_loss(ON_BATCH)
    assert_same(state.average, state.params)
    state = state.apply_gradients(grads=None, grad_fn=GRAD, batch_stats=jnp.ones(2))
    assert_same(state.batch_stats, jnp.ones(2))


@pytest.mark.parametrize("where", ["plain", "chained", "sam", "rsam"])
def test_the_loss_reaches_reduce_on_plateau(where):
    tx = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    if where != "plain":
        tx = sam_optax.sharpness_aware(tx, perturbation_of("rsam" if where == "rsam" else "sam"))
    if where == "chained":
        tx = optax.chain(optax.zero_nans(), tx)

    def best(state: TrainState) -> Any:
        leaves = jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "best_value"))
        return next(leaf.best_value for leaf in leaves if hasattr(leaf, "best_value"))

    state, value = create(tx).apply_loss(ON_BATCH)
    assert best(state) == value
    state, _ = state.apply_loss(ON_BATCH, value=jnp.float32(-7.0))
    assert best(state) == -7
    state = state.apply_gradients(grads=None, grad_fn=GRAD, extra_args={"value": -9.0})
    assert best(state) == -9


@pytest.mark.parametrize("method", ["sam", "rsam"])
def test_inside_other_transformations(method):
    def make(rho):
        return optax.chain(optax.zero_nans(), sgd_with(method), optax.scale(rho))

    bare, wrapped = create(sgd_with(method)), create(optax.inject_hyperparams(make)(rho=1.0))
    structure = jax.tree.structure(wrapped)
    for step in range(2):
        bare, value = bare.apply_loss(partial(loss, x=batch(step)))
        wrapped, wrapped_value = wrapped.apply_loss(partial(loss, x=batch(step)))
        assert_same(wrapped_value, value)
    assert_same(wrapped.params, bare.params)
    assert jax.tree.structure(wrapped.replace(step=0)) == structure


def test_a_clip_in_front_acts_on_the_ascent_gradient():
    # ε is rho times the clipped gradient, .1 (.6, .8); without the clip it would be (.3, .4).
    inner = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.as_perturbation(optax.scale(0.1)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), inner)
    state = TrainState.create(apply_fn=None, params=jnp.array([3.0, 4.0]), tx=tx)
    state, _ = state.apply_loss(lambda w: 0.5 * jnp.sum(w**2))
    np.testing.assert_allclose(state.params, [-0.06, -0.08], rtol=1e-5)


def test_params_that_are_a_pair_are_no_slip():
    """As `value_and_grad` returns one."""
    pair = (jnp.ones(2), jnp.ones(3))
    quadratic = lambda p: jnp.sum(p[0] ** 2) + jnp.sum(p[1] ** 2)
    state = TrainState.create(apply_fn=None, params=pair, tx=sgd_with("sam"))
    by_grads = state.apply_gradients(grads=jax.grad(quadratic)(pair), grad_fn=jax.grad(quadratic))
    by_loss, _ = state.apply_loss(quadratic)
    assert_close(by_grads.params, by_loss.params, rtol=1e-6)
