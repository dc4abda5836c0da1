"""State goes through every serializer, and training goes on as if it had not."""

import functools
import pickle

import flax.jax_utils
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same
from methods import KINDS, NAMES, make, subject

import sam_optax

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])}


def gradient(params):
    return jax.tree.map(lambda x: x + 0.1 * x**3, params)


def step(name, base, params, state):
    updates, state = subject(name, base).update(gradient(params), state, params, grad_fn=gradient)
    return optax.apply_updates(params, updates), state


@functools.cache
def trained(name, base):
    """Params and state after one step and after two."""
    first = step(name, base, PARAMS, subject(name, base).init(PARAMS))
    return first, step(name, base, *first)


def check(name, base, restored):
    """The restored checkpoint is what was saved, and the next step is the one it would be."""
    saved, later = trained(name, base)
    assert_same(restored, saved)
    restored = jax.tree.map(jnp.asarray, restored)
    assert_same(step(name, base, *restored), later)


STATEFUL = [name for name in NAMES if jax.tree.leaves(jax.eval_shape(make(name).init, PARAMS))]
every_subject = pytest.mark.parametrize(
    ("name", "base"), [(name, None) for name in STATEFUL] + [(name, "sgd") for name in KINDS]
)


@every_subject
@pytest.mark.fast("fsam-sgd")
def test_flax_msgpack(name, base):
    target = (PARAMS, subject(name, base).init(PARAMS))
    data = flax.serialization.to_bytes(trained(name, base)[0])
    check(name, base, flax.serialization.from_bytes(target, data))


@every_subject
def test_pickle(name, base):
    check(name, base, pickle.loads(pickle.dumps(trained(name, base)[0])))


@every_subject
def test_plain_arrays(name, base):
    """As any serializer that knows of NumPy arrays alone would do it."""
    leaves, structure = jax.tree.flatten(trained(name, base)[0])
    arrays = [np.asarray(leaf).copy() for leaf in leaves]
    assert all(array.dtype.kind in "fiub" for array in arrays)
    check(name, base, jax.tree.unflatten(structure, [jnp.asarray(a) for a in arrays]))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_replicate(name):
    saved = trained(name, "sgd")[0]
    replicated = flax.jax_utils.replicate(saved, jax.devices()[:2])
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(replicated))
    check(name, "sgd", flax.jax_utils.unreplicate(replicated))


@pytest.mark.parametrize("name", ["asam", "fsam", "rsam", "sam_scheduled"])
def test_orbax(name, tmp_path):
    saved = trained(name, "sgd")[0]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved)
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
    check(name, "sgd", restored)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("typed", "threefry2x32"), ("typed", "rbg"), ("raw", "threefry2x32")],
)
def test_keys_of_every_kind_give_the_same_kind_of_state(kind, implementation):
    """The state holds raw bits whatever the key was, since serializers know no typed keys."""
    key = jax.random.key(0, impl=implementation)
    key = jax.random.key_data(key) if kind == "raw" else key
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.rsam(key=key))
    state = tx.init(PARAMS)
    (bits,) = jax.tree.leaves(state.perturbation_state)
    assert bits.dtype == jnp.uint32
    assert bits.shape == (2,)
    updates, _ = tx.update(None, state, PARAMS, grad_fn=gradient)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    restored = jax.tree.map(jnp.asarray, restored)
    assert_same(tx.update(None, restored, PARAMS, grad_fn=gradient)[0], updates)
