"""The spectral density against known spectra."""

import jax.numpy as jnp
import numpy as np
import pytest
from nets import quadratic, with_spectrum

from sam_optax import analysis


def test_weights_of_a_known_spectrum():
    """For a diagonal Hessian and probes of signs, each eigenvalue weighs its share exactly."""
    spectrum = np.repeat([0.0, 1.0, 7.0], [150, 40, 10])
    found = analysis.spectral_density(with_spectrum(spectrum), jnp.ones(200), steps=20, probes=3)
    assert not found.exact
    for value, share in ((0.0, 0.75), (1.0, 0.2), (7.0, 0.05)):
        near = np.abs(found.nodes - value) < 0.1
        np.testing.assert_allclose(np.sum(found.weights * near, axis=1), share, rtol=1e-4)


def test_small_hessians_are_exact():
    found = analysis.spectral_density(quadratic([1.0, 2.0, 2.0]), jnp.ones(3), sigma=0.1)
    assert found.exact
    np.testing.assert_allclose(found.nodes, [[1, 2, 2]], rtol=1e-6)
    bump = np.exp(-0.5 * ((found.grid[:, None] - [1, 2, 2]) / 0.1) ** 2)
    expected = bump.sum(1) / 3 / (0.1 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(found.density, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 0}, "probes must be at least 1"),
        ({"points": 1}, "points must be at least 2"),
        ({"sigma": 0.0}, "sigma must be positive"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        analysis.spectral_density(quadratic([1.0]), jnp.ones(1), **options)
