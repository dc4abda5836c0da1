"""TrainState under jit with donation, in a scan, with pmap and with shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, signature
from jax.sharding import PartitionSpec as P
from training_steps import batch, create, loss, perturbation_of

import sam_optax
from sam_optax.training import TrainState


def state_of(method: str) -> TrainState:
    state = create(sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of(method)))
    return state.replace(step=jnp.array(0))


def step_fn(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    return state.apply_loss(partial(loss, x=x))


@pytest.mark.parametrize("method", ["fsam", "rsam"])  # the two with state
@pytest.mark.fast("fsam")
def test_donated_scanned_and_not_retraced(method):
    jitted = jax.jit(lambda state, x: step_fn(state, x), donate_argnums=0)  # a cache of its own
    state = state_of(method)
    shape = signature(state)
    losses = []
    for step in range(3):
        donated, (state, value) = state, jitted(state, batch(step))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
        assert signature(state) == shape
        losses.append(value)
    assert jitted._cache_size() == 1
    xs = jnp.stack([batch(step) for step in range(3)])
    scanned, scanned_losses = jax.lax.scan(step_fn, state_of(method), xs)
    assert_close(scanned_losses, jnp.stack(losses), rtol=1e-5)
    assert_close(scanned.params, state.params, rtol=1e-5)


@pytest.mark.parametrize("method", ["sam", "rsam"])
@pytest.mark.slow
def test_pmap_with_identical_data_is_one_device(method):
    devices = jax.devices()[:2]
    assert len(devices) == 2
    state = state_of(method)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
    x = jnp.stack([batch(0)] * 2)
    new, losses = jax.pmap(step_fn, devices=devices)(both, x)
    one, value = jax.jit(step_fn)(state, batch(0))
    for i in range(2):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], new.params), one.params, rtol=1e-6)
    np.testing.assert_allclose(losses, [value, value], rtol=1e-6)
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], new) for i in range(2))
    assert_same(jax.tree.leaves(first), jax.tree.leaves(second))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("how", ["apply_loss", "apply_gradients"])
def test_data_parallel_is_m_sharpness(how, check_vma):
    """Losses ½(w − c)², c = 1 and −3, w = 0, ρ = .1: the mean sharp gradient is 1.0.

    The devices' ascent gradients are −1 and 3, their sharp gradients −1.1 and 3.1.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(rho=0.1), axis_name="data")
    state = TrainState.create(apply_fn=None, params=jnp.array(0.0), tx=tx)

    def step_fn(state: TrainState, c: jax.Array) -> TrainState:
        def loss_fn(w: jax.Array) -> jax.Array:
            return jnp.mean(0.5 * jnp.square(w - c))

        if how == "apply_loss":
            return state.apply_loss(loss_fn)[0]
        return state.apply_gradients(grads=None, grad_fn=jax.grad(loss_fn))

    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    sharded = jax.jit(jax.shard_map(step_fn, **specs))
    new = sharded(state.replace(step=jnp.array(0)), jnp.array([1.0, -3.0]))
    np.testing.assert_allclose(new.params, -1.0, rtol=1e-6)


@pytest.mark.parametrize("method", ["sam", "rsam"])
@pytest.mark.slow
def test_loss_and_aux_are_each_device_s_own(method):
    """An auxiliary output may be per example: averaged over devices it would be nonsense."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    base = optax.chain(optax.sgd(1.0), plateau)
    perturbation = perturbation_of(method)
    tx = sam_optax.sharpness_aware(base, perturbation, axis_name="data", sync_perturbation=True)
    w, c = jnp.array([0.5]), jnp.array([1.0, -3.0])
    state = TrainState.create(apply_fn=None, params=w, tx=tx).replace(step=jnp.array(0))

    def step_fn(state: TrainState, c: jax.Array) -> tuple[TrainState, jax.Array, jax.Array]:
        def loss_fn(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.mean(0.5 * jnp.square(w - c)), w - c

        state, (value, aux) = state.apply_loss(loss_fn, has_aux=True)
        return state, value[None], aux

    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": (P(), P("data"), P("data"))}
    new, values, aux = jax.jit(jax.shard_map(step_fn, **specs))(state, c)
    np.testing.assert_allclose(values, 0.5 * np.square(aux), rtol=1e-6)
    # The optimizer's state is one for all devices, so the loss that it gets is the mean.
    np.testing.assert_allclose(
        new.opt_state.base_state[1].best_value, np.mean(np.asarray(values)), rtol=1e-6
    )
    if method == "sam":
        np.testing.assert_allclose(aux, w - c, rtol=1e-6)
