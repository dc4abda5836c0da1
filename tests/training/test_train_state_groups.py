"""m-sharpness in groups, with the loss, the statistics and the metrics of the first passes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OWG
from helpers import RuntimeCounted, assert_close
from methods import FOUR, often
from training_steps import create, loss, params, perturbation_of, sgd_with

import sam_optax
from sam_optax.training import TrainState

GROUPS = 3
X = jnp.asarray(np.random.default_rng(0).normal(size=(GROUPS, 4, 2)), jnp.float32)


def on_group(params: Any, i: jax.Array) -> jax.Array:
    return loss(params, X[i])


@pytest.mark.parametrize("method", often(["sam", "fsam"], "fsam"))
def test_a_step_is_a_hand_written_loop_over_the_groups(method):
    base = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    tx = sam_optax.sharpness_aware(base, perturbation_of(method), groups=GROUPS, info=True)
    # The point and the index of a first pass are the auxiliary output.
    loss_and_aux = lambda w, i: (on_group(w, i), (w, jnp.asarray(i, jnp.float32)))
    state, (value, (point, index)) = jax.jit(lambda s: s.apply_loss(loss_and_aux, has_aux=True))(
        create(tx)
    )
    perturbation, w = perturbation_of(method), params()
    sharp, values, rises = [], [], []
    for x in X:
        first, grads = jax.value_and_grad(loss)(w, x)
        perturbed, _ = perturbation.perturb_fn(w, grads, perturbation.init(w))
        sharp.append(jax.grad(loss)(perturbed, x))
        values.append(first)
        rises.append(loss(perturbed, x) - first)
    expected = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / GROUPS, w, *sharp)
    assert_close(state.params, expected, rtol=1e-6)
    assert_close(value, np.mean(values), rtol=1e-6)
    assert_close(state.opt_state.base_state[1].best_value, value, rtol=1e-6)
    assert_close(state.opt_state.info.loss_rise, np.mean(rises), rtol=1e-4)
    assert_close(point, w, rtol=1e-6)
    assert float(index) == 1.0  # the mean of 0, 1 and 2
    assert int(state.step) == 1


@pytest.mark.parametrize("method", often(FOUR, "sam"))
def test_two_gradients_of_each_group_and_one_trace(method):
    counted = RuntimeCounted(loss)
    tx = sgd_with(method, groups=GROUPS, when=sam_optax.every(2))
    state = create(tx).replace(step=jnp.array(0))
    step = jax.jit(lambda state: state.apply_loss(lambda w, i: counted(w, X[i])))
    for _ in range(2):
        before = state.params
        state, value = step(state)
    # The second step does not perturb.
    assert_close(value, loss(before, X.reshape(-1, 2)), rtol=1e-5)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert (counted.evaluations, counted.calls) == (3 * GROUPS, 1)


def test_a_count_is_refused():
    """The last group's alone, or a rounded mean, would pass for the batch's."""
    counts = lambda w, i: (on_group(w, i), {"right": jnp.sum(X[i] > 0)})
    with pytest.raises(TypeError, match=r"floating-point numbers with groups.*'right'.* is int32"):
        create(sgd_with("sam", groups=GROUPS)).apply_loss(counts, has_aux=True)


def test_inside_another_transformation_the_error_says_what_to_do():
    inside = lambda method: optax.chain(optax.zero_nans(), sgd_with(method, groups=GROUPS))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'i'") as error:
        create(inside("sam")).apply_loss(on_group)
    assert "needs sharpness_aware to be the outermost" in "".join(error.value.__notes__)
    # The first pass of a random start is its own wherever it is.
    assert np.isfinite(create(inside("rsam")).apply_loss(on_group)[1])


def test_overwritten_statistics_are_refused():
    w = {"params": jnp.array([3.0, 4.0]), OWG: jnp.array(0.5)}
    tx = sgd_with("sam", groups=GROUPS)
    state = TrainState.create(apply_fn=None, params=w, tx=tx)
    with pytest.raises(ValueError, match="groups cannot be used with overwrite-with-gradient"):
        state.apply_loss(lambda w, i: jnp.sum(w["params"] ** 2) * w[OWG])
