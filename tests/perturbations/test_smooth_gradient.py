"""VaSSO against its formula, its limits and its numerics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from family import BASE, LR, MOMENTUM, START, gap, numpy_gradients, run
from helpers import assert_same, norm, vector

import sam_optax

RHO = 0.3


def vasso(decay, **options):
    return optax.chain(sam_optax.smooth_gradient(decay, **options), sam_optax.sam(RHO))


def reference(gradient_of):
    return ref.train(START, numpy_gradients(), gradient_of, LR, MOMENTUM)


@pytest.mark.parametrize("start", ["first_gradient", "zero", "bias_corrected"])
def test_trajectories(start):
    """The direction of the corrected average is that of the one from 0."""
    points, _ = run(sam_optax.sharpness_aware(BASE, vasso(0.6, ema_start=start)))
    from_zero = start != "first_gradient"
    assert gap(points, reference(ref.vasso(RHO, 0.4, from_zero=from_zero))) < 1e-12
    # The other start; the weight of the old average for that of the new gradient; the friendly
    # residual.
    assert gap(points, reference(ref.vasso(RHO, 0.4, from_zero=not from_zero))) > 1e-3
    assert gap(points, reference(ref.vasso(RHO, 0.6, from_zero=from_zero))) > 1e-3
    past = []

    def residual(t, w, grad):
        past.append(grad(w))
        return grad(w + RHO * ref.unit(past[-1] - np.mean(past, axis=0)))

    assert gap(points, reference(residual)) > 1e-3


@pytest.mark.parametrize(
    ("start", "expected"), [("first_gradient", (0.97014, 0.24254)), ("zero", (0.62470, 0.78087))]
)
def test_by_hand(start, expected):
    """g₁ = (1, 0) and g₂ = (0, 1): d₂ = (0.8, 0.2), or (0.16, 0.2) from 0."""
    method = sam_optax.smooth_gradient(0.8, ema_start=start)
    g = jnp.array([1.0, 0.0])
    d, state = method.update(g, method.init(g))
    np.testing.assert_allclose(d, g if start == "first_gradient" else 0.2 * g, rtol=1e-6)
    d, _ = method.update(jnp.flip(g), state)
    np.testing.assert_allclose(ref.unit(vector(d)), expected, atol=5e-6)


def test_decay_0_is_sam_to_the_bit():
    gs = [jnp.array([1.0, -2.0, 0.1]), jnp.array([0.3, 0.0, -7.0])]
    method = sam_optax.smooth_gradient(0.0)
    state = method.init(gs[0])
    for g in gs:
        d, state = method.update(g, state)
        assert_same(d, g)


def test_the_first_step_is_sams():
    one = run(sam_optax.sharpness_aware(BASE, vasso(0.8)), 2)[0]
    sam = run(sam_optax.sharpness_aware(BASE, sam_optax.sam(RHO)), 2)[0]
    assert gap(one[:1], sam[:1]) < 1e-14
    assert gap(one, sam) > 1e-4


def test_zero_gradients_shrink_the_average_and_a_zero_average_is_no_direction():
    method = sam_optax.as_perturbation(vasso(0.5))
    zero = jnp.zeros(2)
    eps, state = method.update(zero, method.init(zero))
    assert norm(eps) == 0
    _, state = method.update(jnp.array([3.0, 4.0]), state)  # the second: its weight is ½
    eps, state = method.update(zero, state)
    np.testing.assert_allclose(eps, RHO * np.array([0.6, 0.8]), rtol=1e-6)
    np.testing.assert_allclose(state[0].ema, [0.75, 1.0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes_and_holes(dtype):
    params = {"w": jnp.ones(2, dtype), "n": None, "i": jnp.arange(2)}
    method = sam_optax.smooth_gradient(0.75, ema_start="zero")
    state = method.init(params)
    assert state.ema["i"] is None
    for _ in range(2):
        d, state = method.update({**params, "w": jnp.array([1, 2], dtype)}, state)
    assert d["w"].dtype == state.ema["w"].dtype == dtype
    np.testing.assert_allclose(vector(d["w"]), (1 - 0.75**2) * np.array([1, 2]), rtol=1e-2)
    # A leaf without a gradient keeps its average.
    d, later = method.update({"w": None, "n": None, "i": None}, state)
    assert_same(later.ema, state.ema)
    assert d["w"] is None


def test_schedules():
    method = sam_optax.smooth_gradient(lambda t: t / (t + 1))  # the mean of all
    state, g = method.init(jnp.zeros(1)), [3.0, 5.0, 10.0]
    for x in g:
        d, state = method.update(jnp.array([x]), state)
    assert float(d[0]) == pytest.approx(6.0)
    assert int(state.step) == 3


@pytest.mark.parametrize("decay", [1.0, -0.1, 1.1])
def test_bad_arguments(decay):
    with pytest.raises(ValueError, match=rf"decay must be in \[0, 1\), got {decay}"):
        sam_optax.smooth_gradient(decay)
    with pytest.raises(ValueError, match=r"ema_start must be one of .*'zero'.*got 'g'"):
        sam_optax.smooth_gradient(ema_start="g")


def test_devices_hold_the_mean_average():
    """m-sharpness: each device's d has its own gradient, the state the mean."""
    method = vasso(0.5, ema_start="zero")
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), method, axis_name="batch")
    w = jnp.zeros(2)
    step = jax.pmap(
        lambda c, s: tx.update(None, s, w, grad_fn=lambda p: p - c)[1],
        axis_name="batch",
        in_axes=(0, None),
        devices=jax.devices()[:2],
    )
    state = step(jnp.array([[1.0, 0.0], [3.0, -2.0]]), tx.init(w))
    np.testing.assert_allclose(state.perturbation_state[0].ema, [[-1.0, 0.5]] * 2)
