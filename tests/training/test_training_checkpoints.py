"""Checkpoints of TrainState and of Flax's class are one format."""

from functools import partial
from typing import Any

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state
from helpers import assert_same, same
from training_steps import Batches, batch, loss, params, perturbation_of

import sam_optax
from sam_optax.training import TrainState


class StockBatches(train_state.TrainState):
    """Flax's class with the same further field as ``Batches``."""

    batch_stats: Any


def make(kind: type, method: str) -> Any:
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of(method))
    return kind.create(apply_fn=loss, params=params(), tx=tx, batch_stats=jnp.zeros(2))


def trained(state: Any, steps: range) -> Any:
    for step in steps:
        state, _ = state.apply_loss(partial(loss, x=batch(step)))
    return state.replace(batch_stats=state.batch_stats + 1)


@pytest.mark.parametrize("method", ["fsam", "rsam"])  # the two with state
def test_state_dicts_are_flax_s_and_restore_both_ways(method):
    ours = trained(make(Batches, method), range(2))
    to_stock = flax.serialization.from_bytes(
        make(StockBatches, method), flax.serialization.to_bytes(ours)
    )
    assert isinstance(to_stock, train_state.TrainState)
    assert not isinstance(to_stock, TrainState)
    assert flax.serialization.to_state_dict(to_stock).keys() == (
        flax.serialization.to_state_dict(ours).keys()
    )
    back = flax.serialization.from_bytes(
        make(Batches, method), flax.serialization.to_bytes(to_stock)
    )
    assert isinstance(back, Batches)
    assert_same(jax.tree.leaves(to_stock), jax.tree.leaves(back))
    for name in ("params", "opt_state", "batch_stats"):
        assert_same(getattr(back, name), getattr(ours, name))
    # And the run goes on as if nothing had happened; not so from the initial state.
    assert_same(trained(back, range(2, 4)).params, trained(ours, range(2, 4)).params)
    assert not same(trained(make(Batches, method), range(2, 4)).params, trained(back, range(2, 4)))


def test_the_fields_are_flax_s():
    stock, ours = train_state.TrainState, TrainState
    assert ours.__dataclass_fields__.keys() == stock.__dataclass_fields__.keys()
    for name, field in stock.__dataclass_fields__.items():
        assert ours.__dataclass_fields__[name].metadata == field.metadata
