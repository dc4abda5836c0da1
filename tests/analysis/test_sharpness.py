"""Sharpness and adaptive sharpness against known maxima."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Compilations, RuntimeCounted, assert_close, norm
from nets import dataset, examples, quadratic, relu_net

import sam_optax
from sam_optax import analysis


def test_rise_at_a_minimum():
    """The worst rise is ρ²λ₁/2 = .02, and one gradient step sees none of it."""
    loss, w = quadratic([4.0, 1.0]), jnp.zeros(2)
    found = analysis.sharpness(loss, w, rho=0.1)
    assert float(found.value) == pytest.approx(0.02, rel=1e-4)
    assert float(found.one_step) == 0
    assert_close(jnp.abs(found.eps), jnp.array([0.1, 0.0]), rtol=0.01)
    assert float(analysis.sharpness(loss, w, 0.1, restarts=0).value) == 0


@pytest.mark.parametrize("p", [1, 3, np.inf])
def test_a_linear_loss_rises_by_the_dual_norm(p):
    g = jnp.array([1.0, -2.0, 0.5])
    q = 1 if np.isinf(p) else np.inf if p == 1 else p / (p - 1)
    found = analysis.sharpness(lambda w: jnp.vdot(g, w), jnp.zeros(3), 0.1, p=p, steps=3)
    assert float(found.value) == pytest.approx(0.1 * np.linalg.norm(g, q), rel=1e-5)
    assert norm(found.eps, p) == pytest.approx(0.1, rel=1e-5)
    assert_close(found.one_step, found.value, rtol=1e-5)


@pytest.mark.parametrize("p", [1.5, 2, np.inf])
@pytest.mark.slow
def test_a_quadratic_against_a_search(p):
    """No point of the ball, of thousands, is higher; and the ascent beats its first step."""
    rng = np.random.default_rng(3)
    root = rng.normal(size=(3, 3))
    hessian, w = jnp.asarray(root @ root.T, jnp.float32), jnp.array([0.3, -0.2, 0.1])
    loss = lambda v: 0.5 * v @ hessian @ v
    found = analysis.sharpness(loss, w, rho=0.5, p=p, steps=40)
    draws = rng.normal(size=(20000, 3))
    draws *= 0.5 / np.linalg.norm(draws, p, axis=1, keepdims=True)
    searched = np.max(jax.vmap(loss)(w + jnp.asarray(draws, jnp.float32)) - loss(w))
    assert float(found.value) >= searched * (1 - 1e-4)
    assert float(found.value) <= searched * 1.02
    assert norm(found.eps, p) <= 0.5 * (1 + 1e-5)
    assert_close(loss(w + found.eps) - loss(w), found.value, rtol=1e-5)
    assert float(found.one_step) < float(found.value)


@pytest.mark.parametrize(
    ("method", "measure", "p"),
    [
        (sam_optax.sam(0.3), analysis.sharpness, 2),
        pytest.param(
            sam_optax.asam(0.3, 0.0, p=np.inf),
            analysis.adaptive_sharpness,
            np.inf,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_step_is_the_perturbation_of_training(method, measure, p):
    params, loss = relu_net(), dataset()
    found = measure(loss, params, 0.3, p=p, steps=1, restarts=0)
    eps, _ = method.update(loss.value_and_grad(params)[1], method.init(params), params)
    assert_close(found.eps, eps, rtol=1e-5)
    rise = analysis.loss_rise(loss, params, method)
    assert_close((found.one_step, found.value), (rise, rise), rtol=1e-5)


@pytest.mark.slow
def test_m_sharpness_is_the_mean_over_groups():
    params, loss = relu_net(), dataset(n=13)
    found = analysis.sharpness(loss, params, 0.1, steps=3, group_size=8)
    parts = zip(*(jnp.split(leaf, [8]) for leaf in examples(13)), strict=True)
    losses = [analysis.DatasetLoss.from_examples(loss.loss_fn, part, 8) for part in parts]
    groups = [analysis.sharpness(part, params, 0.1, steps=3).value for part in losses]
    assert_close(found.groups, jnp.array(groups), rtol=1e-4)
    assert_close(found.value, np.average(groups, weights=[8, 5]), rtol=1e-4)
    assert abs(np.mean(groups) - float(found.value)) > 1e-6
    again = dataset(n=13)
    with Compilations() as compilations:
        analysis.sharpness(again, params, 0.1, steps=3, group_size=8)
    assert compilations.count == 0


def test_both_sides_of_a_minimum_are_tried():
    """L = w²/2 + w³ rises more on the right: a single random start would be a toss of a coin."""
    loss = lambda w: jnp.sum(w**2 / 2 + w**3)
    for seed in range(4):
        found = analysis.sharpness(loss, jnp.zeros(1), 0.1, key=seed)
        assert float(found.value) == pytest.approx(0.006, rel=1e-4)
        assert float(jnp.min(found.starts[1:])) == pytest.approx(0.004, rel=1e-4)


def test_cost():
    """(1 + restarts) · steps gradients and as many losses as starts."""
    counted = RuntimeCounted(quadratic([4.0, 1.0]))
    analysis.sharpness(counted, jnp.ones(2), steps=5, restarts=2)
    jax.effects_barrier()
    assert counted.evaluations == 3 * 5 + 3


def test_bfloat16_keeps_its_dtype():
    w = jnp.ones(4, jnp.bfloat16)
    found = analysis.sharpness(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), w, 0.5)
    assert found.eps.dtype == jnp.bfloat16
    assert float(found.value) == pytest.approx(2 * 2 * 0.5 + 0.25, rel=0.01)


def test_not_finite_points_are_left():
    """NaN in part of the ball: the largest rise of the rest."""
    loss = lambda w: jnp.where(w > 1.05, jnp.nan, w)
    found = analysis.sharpness(loss, jnp.array(1.0), 0.1)
    assert 0.02 < float(found.value) < 0.051


def test_random_starts_and_states_of_perturbations():
    params, loss = relu_net(), dataset()
    method = sam_optax.rsam(0.3, gamma=0.3, key=jax.random.key(0))
    state = method.init(params)
    _, grads = loss.value_and_grad(method.start_fn(params, state))
    perturbed, after = method.perturb_fn(params, grads, state)
    rise = analysis.loss_rise(loss, params, method, state)
    assert_close(rise, loss(perturbed) - loss(params), rtol=1e-5)
    assert float(analysis.loss_rise(loss, params, method, after)) != float(rise)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rho": -1.0}, ValueError, "rho must be in"),
        ({"p": 0.5}, ValueError, "p must be in"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"restarts": -1}, ValueError, "restarts must be at least 0"),
        ({"group_size": 2}, TypeError, "DatasetLoss"),
        ({"loss": 3.0}, TypeError, "loss must be a function"),
    ],
)
def test_errors(options, error, message):
    arguments = {"loss": quadratic([1.0]), "params": jnp.ones(1)} | options
    with pytest.raises(error, match=message):
        analysis.sharpness(**arguments)
