"""m-sharpness on one device, and accumulation over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sam_optax

KEY = jax.random.key(3)
CENTRES = jnp.array([1.0, -3.0])
A = jnp.array([1.0, 3.0])


def centre_grad(w, i):
    return w - CENTRES[i]


@pytest.mark.parametrize(
    "method", [sam_optax.sam(0.1), sam_optax.fsam(0.1), sam_optax.asam(0.1, eta=1.0)]
)
def test_groups_perturb_each_by_its_own_gradient(method):
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, groups=2)
    w = jnp.zeros(())
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=centre_grad)
    np.testing.assert_allclose(updates, -1.0, rtol=1e-6)  # not -1.1, of the whole batch


@pytest.mark.slow
def test_groups_equal_a_hand_written_loop():
    method = sam_optax.fsam(0.1, lmbda=0.5)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), method, groups=3)
    x = jax.random.normal(KEY, (3, 5, 4))
    grad_fn = jax.grad(lambda w, i: jnp.mean(jnp.tanh(x[i] @ w) ** 2))
    w = expected = jnp.ones((4, 2))
    state, base = tx.init(w), optax.sgd(0.1, momentum=0.9)
    base_state, ema, step = (
        base.init(w),
        jnp.zeros_like(w),
        jax.jit(lambda w, s: tx.update(None, s, w, grad_fn=grad_fn)),
    )
    for t in range(3):
        updates, state = step(w, state)
        w = optax.apply_updates(w, updates)
        ascent = [grad_fn(expected, i) for i in range(3)]
        d = [g - ema if t else g for g in ascent]
        sharp = [grad_fn(expected + 0.1 * r / jnp.linalg.norm(r), i) for i, r in enumerate(d)]
        mean = sum(ascent) / 3
        ema = 0.5 * ema + 0.5 * mean if t else mean
        updates, base_state = base.update(sum(sharp) / 3, base_state, expected)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(w, expected, rtol=1e-4)
        np.testing.assert_allclose(state.perturbation_state[0].ema, ema, rtol=1e-4, atol=1e-7)


def test_groups_draw_noise_of_their_own():
    method = sam_optax.rsam(0.1, gamma=1.0, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, groups=2)
    w = jnp.ones((3, 2))
    points = []
    tx.update(
        None,
        tx.init(w),
        w,
        grad_fn=lambda p, i: jax.debug.callback(lambda p: points.append(np.asarray(p)), p) or p,
    )
    jax.effects_barrier()
    assert len(points) == 4
    assert len({point.tobytes() for point in points}) == 4


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
    np.testing.assert_allclose(updates, -2.2, rtol=1e-6)


def test_multi_steps_around_is_not_accumulation():
    """Its second pass sees the last microbatch only: the control of the test above."""
    tx = optax.MultiSteps(
        sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1)), every_k_schedule=2
    ).gradient_transformation()
    w = jnp.ones(())
    state = tx.init(w)
    for i in range(2):
        updates, state = tx.update(A[i] * w, state, w, grad_fn=lambda w, i=i: A[i] * w)
    np.testing.assert_allclose(updates, -3.3, rtol=1e-6)


def test_multi_steps_inside_averages_sharp_gradients():
    base = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2).gradient_transformation()
    tx = sam_optax.sharpness_aware(base, sam_optax.sam(0.1))
    w = jnp.ones(())
    state = tx.init(w)
    for i in range(2):
        updates, state = tx.update(None, state, w, grad_fn=lambda w, i=i: A[i] * w)
    np.testing.assert_allclose(updates, -2.2, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_accumulate_keeps_dtypes_and_sums_wide(dtype):
    n = 600
    grads = sam_optax.accumulate(lambda p, i: p, n)({"w": jnp.ones(3, dtype), "none": None})
    assert grads["w"].dtype == dtype
    np.testing.assert_array_equal(grads["w"].astype(jnp.float32), 1.0)
    assert grads["none"] is None


def test_memory_does_not_grow_with_the_number_of_groups_or_microbatches():
    x = jax.random.normal(KEY, (8, 16, 64))
    grad_fn = jax.grad(lambda w, i: jnp.mean(jnp.tanh(x[i] @ w) ** 2))
    w = jnp.ones((64, 64))

    def temporaries(tx, grad_fn):
        step = jax.jit(lambda w, s: tx.update(None, s, w, grad_fn=grad_fn))
        return step.lower(w, tx.init(w)).compile().memory_analysis().temp_size_in_bytes

    def groups(n):
        return temporaries(
            sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(), groups=n), grad_fn
        )

    def microbatches(n):
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam())
        return temporaries(tx, sam_optax.accumulate(grad_fn, n))

    assert groups(8) <= 1.1 * groups(2)
    assert microbatches(8) <= 1.1 * microbatches(2)


@pytest.mark.parametrize("n", [0, -1])
def test_bad_counts(n):
    with pytest.raises(ValueError, match="groups must be at least 1"):
        sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(), groups=n)
    with pytest.raises(ValueError, match="n must be at least 1"):
        sam_optax.accumulate(lambda p, i: p, n)
