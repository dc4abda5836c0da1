"""TrainState: a step equals the hand-written one, and Flax's where nothing is to be added."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.training import train_state
from helpers import assert_close, assert_same, same
from methods import FOUR
from training_steps import Batches, batch, create, loss, params, perturbation_of

import sam_optax
from sam_optax.training import TrainState


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


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.fast("sam", "fsam")
def test_apply_loss_is_the_hand_written_step(method):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of(method))
    state = create(tx)
    losses = []
    for step in range(3):
        state, value = state.apply_loss(partial(loss, x=batch(step)))
        losses.append(value)
    w, opt_state, values = hand_written(tx, 3)
    assert_same(state.params, w)
    assert_same(state.opt_state, opt_state)
    assert state.step == 3
    # The loss of a random start is that of its start.
    assert same(losses, values) == (method != "rsam")


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.slow
def test_jitted_apply_loss_is_the_eager_one(method):
    tx = sam_optax.sharpness_aware(
        optax.adamw(0.1), perturbation_of(method), when=sam_optax.every(2)
    )
    step_fn = jax.jit(lambda s, x: s.apply_loss(lambda w: (loss(w, x), jnp.sum(x)), has_aux=True))
    eager, jitted = create(tx), create(tx)
    for step in range(4):
        x = batch(step)
        eager, (value, aux) = eager.apply_loss(
            lambda w, x=x: (loss(w, x), jnp.sum(x)), has_aux=True
        )
        jitted, (jitted_value, jitted_aux) = step_fn(jitted, x)
        assert_close((jitted_value, jitted_aux), (value, aux), rtol=1e-5)
    assert_close(jitted.params, eager.params, rtol=1e-4)


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.fast("*fsam*")
def test_apply_gradients_is_the_hand_written_step(method, given):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), perturbation_of(method))
    state = create(tx)
    for step in range(3):
        grad_fn = jax.grad(partial(loss, x=batch(step)))
        state = state.apply_gradients(
            grads=grad_fn(state.params) if given else None, grad_fn=grad_fn
        )
    w, opt_state, _ = hand_written(tx, 3)
    assert_same(state.params, w)
    assert_same(state.opt_state, opt_state)


def test_the_stock_class_cannot_pass_the_gradient_function():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())
    grad_fn = jax.grad(partial(loss, x=batch(0)))
    stock = train_state.TrainState.create(apply_fn=loss, params=params(), tx=tx)
    with pytest.raises(ValueError, match="grad_fn"):
        stock.apply_gradients(grads=grad_fn(stock.params), grad_fn=grad_fn)
    ours = create(tx).apply_gradients(grads=grad_fn(stock.params), grad_fn=grad_fn)
    plain = create(optax.sgd(0.1)).apply_gradients(grads=grad_fn(stock.params))
    assert not same(ours.params, plain.params)


@pytest.mark.parametrize(
    "tx", [optax.adamw(0.1), optax.lbfgs(0.1, linesearch=None)], ids=["adamw", "lbfgs"]
)
@pytest.mark.fast("adamw")
def test_an_optimizer_without_ascent_ignores_the_gradient_function(tx):
    grad_fn = jax.grad(partial(loss, x=batch(0)))
    stock = train_state.TrainState.create(apply_fn=loss, params=params(), tx=tx)
    stock = stock.apply_gradients(grads=grad_fn(stock.params))
    for state in (
        create(tx).apply_gradients(grads=grad_fn(params()), grad_fn=grad_fn),
        create(tx).apply_gradients(grads=None, grad_fn=grad_fn),
        create(tx).apply_gradients(grads=grad_fn(params())),
        create(tx).apply_loss(partial(loss, x=batch(0)))[0],
    ):
        assert_same(state.params, stock.params)
        assert_same(state.opt_state, stock.opt_state)


def test_subclass_fields_are_replaced_and_overrides_are_kept():
    class Averaged(Batches):
        average: Any

        def apply_gradients(self, *, grads, **kwargs):
            new = super().apply_gradients(grads=grads, **kwargs)
            return new.replace(average=jax.tree.map(lambda a, p: a + p, new.average, new.params))

    for method in FOUR:
        state = Averaged.create(
            apply_fn=loss,
            params=params(),
            tx=sam_optax.sharpness_aware(optax.sgd(0.1), perturbation_of(method)),
            batch_stats=jnp.zeros(2),
            average=jax.tree.map(jnp.zeros_like, params()),
        )
        state, _ = state.apply_loss(partial(loss, x=batch(0)))
        assert_same(state.average, state.params)
        state = state.apply_gradients(
            grads=None, grad_fn=jax.grad(partial(loss, x=batch(1))), batch_stats=jnp.ones(2)
        )
        assert_same(state.batch_stats, jnp.ones(2))


@pytest.mark.parametrize("where", ["plain", "chained", "sam", "rsam"])
@pytest.mark.slow
def test_the_loss_reaches_reduce_on_plateau(where):
    tx = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    if where != "plain":
        tx = sam_optax.sharpness_aware(tx, perturbation_of("rsam" if where == "rsam" else "sam"))
    if where == "chained":
        tx = optax.chain(optax.zero_nans(), tx)

    def plateau(state: TrainState) -> Any:
        leaves = jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "best_value"))
        return next(leaf for leaf in leaves if hasattr(leaf, "best_value"))

    state = create(tx)
    for _ in range(3):
        state, value = state.apply_loss(partial(loss, x=batch(0)))
    # The learning rate is 0, so the loss at the params stays; that of a random start jumps.
    if where == "rsam":
        assert plateau(state).best_value < 1e9  # not its initial value
    else:
        assert plateau(state).best_value == value
        assert plateau(state).scale == 0.25  # halved at the second step and at the third
    state, _ = state.apply_loss(partial(loss, x=batch(0)), value=jnp.float32(-7.0))
    assert plateau(state).best_value == -7
    state = state.apply_gradients(
        grads=None, grad_fn=jax.grad(partial(loss, x=batch(0))), extra_args={"value": -9.0}
    )
    assert plateau(state).best_value == -9


@pytest.mark.parametrize("method", ["sam", "rsam"])
def test_inside_other_transformations(method):
    def make(rho):
        inner = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of(method))
        return optax.chain(optax.zero_nans(), inner, optax.scale(rho))

    tx = optax.inject_hyperparams(make)(rho=1.0)
    bare = create(sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of(method)))
    wrapped = create(tx)
    structure = jax.tree.structure(wrapped)
    for step in range(2):
        bare, value = bare.apply_loss(partial(loss, x=batch(step)))
        wrapped, wrapped_value = wrapped.apply_loss(partial(loss, x=batch(step)))
        assert_same(wrapped_value, value)
    assert_same(wrapped.params, bare.params)
    assert jax.tree.structure(wrapped.replace(step=0)) == structure


def test_a_clip_in_front_acts_on_the_ascent_gradient():
    # ε is rho times the clipped gradient, .1 (.6, .8); without the clip it would be (.3, .4).
    perturbation = sam_optax.as_perturbation(optax.scale(0.1))
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), sam_optax.sharpness_aware(optax.sgd(1.0), perturbation)
    )
    state = TrainState.create(apply_fn=None, params=jnp.array([3.0, 4.0]), tx=tx)
    state, _ = state.apply_loss(lambda w: 0.5 * jnp.sum(w**2))
    np.testing.assert_allclose(state.params, [-0.06, -0.08], rtol=1e-5)


def test_frozen_dict_params_and_linen():
    model = nn.Dense(2)
    x = batch(0)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.asam())
    states = [
        TrainState.create(apply_fn=model.apply, params=p, tx=tx)
        for p in (variables["params"], freeze(variables["params"]))
    ]
    results = [
        s.apply_loss(lambda w: jnp.mean(jnp.square(model.apply({"params": w}, x))))[0]
        for s in states
    ]
    assert jax.tree.structure(results[1].params) == jax.tree.structure(states[1].params)
    assert_same(jax.tree.leaves(results[1].params), jax.tree.leaves(results[0].params))


def test_errors_say_what_to_do():
    state = create(sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam()))
    with pytest.raises(ValueError, match="grads or grad_fn"):
        state.apply_gradients(grads=None)
    with pytest.raises(ValueError, match="grad_fn"):
        state.apply_gradients(grads=state.params)
    batches = Batches.create(apply_fn=loss, params=params(), tx=state.tx, batch_stats=0.0)
    with pytest.raises(TypeError, match=r"batch_stats.*state\.replace\(batch_stats="):
        batches.apply_loss(partial(loss, x=batch(0)), batch_stats=1.0)
    for bad in (jnp.array([1, 2]), jnp.array([True]), jax.random.key(0), jnp.tanh):
        mixed = create(optax.identity()).replace(params={"w": jnp.ones(2), "n": bad})
        with pytest.raises(TypeError, match=r"\['n'\].*filter it out"):
            mixed.apply_loss(lambda w: jnp.sum(w["w"]))
    for method in ("sam", "rsam"):
        tx = optax.apply_if_finite(
            sam_optax.sharpness_aware(optax.sgd(0.1), perturbation_of(method)),
            max_consecutive_errors=1,
        )
        if method == "sam":
            assert np.isfinite(create(tx).apply_loss(partial(loss, x=batch(0)))[1])
            continue
        with pytest.raises(TypeError, match="skip_nonfinite=True"):
            create(tx).apply_loss(partial(loss, x=batch(0)))
