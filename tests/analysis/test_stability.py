"""Gradient stability and alignment against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RuntimeCounted, vector
from nets import dataset, examples, quadratic, relu_net, tanh_losses

import sam_optax
from sam_optax import analysis


def cosine(a, b):
    a, b = vector(a), vector(b)
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def moved(params, grads, rho):
    norm = np.linalg.norm(vector(grads))
    return jax.tree.map(lambda w, g: w + rho * g / norm, params, grads)


@pytest.mark.slow
def test_curves_from_the_weights():
    params, loss = relu_net(), dataset(losses=tanh_losses)
    rhos = [0.0, 0.1, 0.5]
    found = analysis.gradient_stability(loss, params, rhos, [0.0], draws=2)
    grads = loss.value_and_grad(params)[1]
    for i, rho in enumerate(rhos):
        point = moved(params, grads, rho)
        value, there = loss.value_and_grad(point)
        assert float(found.loss[0, 1, i]) == pytest.approx(float(value), rel=1e-5)
        assert float(found.cosine[0, 1, i]) == pytest.approx(cosine(grads, there), abs=1e-5)
    assert float(found.cosine[0, 0, 0]) == pytest.approx(1, abs=1e-6)
    assert float(found.start_loss[0, 0]) == pytest.approx(float(loss(params)), rel=1e-6)


@pytest.mark.slow
def test_random_starts_are_those_of_the_library():
    params, loss = relu_net(), dataset(losses=tanh_losses)
    found = analysis.gradient_stability(loss, params, [0.3], [0.0, 0.2, 0.4], draws=3)
    assert found.cosine.shape == (3, 3, 1)
    assert np.ptp(found.start_loss[0]) == 0
    assert np.all(np.ptp(found.start_loss[1:], axis=1) > 0)
    method = sam_optax.random_start(sam_optax.sam(), 0.4, key=jax.random.key(0))
    start = method.start_fn(params, method.init(params), draw_index=2)
    grads = loss.value_and_grad(start)[1]
    value, there = loss.value_and_grad(moved(start, grads, 0.3))
    assert float(found.start_loss[2, 2]) == pytest.approx(float(loss(start)), rel=1e-5)
    assert float(found.loss[2, 2, 0]) == pytest.approx(float(value), rel=1e-5)
    assert float(found.cosine[2, 2, 0]) == pytest.approx(cosine(grads, there), abs=1e-5)


@pytest.mark.slow
def test_scale_of_the_noise():
    """γ ‖w_j‖^½ for each kernel, or the same for all weights, by name."""
    w = {"kernel": jnp.ones((5000, 2)) * jnp.array([0.01, 1.0])}
    spread = lambda w: jnp.mean((w["kernel"][:, 1] - 1) ** 2)
    kernelwise, isotropic = (
        analysis.gradient_stability(spread, w, [0.0], [0.1], draws=1, noise_scale=scale)
        for scale in ("sqrt_norm", "isotropic")
    )
    norm = np.sqrt(5000)
    assert float(kernelwise.start_loss[0, 0]) == pytest.approx(0.01 * norm, rel=0.1)
    assert float(isotropic.start_loss[0, 0]) == pytest.approx(0.01, rel=0.1)


def test_a_bowl_turns_the_gradient():
    """On ½(4w₁² + w₂²) the gradient turns towards w₁ on the way up; on a plane it does not."""
    bowl, plane = (
        analysis.gradient_stability(loss, jnp.array([0.1, 1.0]), [0.0, 1.0, 5.0], [0.0], draws=1)
        for loss in (quadratic([4.0, 1.0]), lambda w: 3 * w[0] + w[1])
    )
    assert np.all(np.diff(bowl.cosine[0, 0]) < -1e-3)
    np.testing.assert_allclose(plane.cosine, 1, atol=1e-6)


def test_cost_without_noise():
    """One draw stands for all where there is nothing to draw."""
    counted = RuntimeCounted(quadratic([4.0, 1.0]))
    analysis.gradient_stability(counted, jnp.ones(2), [0.1, 0.2], [0.0, 0.1], draws=3)
    jax.effects_barrier()
    assert counted.evaluations == 4 * (1 + 2)


def test_zero_gradient_has_no_direction():
    found = analysis.gradient_stability(quadratic([1.0]), jnp.zeros(1), [0.1], [0.0])
    assert np.all(np.isnan(found.cosine))
    assert np.all(np.asarray(found.loss) == 0)


@pytest.mark.slow
def test_alignment_of_a_network():
    params, loss = relu_net(), dataset(losses=tanh_losses)
    found = analysis.alignment(loss, params, batch_size=10)
    full = vector(loss.value_and_grad(params)[1])
    assert float(found.full_norm) == pytest.approx(np.linalg.norm(full), rel=1e-5)
    assert found.cosine.shape == (2,)
    for i, (a, b) in enumerate([(0, 10), (10, 20)]):
        batch = jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], examples())
        grads = jax.jit(jax.grad(lambda p, b: jnp.mean(tanh_losses(p, b))))(params, batch)
        g = vector(grads)
        along = g @ full / np.linalg.norm(full)
        residual = g - along * full / np.linalg.norm(full)
        assert float(found.cosine[i]) == pytest.approx(cosine(grads, full), abs=1e-5)
        assert float(found.full[i]) == pytest.approx(along, rel=1e-4)
        assert float(found.residual[i]) == pytest.approx(np.linalg.norm(residual), rel=1e-4)
    # Components along the full gradient average to its norm.
    mean = np.mean(found.full)
    assert mean == pytest.approx(float(found.full_norm), rel=1e-4)


@pytest.mark.slow
def test_an_estimate_of_the_full_gradient_is_removed():
    params, loss = relu_net(), dataset(losses=tanh_losses)
    _, full = loss.value_and_grad(params)
    found = analysis.alignment(loss, params, estimate=full, sigma=0.7)
    assert float(found.estimate) == pytest.approx(1, abs=1e-5)
    along = np.asarray(found.full) - 0.7 * float(found.full_norm)
    np.testing.assert_allclose(found.friendly, along / np.hypot(along, found.residual), atol=1e-5)
    none = analysis.alignment(loss, params, estimate=full, sigma=0.0)
    np.testing.assert_allclose(none.friendly, none.cosine, atol=1e-5)
    assert analysis.alignment(loss, params).friendly is None


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error", "message"),
    [
        ("gradient_stability", ([],), {}, ValueError, "rhos must hold at least one"),
        ("gradient_stability", ([-1.0],), {}, ValueError, "rhos must be in"),
        ("gradient_stability", ([1.0], [-0.1]), {}, ValueError, "gammas must be in"),
        ("gradient_stability", ([1.0],), {"draws": 0}, ValueError, "draws must be at least 1"),
        ("alignment", (), {}, TypeError, "DatasetLoss"),
    ],
)
def test_errors(function, arguments, options, error, message):
    with pytest.raises(error, match=message):
        getattr(analysis, function)(quadratic([1.0]), jnp.ones(1), *arguments, **options)
