"""LPF-SGD against the mean over its draws, recomputed by hand; and what its draws are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family import BASE, START, as_tree, gap, gradient, plain, run
from helpers import RuntimeCounted, assert_close, assert_same, precision, vector

import sam_optax

KEY = jax.random.key(5)
W = jnp.array([1.0, -2.0, 0.5])


@pytest.mark.parametrize("samples", [1, 4])
def test_step_is_the_mean_over_its_draws(samples):
    with precision(jnp.float64):
        params = as_tree(START)
        method = sam_optax.low_pass(0.3, samples, key=KEY)
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
        state, grad_fn = tx.init(params), lambda p: gradient(p, 0)
        step = jax.jit(lambda s, p: tx.update(None, s, p, grad_fn=grad_fn))
        points = []
        for _ in range(2):
            before = state.perturbation_state
            draws = [{"draw_index": i} for i in range(samples)] if samples > 1 else [{}]
            starts = [method.start_fn(params, before, **draw) for draw in draws]
            points += [vector(start) for start in starts]
            mean = np.mean([vector(grad_fn(start)) for start in starts], axis=0)
            updates, state = step(state, params)
            np.testing.assert_allclose(-vector(updates), mean, rtol=1e-12)
        # Every draw is another one, within a step and from step to step.
        assert len({point.tobytes() for point in points}) == 2 * samples


@pytest.mark.parametrize(
    ("options", "std"),
    [
        ({}, lambda w: np.linalg.norm(w, axis=0)),
        ({"noise_scale": "sqrt_norm"}, lambda w: np.linalg.norm(w, axis=0) ** 0.5),
        ({"kernel_axis": 0}, lambda w: np.linalg.norm(w, axis=1)[:, None]),
    ],
)
def test_standard_deviation(options, std):
    """γ ‖w_j‖ for kernel j by default, γ ‖w_j‖^½ as R-SAM has it with "sqrt_norm"."""
    w = np.random.default_rng(0).normal(size=(2000, 3)) * [1, 2, 4]
    method = sam_optax.low_pass(0.01, key=KEY, **options)
    params = jnp.asarray(w, jnp.float32)
    delta = np.float64(method.start_fn(params, method.init(params))) - w
    np.testing.assert_allclose((delta / std(w)).std(0), 0.01, rtol=0.06)


def test_gamma_0_is_the_base_optimizer():
    tx = sam_optax.sharpness_aware(BASE, sam_optax.low_pass(0.0, key=KEY))
    assert gap(run(tx, 3, jnp.float32)[0], plain(steps=3, dtype=jnp.float32)) == 0


@pytest.mark.parametrize(("samples", "groups", "count"), [(1, None, 1), (3, None, 3), (2, 2, 4)])
def test_number_of_gradients(samples, groups, count):
    grad_fn = RuntimeCounted(lambda p, *group: 2 * p)
    method = sam_optax.low_pass(0.1, samples, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), method, groups=groups)
    jax.jit(lambda s: tx.update(None, s, W, grad_fn=grad_fn))(tx.init(W))
    jax.effects_barrier()
    assert grad_fn.evaluations == count


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.slow
def test_each_group_has_draws_of_its_own(samples):
    """The paper's LPF-SGD: M parts of the batch, each with its own sample."""
    method = sam_optax.low_pass(0.3, samples, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, groups=3)
    state, scale = tx.init(W), jnp.array([1.0, 10.0, 100.0])
    updates, new = tx.update(None, state, W, grad_fn=lambda p, i: scale[i] * p)
    draw = lambda i: method.start_fn(W, state.perturbation_state, draw_index=i)
    expected = sum(scale[i // samples] * draw(i) for i in range(3 * samples)) / (3 * samples)
    assert_close(-updates, expected, 1e-5)
    _, after_one = method.update(W, state.perturbation_state, W)
    assert_same(new.perturbation_state, after_one)  # the key moves on once a step


@pytest.mark.parametrize("samples", [1, 3])
def test_loss_of_value_and_grad_is_the_mean_over_the_draws(samples):
    method = sam_optax.low_pass(0.3, samples, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
    loss_fn = lambda p: (0.5 * jnp.sum(p**2), {"first": p[0]})
    state, indices = tx.init(W), range(samples) if samples > 1 else [None]
    draws = [method.start_fn(W, state.perturbation_state, draw_index=i) for i in indices]
    value_and_grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    _, new = jax.jit(lambda s: tx.update(None, s, W, value_and_grad_fn=value_and_grad_fn))(state)
    _, (loss, aux) = sam_optax.pop_first_pass(new)
    assert float(loss) == pytest.approx(np.mean([float(loss_fn(d)[0]) for d in draws]), rel=1e-5)
    assert float(aux["first"]) == pytest.approx(np.mean([float(d[0]) for d in draws]), rel=1e-5)


def test_other_errors():
    method = sam_optax.low_pass(0.1, 2, key=KEY)
    with pytest.raises(ValueError, match="low_pass needs the params"):
        method.update(W, method.init(W))
    with pytest.raises(ValueError, match="averages over 2 samples: use samples=1"):
        sam_optax.alternating(BASE, method)
    with pytest.raises(ValueError, match=r"ascent_steps must be 1 .*low_pass.* got 3"):
        sam_optax.sharpness_aware(BASE, method, ascent_steps=3)
    tx = sam_optax.sharpness_aware(BASE, method)
    with pytest.raises(ValueError, match=r"ascent_grad_fn cannot be used with.*low_pass"):
        tx.update(None, tx.init(W), W, grad_fn=lambda p: p, ascent_grad_fn=lambda p: p)
