"""States that are stored and restored, and what says that one cannot be."""

import functools

import flax.jax_utils
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same
from methods import KINDS, make, subject

import sam_optax

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])}
BASE = optax.sgd(0.1, momentum=0.9)
COMBINATORS = ["sharpness_aware", "alternating"]


def gradient(params):
    return jax.tree.map(lambda x: x + 0.1 * x**3, params)


def step(name, params, state):
    updates, state = subject(name, "sgd").update(gradient(params), state, params, grad_fn=gradient)
    return optax.apply_updates(params, updates), state


@functools.cache
def trained(name):
    """Params and state after a step."""
    return step(name, PARAMS, subject(name, "sgd").init(PARAMS))


@pytest.mark.parametrize("name", ["asam", "fsam", "rsam", "sam_scheduled"])
def test_orbax(name, tmp_path):
    saved = trained(name)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved)
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
    assert_same(restored, saved)
    assert_same(step(name, *restored), step(name, *saved))


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
    assert (bits.dtype, bits.shape) == (jnp.uint32, (2,))
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    update = lambda s: tx.update(None, s, PARAMS, grad_fn=gradient)[0]
    assert_same(update(jax.tree.map(jnp.asarray, restored)), update(state))


@functools.cache
def combined(name, kind):
    when = sam_optax.bernoulli(0.5, key=jax.random.key(0))
    return getattr(sam_optax, kind)(BASE, make(name), skip_nonfinite=True, when=when)


@pytest.mark.parametrize("kind", COMBINATORS)
@pytest.mark.parametrize("name", [name for name in KINDS if make(name).samples == 1])
def test_a_state_restored_without_a_target(name, kind):
    tx = combined(name, kind)
    extra = {"grad_fn": gradient} if kind == "sharpness_aware" else {}
    update = lambda state: tx.update(gradient(PARAMS), state, PARAMS, **extra)
    state = tx.init(PARAMS)
    plain = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    for restored in (plain, list(plain.values()), tuple(plain.values())):
        with pytest.raises(TypeError, match=r"restored without a target.*that init returns"):
            update(restored)
    if isinstance(state.perturbation_state, tuple) and name != "by_hand":
        with pytest.raises(TypeError, match="restored without a target"):
            update(state._replace(perturbation_state=plain["perturbation_state"]))


@pytest.mark.parametrize("kind", COMBINATORS)
def test_shapes_in_the_place_of_params(kind):
    """As the optimizers of optax take them, but for the one that keeps a copy."""
    tx, shapes = combined("sam", kind), jax.eval_shape(lambda: PARAMS)
    if kind == "sharpness_aware":
        tx.init(shapes)
    else:
        with pytest.raises(TypeError, match=r"alternating keeps a copy.*jax.eval_shape"):
            tx.init(shapes)


@pytest.mark.parametrize("kind", COMBINATORS)
def test_another_byte_order(kind):
    """JAX refuses it wherever it meets it; the combinators say which leaf, and what to do."""
    params = {"bias": PARAMS["bias"], "kernel": np.ones((2, 2), ">f4")}
    with pytest.raises(TypeError, match=r"\['kernel'\] of dtype '>f4.*newbyteorder"):
        combined("sam", kind).init(params)
