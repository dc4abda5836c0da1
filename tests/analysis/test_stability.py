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
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def expected_along(loss, start, rho):
    """The cosine and the loss at the end of the ascent step."""
    grads = loss.value_and_grad(start)[1]
    norm = np.linalg.norm(vector(grads))
    value, there = loss.value_and_grad(jax.tree.map(lambda w, g: w + rho * g / norm, start, grads))
    return cosine(vector(grads), vector(there)), value


@pytest.mark.slow
def test_curves_from_the_weights_and_from_random_starts():
    params, loss, rhos = relu_net(), dataset(losses=tanh_losses), [0.0, 0.1, 0.5]
    found = analysis.gradient_stability(loss, params, rhos, [0.0, 0.2, 0.4], draws=3)
    assert np.ptp(found.start_loss[0]) == 0
    assert np.all(np.ptp(found.start_loss[1:], axis=1) > 0)
    method = sam_optax.random_start(sam_optax.sam(), 0.4, key=jax.random.key(0))
    noisy = method.start_fn(params, method.init(params), draw_index=2)
    for row, start in ((0, params), (2, noisy)):
        np.testing.assert_allclose(found.start_loss[row, 2], loss(start), rtol=1e-5)
        expected = np.transpose([expected_along(loss, start, rho) for rho in rhos])
        np.testing.assert_allclose(found.cosine[row, 2], expected[0], atol=1e-5)
        np.testing.assert_allclose(found.loss[row, 2], expected[1], rtol=1e-5)


@pytest.mark.slow
def test_scale_of_the_noise():
    """γ ‖w_j‖^½ for each kernel, or the same for all weights, by name."""
    w = {"kernel": jnp.ones((5000, 2)) * jnp.array([0.01, 1.0])}
    spread = lambda w: jnp.mean((w["kernel"][:, 1] - 1) ** 2)
    for scale, factor in (("sqrt_norm", np.sqrt(5000)), ("isotropic", 1)):
        found = analysis.gradient_stability(spread, w, [0.0], [0.1], draws=1, noise_scale=scale)
        assert float(found.start_loss[0, 0]) == pytest.approx(0.01 * factor, rel=0.1)


def test_cost_without_noise():
    """One draw stands for all where there is nothing to draw."""
    counted = RuntimeCounted(quadratic([4.0, 1.0]))
    analysis.gradient_stability(counted, jnp.ones(2), [0.1, 0.2], [0.0, 0.1], draws=3)
    jax.effects_barrier()
    assert counted.evaluations == 4 * (1 + 2)


def test_a_zero_gradient_has_no_direction():
    found = analysis.gradient_stability(quadratic([1.0]), jnp.zeros(1), [0.1], [0.0])
    assert np.all(np.isnan(found.cosine))
    assert np.all(np.asarray(found.loss) == 0)


@pytest.mark.slow
def test_alignment_of_a_network():
    params, loss = relu_net(), dataset(losses=tanh_losses)
    found = analysis.alignment(loss, params, batch_size=10)
    full = vector(loss.value_and_grad(params)[1])
    np.testing.assert_allclose(found.full_norm, np.linalg.norm(full), rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p, batch: jnp.mean(tanh_losses(p, batch))))
    for i, rows in enumerate((slice(0, 10), slice(10, 20))):
        g = vector(gradient(params, jax.tree.map(lambda leaf, rows=rows: leaf[rows], examples())))
        along = g @ full / np.linalg.norm(full)
        residual = np.linalg.norm(g - along * full / np.linalg.norm(full))
        assert float(found.cosine[i]) == pytest.approx(cosine(g, full), abs=1e-5)
        assert float(found.full[i]) == pytest.approx(along, rel=1e-4)
        assert float(found.residual[i]) == pytest.approx(residual, rel=1e-4)


@pytest.mark.slow
def test_an_estimate_of_the_full_gradient_is_removed():
    params, loss = relu_net(), dataset(losses=tanh_losses)
    _, full = loss.value_and_grad(params)
    found = analysis.alignment(loss, params, estimate=full, sigma=0.7)
    assert float(found.estimate) == pytest.approx(1, abs=1e-5)
    along = np.asarray(found.full) - 0.7 * float(found.full_norm)
    np.testing.assert_allclose(found.friendly, along / np.hypot(along, found.residual), atol=1e-5)
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
