"""TrainState donated, in a scan, on several devices, and in checkpoints."""

from functools import partial
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from helpers import assert_close, assert_same, same, signature
from jax.sharding import PartitionSpec as P
from methods import often
from training_steps import Batches, batch, create, loss, params, sgd_with

import sam_optax
from sam_optax.training import TrainState


def step_fn(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    return state.apply_loss(partial(loss, x=x))


@pytest.mark.parametrize("method", often(["fsam", "rsam"], "fsam"))  # the two with state
def test_donated_scanned_and_not_retraced(method):
    jitted = jax.jit(lambda state, x: step_fn(state, x), donate_argnums=0)  # a cache of its own
    new = lambda: create(sgd_with(method)).replace(step=jnp.array(0))
    state, losses = new(), []
    shape = signature(state)
    for step in range(3):
        donated, (state, value) = state, jitted(state, batch(step))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
        assert signature(state) == shape
        losses.append(value)
    assert jitted._cache_size() == 1
    scanned, scanned_losses = jax.lax.scan(step_fn, new(), jnp.stack([*map(batch, range(3))]))
    assert_close(scanned_losses, jnp.stack(losses), rtol=1e-5)
    assert_close(scanned.params, state.params, rtol=1e-5)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is newer than this jax")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("groups", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_data_parallel_is_m_sharpness(groups, check_vma):
    """Losses ½(w − c)², w = 0, ρ = .1: ascent gradients are −c, sharp ones −c − .1 sign(c).

    Case 25. Loss and aux are each device's own, of the mean over its groups. The optimizer's state
    is one for all devices.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    base = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    method = sam_optax.sam(rho=0.1)
    tx = sam_optax.sharpness_aware(base, method, groups=groups, axis_name="data")
    state = TrainState.create(apply_fn=None, params=jnp.array(0.0), tx=tx)

    def step_fn(state: TrainState, c: jax.Array) -> tuple[TrainState, jax.Array, jax.Array]:
        loss_fn = lambda w, i=0: (0.5 * jnp.square(w - c[i]), w - c[i])
        state, (value, aux) = state.apply_loss(loss_fn, has_aux=True)
        return state, value[None], aux[None]

    specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P("data"), P("data"))}
    sharded = jax.jit(jax.shard_map(step_fn, mesh=mesh, check_vma=check_vma, **specs))
    c = np.array([[1.0, -3.0], [5.0, 2.0]] if groups else [[1.0], [-3.0]])
    new, values, aux = sharded(state.replace(step=jnp.array(0)), jnp.asarray(c.ravel()))
    np.testing.assert_allclose(new.params, np.mean(c + 0.1 * np.sign(c)), rtol=1e-6)
    np.testing.assert_allclose(values, 0.5 * np.mean(c**2, axis=1), rtol=1e-6)
    np.testing.assert_allclose(aux, -np.mean(c, axis=1), rtol=1e-6)
    np.testing.assert_allclose(
        new.opt_state.base_state[1].best_value, 0.5 * np.mean(c**2), rtol=1e-6
    )


class StockBatches(train_state.TrainState):
    """Flax's class with the same further field as ``Batches``."""

    batch_stats: Any


def make(kind: type, method: str) -> Any:
    return kind.create(
        apply_fn=loss, params=params(), tx=sgd_with(method), batch_stats=jnp.zeros(2)
    )


def trained(state: Any, steps: range) -> Any:
    for step in steps:
        state, _ = step_fn(state, batch(step))
    return state.replace(batch_stats=state.batch_stats + 1)


@pytest.mark.parametrize("method", ["fsam", "rsam"])  # the two with state
def test_checkpoints_are_flax_s_and_restore_both_ways(method):
    ours = trained(make(Batches, method), range(2))
    stored = flax.serialization.to_bytes(ours)
    stock = flax.serialization.from_bytes(make(StockBatches, method), stored)
    back = flax.serialization.from_bytes(make(Batches, method), flax.serialization.to_bytes(stock))
    for name in ("params", "opt_state", "batch_stats"):
        assert_same(getattr(back, name), getattr(ours, name))
    # And the run goes on as if nothing had happened; not so from the initial state.
    assert_same(trained(back, range(2, 4)).params, trained(ours, range(2, 4)).params)
    anew = make(Batches, method).replace(params=ours.params)
    assert not same(trained(anew, range(2, 4)).params, trained(back, range(2, 4)).params)
