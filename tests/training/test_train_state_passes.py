"""What a step of TrainState evaluates, how often, and what it keeps of which pass."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, RuntimeCounted, assert_close, assert_same, same
from methods import FOUR, often
from training_steps import Batches, batch, create, loss, perturbation_of, sgd_with

import sam_optax
from sam_optax.training import TrainState


def count(tx: optax.GradientTransformation, steps: int, step_fn: str = "apply_loss") -> Any:
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


@pytest.mark.parametrize(
    ("options", "steps", "evaluations"),
    [
        ({}, 3, 6),
        ({"when": sam_optax.every(3)}, 4, 6),  # perturbs at steps 0 and 3 of 0, 1, 2, 3
        ({"ascent_steps": 3}, 2, 8),
    ],
    ids=["plain", "every", "ascent_steps"],
)
@pytest.mark.parametrize("method", often(FOUR, "sam", "rsam"))
def test_two_gradients_and_one_trace(method, options, steps, evaluations):
    assert count(sgd_with(method, **options), steps) == (evaluations, 1)


def test_a_plain_optimizer_is_one_gradient():
    assert count(optax.sgd(0.1), 3) == (3, 1)


@pytest.mark.parametrize("method", ["sam", "rsam"])
def test_behind_another_transformation_it_is_no_more(method):
    tx = optax.chain(optax.zero_nans(), sgd_with(method))
    assert count(tx, 3) == (6, 1)
    # What is in front of a random start looks at a gradient that the random start does not use.
    assert count(tx, 3, "apply_gradients") == (9 if method == "rsam" else 6, 1)


@pytest.mark.parametrize("method", often(FOUR, "rsam"))
def test_apply_gradients_and_the_eager_step_evaluate_as_often(method):
    assert count(sgd_with(method), 3, "apply_gradients") == (6, 1)
    counted = Counted(loss)
    create(sgd_with(method)).apply_loss(lambda w: counted(w, batch(0)))
    assert counted.calls == 2


@pytest.mark.parametrize("when", [None, sam_optax.after(1)])
@pytest.mark.parametrize("method", often(FOUR, "sam", "rsam"))
def test_loss_and_aux_are_those_of_the_first_pass(method, when):
    """The point of the first pass itself is the auxiliary output: nothing else can be mistaken."""
    state = create(sgd_with(method, when=when))

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
    state = create(sgd_with(method, skip_nonfinite=True))
    new, value = state.apply_loss(lambda w: loss(w, batch(0)) * jnp.nan)
    assert np.isnan(value)
    assert_same(new.params, state.params)
    assert new.opt_state.skipped == 1
    assert jax.tree.structure(new) == jax.tree.structure(state.replace(step=1))


def test_batch_norm_statistics_are_updated_once():
    """Case 20: 0.235, where statistics of both passes would be 0.4465."""
    model, x = nn.BatchNorm(use_running_average=False, momentum=0.9), jnp.full((2, 1), 2.35)
    variables = model.init(jax.random.key(0), x)
    state = Batches.create(apply_fn=model.apply, tx=sgd_with("sam"), **variables)

    def loss_fn(params: Any) -> Any:
        both = {"params": params, "batch_stats": state.batch_stats}
        y, new = state.apply_fn(both, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y - x)), new["batch_stats"]

    _, (_, stats) = state.apply_loss(loss_fn, has_aux=True)
    np.testing.assert_allclose(stats["mean"], [0.235], rtol=1e-6)
