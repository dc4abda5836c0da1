"""LPF-SGD against the mean over its draws, recomputed by hand; and what its draws are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from family import BASE, START, as_tree, gap, gradient, plain, run
from helpers import RuntimeCounted, assert_close, assert_same, leaves, precision, vector

import sam_optax

KEY = jax.random.key(5)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.slow
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


def test_standard_deviation():
    """γ ‖w_j‖ for kernel j by default, γ ‖w_j‖^½ as R-SAM has it with "sqrt_norm"."""
    w = {"k": jnp.asarray(np.random.default_rng(0).normal(size=(2000, 3)) * [1, 2, 4], jnp.float32)}
    for options, power in (({}, 2), ({"noise_scale": "sqrt_norm"}, 1), ({"kernel_axis": 0}, None)):
        method = sam_optax.low_pass(0.01, key=KEY, **options)
        delta = vector(method.start_fn(w, method.init(w))) - vector(w)
        delta = delta.reshape(2000, 3)
        kernels = np.linalg.norm(np.asarray(w["k"], np.float64), axis=0)
        if power is None:
            rows = np.linalg.norm(np.asarray(w["k"], np.float64), axis=1)
            assert np.std(delta / rows[:, None]) == pytest.approx(0.01, rel=0.05)
        else:
            np.testing.assert_allclose(delta.std(0), 0.01 * kernels ** (power / 2), rtol=0.06)
    std = references.kernel_std(leaves(w)[0], 1.0)[0]
    np.testing.assert_allclose(std**2, kernels)


def test_the_start_is_the_perturbed_point():
    params = as_tree(START, jnp.float32)
    method = sam_optax.low_pass(0.3, key=KEY)
    state = method.init(params)
    point, _ = method.perturb_fn(params, params, state)
    assert_close(point, method.start_fn(params, state), 1e-6)
    assert method.single_pass


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.slow
def test_gamma_0_is_the_base_optimizer(dtype):
    tx = sam_optax.sharpness_aware(BASE, sam_optax.low_pass(0.0, key=KEY))
    assert gap(run(tx, 3, dtype)[0], plain(steps=3, dtype=dtype)) == 0


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize(("samples", "groups", "count"), [(1, None, 1), (3, None, 3), (2, 2, 4)])
@pytest.mark.fast("3-None-3-True", "2-2-4-False")
def test_number_of_gradients(samples, groups, count, jit):
    grad_fn = RuntimeCounted(lambda p, *group: 2 * p)
    method = sam_optax.low_pass(0.1, samples, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), method, groups=groups)
    step = lambda s, p: tx.update(None, s, p, grad_fn=grad_fn)
    params = jnp.array([3.0, 4.0])
    (jax.jit(step) if jit else step)(tx.init(params), params)
    jax.effects_barrier()
    assert grad_fn.evaluations == count


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.slow
def test_each_group_has_draws_of_its_own(samples):
    """The paper's LPF-SGD: M parts of the batch, each with its own sample."""
    method = sam_optax.low_pass(0.3, samples, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, groups=3)
    params, scale = jnp.array([1.0, -2.0, 0.5]), jnp.array([1.0, 10.0, 100.0])
    state = tx.init(params)
    updates, new = tx.update(None, state, params, grad_fn=lambda p, i: scale[i] * p)
    draw = lambda i: method.start_fn(params, state.perturbation_state, draw_index=i)
    expected = sum(scale[i // samples] * draw(i) for i in range(3 * samples)) / (3 * samples)
    assert_close(-updates, expected, 1e-5)
    _, after_one = method.update(params, state.perturbation_state, params)
    assert_same(new.perturbation_state, after_one)  # the key moves on once a step


def test_devices_have_draws_of_their_own_and_one_state():
    method = sam_optax.low_pass(0.3, 2, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method, axis_name="batch")
    params = jnp.array([1.0, -2.0, 0.5])
    state = tx.init(params)
    step = jax.pmap(
        lambda i: tx.update(None, state, params, grad_fn=lambda p: p),
        axis_name="batch",
        devices=jax.devices()[:2],
    )
    updates, new = step(jnp.arange(2))
    for leaf in jax.tree.leaves((updates, new)):
        assert_same(leaf[0], leaf[1])
    draws = [method.start_fn(params, state.perturbation_state, draw_index=i) for i in range(4)]
    assert len({vector(draw).tobytes() for draw in draws}) == 4
    assert_close(-updates[0], sum(draws) / 4, 1e-5)


def test_loss_of_value_and_grad_is_the_mean_over_the_draws():
    method = sam_optax.low_pass(0.3, 3, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
    params, loss_fn = jnp.array([1.0, -2.0]), lambda p: (0.5 * jnp.sum(p**2), {"first": p[0]})
    state = tx.init(params)
    draws = [method.start_fn(params, state.perturbation_state, draw_index=i) for i in range(3)]
    value_and_grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    _, new = jax.jit(lambda s: tx.update(None, s, params, value_and_grad_fn=value_and_grad_fn))(
        state
    )
    _, (loss, aux) = sam_optax.pop_first_pass(new)
    assert float(loss) == pytest.approx(np.mean([float(loss_fn(d)[0]) for d in draws]), rel=1e-5)
    assert float(aux["first"]) == pytest.approx(np.mean([float(d[0]) for d in draws]), rel=1e-5)


def test_schedules_and_steps_that_do_not_perturb():
    method = sam_optax.low_pass(lambda t: 0.1 * t, key=KEY)
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), method, when=sam_optax.every(2))
    params, points = jnp.array([3.0, 4.0]), []
    state = tx.init(params)
    for _ in range(5):
        _, state = tx.update(None, state, params, grad_fn=lambda p: points.append(p) or p)
    moved = [float(jnp.linalg.norm(p - params)) for p in points]
    assert len(points) == 5
    assert moved[0] == moved[1] == moved[3] == 0
    assert 0 < moved[2] < 5
    assert moved[4] > 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"gamma": -0.1}, ValueError, ["gamma", "-0.1"]),
        ({"samples": 0}, ValueError, ["samples", "0", "1"]),
        ({"samples": 1.5}, TypeError, ["samples", "1.5", "integer"]),
        ({"key": 3.0}, TypeError, ["key", "3.0", "PRNG"]),
        ({"noise_scale": "none"}, ValueError, ["noise_scale", "'none'", "'relative'"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        sam_optax.low_pass(**{"key": KEY, **arguments})
    for word in words:
        assert word in str(caught.value)


def test_other_errors():
    method = sam_optax.low_pass(0.1, 2, key=KEY)
    with pytest.raises(ValueError, match="low_pass needs the params"):
        method.update(jnp.ones(2), method.init(jnp.ones(2)))
    with pytest.raises(ValueError, match="averages over 2 samples: use samples=1"):
        sam_optax.alternating(BASE, method)
    with pytest.raises(ValueError, match=r"ascent_steps must be 1 .*low_pass.* got 3"):
        sam_optax.sharpness_aware(BASE, method, ascent_steps=3)
    tx = sam_optax.sharpness_aware(BASE, method)
    w = jnp.ones(2)
    with pytest.raises(ValueError, match=r"ascent_grad_fn cannot be used with.*low_pass"):
        tx.update(None, tx.init(w), w, grad_fn=lambda p: p, ascent_grad_fn=lambda p: p)


def test_inject_hyperparams_leaves_the_number_of_samples_alone():
    make = optax.inject_hyperparams(
        lambda gamma: sam_optax.sharpness_aware(
            optax.sgd(1.0), sam_optax.low_pass(gamma, 2, key=KEY)
        )
    )
    tx, w = make(gamma=0.0), jnp.ones(2)
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=lambda p: p)
    assert_same(updates, -w)
