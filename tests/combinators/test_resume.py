"""Ten steps straight equal five, save, restore and five, bit for bit (case 27)."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same
from methods import build

import sam_optax

PARAMS = {"kernel": jax.random.normal(jax.random.key(0), (4, 3)), "bias": jnp.zeros(3)}
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


def msgpack(carry, target, path):
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(carry))


def pickled(carry, target, path):
    return jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(carry))))


def orbax(carry, target, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", carry)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "checkpoint", target)


@pytest.mark.parametrize(
    ("name", "through"), [("rsam", msgpack), ("fsam", pickled), ("sam_scheduled", orbax)]
)
def test_resuming_changes_no_bit(name, through, tmp_path):
    tx, step = training(name)
    half = run(step, (PARAMS, tx.init(PARAMS)), BATCHES[:5])
    straight = run(step, half, BATCHES[5:])
    tx, step = training(name)  # as in a new process
    restored = through(half, (PARAMS, tx.init(PARAMS)), tmp_path)
    assert_same(run(step, restored, BATCHES[5:]), straight)
