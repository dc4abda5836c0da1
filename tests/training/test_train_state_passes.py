"""What a step of TrainState evaluates, how often, and what it keeps of which pass."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, RuntimeCounted, assert_close, assert_same, same
from methods import FOUR
from training_steps import Batches, batch, create, loss, params, perturbation_of

import sam_optax
from sam_optax.training import TrainState


def transformation(method: str, **kwargs: Any) -> optax.GradientTransformation:
    return sam_optax.sharpness_aware(
        optax.sgd(0.1, momentum=0.9), perturbation_of(method), **kwargs
    )


def count(tx: optax.GradientTransformation, steps: int, step_fn: Any = None) -> tuple[int, int]:
    """Evaluations of the compiled program, and traces of the loss, in ``steps`` steps."""
    counted = RuntimeCounted(loss)

    def whole(state: TrainState, x: jax.Array) -> TrainState:
        return state.apply_loss(lambda w: counted(w, x))[0]

    def from_gradients(state: TrainState, x: jax.Array) -> TrainState:
        grad_fn = jax.grad(lambda w: counted(w, x))
        return state.apply_gradients(grads=None, grad_fn=grad_fn)

    step_fn = jax.jit(from_gradients if step_fn == "apply_gradients" else whole)
    state = create(tx).replace(step=jnp.array(0))
    for step in range(steps):
        state = step_fn(state, batch(step))
    jax.block_until_ready(state)
    jax.effects_barrier()
    return counted.evaluations, counted.calls


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.fast("sam*")
def test_two_gradients_and_one_trace(method):
    assert count(transformation(method), 3) == (6, 1)


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.fast("sam")
def test_one_gradient_where_the_ascent_is_skipped(method):
    # Perturbs at steps 0 and 3 of 0, 1, 2, 3.
    assert count(transformation(method, when=sam_optax.every(3)), 4) == (6, 1)


@pytest.mark.parametrize("method", ["sam", "rsam"])
def test_further_ascent_steps_are_a_gradient_each(method):
    assert count(transformation(method, ascent_steps=3), 2) == (8, 1)


def test_a_plain_optimizer_is_one_gradient():
    assert count(optax.sgd(0.1), 3) == (3, 1)


@pytest.mark.parametrize("method", ["sam", "rsam"])
@pytest.mark.fast("sam")
def test_behind_another_transformation_it_is_no_more(method):
    tx = optax.chain(optax.zero_nans(), transformation(method))
    assert count(tx, 3) == (6, 1)
    # What is in front of a random start looks at a gradient that the random start does not use.
    assert count(tx, 3, "apply_gradients") == (9 if method == "rsam" else 6, 1)


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.fast("sam")
def test_apply_gradients_evaluates_as_often(method):
    assert count(transformation(method), 3, "apply_gradients") == (6, 1)


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.fast("rsam")
def test_the_eager_step_evaluates_as_often(method):
    counted = Counted(loss)
    create(transformation(method)).apply_loss(lambda w: counted(w, batch(0)))
    assert counted.calls == 2


@pytest.mark.parametrize("when", [None, sam_optax.after(1)])
@pytest.mark.parametrize("method", FOUR)
@pytest.mark.fast("sam-None")
def test_loss_and_aux_are_those_of_the_first_pass(method, when):
    """The point of the first pass itself is the auxiliary output: nothing else can be mistaken."""
    state = create(transformation(method, when=when))

    @jax.jit
    def step_fn(state: TrainState, x: jax.Array) -> Any:
        return state.apply_loss(lambda w: (loss(w, x), w), has_aux=True)

    for step in range(2):
        start = state.params
        perturbs = when is None or bool(when(jnp.array(step)))
        if method == "rsam" and perturbs:
            perturbation = perturbation_of("rsam")
            start = perturbation.start_fn(start, state.opt_state.perturbation_state)
            assert not same(start, state.params)
        state, (value, point) = step_fn(state, batch(step))
        assert_close(point, start, rtol=1e-6)
        assert_close(value, loss(start, batch(step)), rtol=1e-5)


@pytest.mark.parametrize("method", ["sam", "rsam"])
def test_a_skipped_step_reports_its_loss_and_changes_nothing(method):
    tx = transformation(method, skip_nonfinite=True)
    state = create(tx)
    new, value = state.apply_loss(lambda w: loss(w, batch(0)) * jnp.nan)
    assert np.isnan(value)
    assert_same(new.params, state.params)
    assert new.opt_state.skipped == 1
    assert jax.tree.structure(new) == jax.tree.structure(state.replace(step=1))


class Normalized(nn.Module):
    """BatchNorm of the input, so that its mean is the batch's in both passes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))


