"""Ten steps straight equal five, save, restore and five, bit for bit."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from methods import FOUR, build

import sam_optax

KEY = jax.random.key(0)
PARAMS = {"kernel": jax.random.normal(KEY, (4, 3)), "bias": jnp.zeros(3)}
BATCHES = jax.random.normal(jax.random.key(1), (10, 8, 4))


def training(name):
    tx = sam_optax.sharpness_aware(
        optax.adam(optax.cosine_decay_schedule(0.1, 10)), build(name, 0.1), skip_nonfinite=True
    )

    @jax.jit
    def step(params, state, x):
        loss = lambda p: jnp.mean(jnp.tanh(x @ p["kernel"] + p["bias"]) ** 2)
        updates, state = tx.update(None, state, params, grad_fn=jax.grad(loss))
        return optax.apply_updates(params, updates), state

    return tx, step


def run(step, carry, batches):
    for x in batches:
        carry = step(*carry, x)
    return carry


def msgpack(carry, target, tmp_path):
    del tmp_path
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(carry))


def pickled(carry, target, tmp_path):
    del target, tmp_path
    return jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(carry))))


def orbax(carry, target, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", carry)
        checkpointer.wait_until_finished()
        return checkpointer.restore(tmp_path / "checkpoint", target)


@pytest.mark.parametrize("through", [msgpack, pickled, orbax])
@pytest.mark.parametrize("name", [*FOUR, "sam_scheduled", "random_only_fsam"])
@pytest.mark.fast("rsam-msgpack", "fsam-pickled", "sam-orbax")
def test_resuming_changes_no_bit(name, through, tmp_path):
    tx, step = training(name)
    start = (PARAMS, tx.init(PARAMS))
    straight = run(step, start, BATCHES)
    half = run(step, start, BATCHES[:5])
    tx, step = training(name)  # as in a new process
    restored = through(half, (PARAMS, tx.init(PARAMS)), tmp_path)
    resumed = run(step, restored, BATCHES[5:])
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["fsam", "rsam"])
@pytest.mark.slow
def test_sharded_state_resumes(name, tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    split = lambda leaf: jax.sharding.NamedSharding(
        mesh,
        jax.sharding.PartitionSpec("data")
        if leaf.shape[:1] == (4,)
        else jax.sharding.PartitionSpec(),
    )
    tx, step = training(name)
    place = lambda tree: jax.tree.map(lambda leaf: jax.device_put(leaf, split(leaf)), tree)
    half = run(step, place((PARAMS, tx.init(PARAMS))), BATCHES[:5])
    straight = run(step, half, BATCHES[5:])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), half
    )
    restored = orbax(half, target, tmp_path)
    for a, b in zip(jax.tree.leaves(half), jax.tree.leaves(restored), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    resumed = run(step, restored, BATCHES[5:])
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_restoring_without_a_target_says_so():
    tx, step = training("fsam")
    state = tx.init(PARAMS)
    raw = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    with pytest.raises(TypeError, match=r"must be SharpnessAwareState.*got dict.*without a target"):
        step(PARAMS, raw, BATCHES[0])
    half = state._replace(perturbation_state=raw["perturbation_state"])
    with pytest.raises(TypeError, match=r"perturbation_state must be .FullGradientState.*got dict"):
        step(PARAMS, half, BATCHES[0])


@pytest.mark.parametrize(
    ("mine", "other", "names"),
    [
        ("sam", "fsam", ("FullGradientState", "EmptyState")),
        ("fsam", "rsam", ("RandomStartState", "FullGradientState")),
        ("rsam", "sam_scheduled", ("ScheduleState", "RandomStartState")),
    ],
)
def test_the_state_of_another_method_names_both(mine, other, names):
    tx, step = training(mine)
    state = tx.init(PARAMS)._replace(perturbation_state=build(other, 0.1).init(PARAMS))
    with pytest.raises(TypeError, match="another method") as error:
        step(PARAMS, state, BATCHES[0])
    for name in names:
        assert name in str(error.value)
