"""ESAM's random mask: its mean, its share, its draws."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, vector

import sam_optax

KEY = jax.random.key(2)
EPS = {"a": jnp.linspace(0.1, 1.0, 12_000), "b": jnp.full((40, 50), -2.0)}


def draw(method, eps=EPS, steps=1, **extra):
    """What it makes of an ε at each of several steps."""

    def one(state, _):
        masked, state = method.update(eps, state, **extra)
        return state, masked

    scan = jax.jit(lambda s: jax.lax.scan(one, s, None, steps))
    return scan(method.init(eps))[1]


@pytest.mark.parametrize("beta", [0.2, 0.95])
def test_share_and_scale(beta):
    masked = jax.tree.map(lambda x: x[0], draw(sam_optax.random_mask(beta, key=KEY)))
    for name in EPS:
        kept = np.asarray(masked[name] != 0)
        spread = np.sqrt(beta * (1 - beta) / kept.size)
        assert abs(kept.mean() - beta) < 4 * spread
        np.testing.assert_allclose(masked[name], np.where(kept, EPS[name] / beta, 0), rtol=1e-6)


def test_draws_differ_between_steps_leaves_elements_and_keys():
    eps = {"a": jnp.ones(3000), "b": jnp.ones(3000)}
    masked = draw(sam_optax.random_mask(0.5, key=KEY), eps, 3)
    other = draw(sam_optax.random_mask(0.5, key=jax.random.key(3)), eps, 1)
    masks = [np.asarray(x) != 0 for x in (*masked["a"], *masked["b"], *other["a"], *other["b"])]
    for i, mask in enumerate(masks):
        for earlier in masks[:i]:
            assert abs((mask == earlier).mean() - 0.5) < 0.05
        assert abs((mask[1:] == mask[:-1]).mean() - 0.5) < 0.05
    assert_same(
        draw(sam_optax.random_mask(0.5, key=jax.random.key_data(KEY)), eps, 1),
        draw(sam_optax.random_mask(0.5, key=KEY), eps, 1),
    )


@pytest.mark.slow
def test_whole_leaves():
    eps = [jnp.full(3, float(i + 1)) for i in range(40)]
    masked = draw(sam_optax.random_mask(0.5, key=KEY, whole_leaves=True), eps, 20)
    kept = np.stack([np.asarray(x) != 0 for x in masked])  # leaf, step, element
    assert np.all(kept == kept[:, :, :1])
    assert abs(kept[:, :, 0].mean() - 0.5) < 4 * 0.5 / np.sqrt(800)
    assert len({row.tobytes() for row in kept[:, :, 0]}) > 35


def test_β_1_keeps_all_to_the_bit_and_a_schedule_may_drop_everything():
    eps = jnp.array([1.0, -0.3, 0.0])
    assert_same(draw(sam_optax.random_mask(1.0, key=KEY), eps)[0], eps)
    dropped = draw(sam_optax.random_mask(lambda step: 0.0, key=KEY), eps)[0]
    np.testing.assert_array_equal(dropped, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_dtypes_and_other_leaves(dtype):
    eps = {"w": jnp.full(200, 1.5, dtype), "n": None, "i": jnp.arange(3)}
    masked = jax.tree.map(lambda x: x[0], draw(sam_optax.random_mask(0.5, key=KEY), eps))
    assert masked["w"].dtype == dtype
    assert set(np.asarray(masked["w"].real, np.float64)) == {0.0, 3.0}
    assert_same(masked["i"], eps["i"])


@pytest.mark.parametrize("way", ["devices", "groups"])
def test_devices_and_groups_have_masks_of_their_own(way):
    options = {"axis_name": "batch"} if way == "devices" else {"groups": 2}
    esam = optax.chain(sam_optax.sam(1.0), sam_optax.random_mask(0.5, key=KEY))
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), esam, **options)
    w = jnp.ones(100)
    state = tx.init(w)
    # The gradient is linear, so the update shows the mean of both points.
    step = lambda _: tx.update(None, state, w, grad_fn=lambda p, *group: p)
    if way == "devices":
        updates, new = jax.pmap(step, axis_name="batch", devices=jax.devices()[:2])(jnp.arange(2))
        assert_same(*new.perturbation_state[1].key)
        updates = updates[0]
    else:
        updates, new = step(0)
    moved = np.round((-vector(updates) - 1) / 0.1, 3)  # ε is .2 where it is kept
    assert set(moved) == {0.0, 1.0, 2.0}
    assert abs((moved == 1).mean() - 0.5) < 0.2
