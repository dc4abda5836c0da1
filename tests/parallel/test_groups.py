"""m-sharpness on one device, and accumulation over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

import sam_optax

KEY = jax.random.key(3)
CENTRES = jnp.array([1.0, -3.0])
A = jnp.array([1.0, 3.0])


def centre_grad(w, i):
    return w - CENTRES[i]


def test_groups_perturb_each_by_its_own_gradient():
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1), groups=2)
    w = jnp.zeros(())
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=centre_grad)
    np.testing.assert_allclose(updates, -1.0, rtol=1e-6)  # not -1.1, of the whole batch


def test_groups_are_as_many_devices():
    """The average of F-SAM sees the mean gradient, once for all groups."""
    x = jax.random.normal(KEY, (3, 5, 4))
    grad_fn = jax.grad(lambda w, i: jnp.mean(jnp.tanh(x[i] @ w) ** 2))

    def run(device=None):
        """Three steps, on one device or on one of three."""
        options = {"groups": 3} if device is None else {"axis_name": "batch"}
        method = sam_optax.fsam(0.1, lmbda=0.5)
        tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), method, **options)
        of_device = lambda w: grad_fn(w, device)
        w = jnp.ones((4, 2))
        state = tx.init(w)
        for _ in range(3):
            extra = {"grad_fn": grad_fn if device is None else of_device}
            updates, state = tx.update(None, state, w, **extra)
            w = optax.apply_updates(w, updates)
        return w, state.perturbation_state[0].ema

    devices = jax.pmap(run, axis_name="batch")(jnp.arange(3))
    expected = jax.tree.map(lambda leaf: leaf[0], devices)
    assert_close(jax.jit(run)(), expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{"groups": 2}, {"axis_name": "batch"}])
def test_groups_and_devices_draw_noise_of_their_own(options):
    method = sam_optax.rsam(0.1, gamma=1.0, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, **options)
    points = []

    def grad_fn(p, group=0):
        jax.debug.callback(lambda p: points.append(np.asarray(p).tobytes()), p)
        return p

    step = lambda w: tx.update(None, tx.init(w), w, grad_fn=grad_fn)[0]
    run = step if "groups" in options else lambda w: jax.pmap(step, "batch")(jnp.stack([w, w]))
    run(jnp.ones((3, 2)))
    jax.effects_barrier()
    assert len(points) == len(set(points)) == 4


def test_plain_steps_of_groups_are_the_base_optimizer():
    tx = sam_optax.sharpness_aware(
        optax.sgd(1.0), sam_optax.sam(0.1), groups=2, when=sam_optax.after(1)
    )
    w = jnp.zeros(())
    step = jax.jit(lambda w, s: tx.update(None, s, w, grad_fn=centre_grad))
    updates, _ = step(w, tx.init(w))
    np.testing.assert_allclose(updates, -1.0)  # the mean gradient is 1
    given, _ = tx.update(jnp.asarray(5.0), tx.init(w), w, grad_fn=centre_grad)
    np.testing.assert_allclose(given, -5.0)


def test_accumulation_averages_both_passes():
    grad_fn = sam_optax.accumulate(lambda w, i: A[i] * w, 2)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1))
    w = jnp.ones(())
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=grad_fn)
    np.testing.assert_allclose(updates, -2.2, rtol=1e-6)  # not -3.3, of one microbatch


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_accumulate_keeps_dtypes_and_sums_wide(dtype):
    grads = sam_optax.accumulate(lambda p, i: p, 600)({"w": jnp.ones(3, dtype), "none": None})
    assert grads["w"].dtype == dtype
    np.testing.assert_array_equal(grads["w"].astype(jnp.float32), 1.0)
    assert grads["none"] is None


def test_memory_does_not_grow_with_the_number_of_groups_or_microbatches():
    x = jax.random.normal(KEY, (8, 16, 64))
    grad_fn = jax.grad(lambda w, i: jnp.mean(jnp.tanh(x[i] @ w) ** 2))
    w = jnp.ones((64, 64))

    def temporaries(n, groups):
        options = {"groups": n} if groups else {}
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(), **options)
        of_step = grad_fn if groups else sam_optax.accumulate(grad_fn, n)
        step = jax.jit(lambda w, s: tx.update(None, s, w, grad_fn=of_step))
        return step.lower(w, tx.init(w)).compile().memory_analysis().temp_size_in_bytes

    for groups in (True, False):
        assert temporaries(8, groups) <= 1.1 * temporaries(2, groups)


@pytest.mark.parametrize("n", [0, -1])
def test_bad_counts(n):
    with pytest.raises(ValueError, match="groups must be at least 1"):
        sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(), groups=n)
    with pytest.raises(ValueError, match="n must be at least 1"):
        sam_optax.accumulate(lambda p, i: p, n)
