"""Ten steps straight equal five, save, restore and five, bit for bit (case 27)."""

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same, batches, init_mlp, mlp_loss
from methods import build

import sam_optax


@pytest.mark.parametrize("name", ["fsam", "rsam"])
def test_resuming_changes_no_bit(name):
    """Other ways to save a state are in the tests of conformance."""

    def training():
        """As in a new process."""
        base = optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9)
        tx = sam_optax.sharpness_aware(base, build(name, 0.5), skip_nonfinite=True)

        @jax.jit
        def step(carry, batch):
            params, state = carry
            grad_fn = lambda p: jax.grad(mlp_loss)(p, *batch)
            updates, state = tx.update(None, state, params, grad_fn=grad_fn)
            return (optax.apply_updates(params, updates), state), jnp.zeros(())

        run = lambda carry, first, last: jax.lax.scan(
            step, carry, tuple(b[first:last] for b in batches(10))
        )[0]
        return (init_mlp(), tx.init(init_mlp())), run

    start, run = training()
    half = run(start, 0, 5)
    target, run_again = training()
    restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(half))
    assert_same(run_again(restored, 5, 10), run(start, 0, 10))