def batch_norm_state(tx: optax.GradientTransformation) -> tuple[Batches, jax.Array]:
    model, x = Normalized(), 2.35 + jnp.array([[-1.0], [1.0], [0.0], [0.0]])
    variables = jax.jit(model.init)(jax.random.key(0), x)
    return Batches.create(apply_fn=model.apply, tx=tx, **variables), x


def batch_norm_loss(state: Batches, x: jax.Array, stats: Any, params: Any) -> Any:
    variables = {"params": params, "batch_stats": stats}
    y, new = state.apply_fn(variables, x, mutable=["batch_stats"])
    return jnp.mean(jnp.square(y - x)), new["batch_stats"]


@pytest.mark.parametrize("method", ["sam", "rsam"])
@pytest.mark.fast("sam")
def test_batch_norm_statistics_are_updated_once(method):
    state, x = batch_norm_state(transformation(method))

    @jax.jit
    def step_fn(state: Batches) -> Batches:
        loss_fn = partial(batch_norm_loss, state, x, state.batch_stats)
        state, (_, stats) = state.apply_loss(loss_fn, has_aux=True)
        return state.replace(batch_stats=stats)

    stats = step_fn(state).batch_stats
    np.testing.assert_allclose(stats["BatchNorm_0"]["mean"], [0.235], rtol=1e-6)
    # A loop that lets both passes update them gets the mean that other implementations report.
    for _ in range(2):
        _, state_stats = batch_norm_loss(state, x, state.batch_stats, state.params)
        state = state.replace(batch_stats=state_stats)
    np.testing.assert_allclose(state.batch_stats["BatchNorm_0"]["mean"], [0.4465], rtol=1e-6)


@pytest.mark.parametrize("same_key", [True, False])
@pytest.mark.parametrize("method", FOUR)
@pytest.mark.slow
def test_both_passes_have_the_same_dropout_mask(method, same_key):
    """The loss is linear, Σ mask·w, so its sharp gradient is the clean one: the mask."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    dropout = nn.Dropout(0.5, deterministic=False)

    def loss_fn(w: jax.Array) -> jax.Array:
        key = jax.random.key(5) if same_key else next(keys)
        return jnp.sum(dropout.apply({}, w, rngs={"dropout": key}))

    w = jnp.arange(1.0, 33.0)
    clean = jax.grad(loss_fn)(w)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), perturbation_of(method))
    sharp, _ = tx.update(None, tx.init(w), w, grad_fn=jax.grad(loss_fn))
    state = TrainState.create(apply_fn=None, params=w, tx=tx)
    state, _ = state.apply_loss(loss_fn)
    assert same(-sharp, clean) == same_key
    assert same(state.params, w - clean) == same_key


def test_the_float32_point_of_low_precision_params():
    w = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params())
    for method in ("sam", "rsam"):
        tx = transformation(method, perturb_dtype=jnp.float32)
        state = TrainState.create(apply_fn=None, params=w, tx=tx)
        state, value = jax.jit(lambda s: s.apply_loss(lambda w: loss(w, batch(0))))(state)
        assert state.params["kernel"].dtype == jnp.bfloat16
        assert np.isfinite(value)
