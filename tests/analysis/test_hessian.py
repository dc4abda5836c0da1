"""Eigenvalues of the Hessian against dense decompositions, and where Lanczos breaks down."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import init_mlp, mlp, x64
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nets import cross_entropy, quadratic, with_spectrum

from sam_optax import analysis
from sam_optax.analysis import _krylov

PARAMS = init_mlp(2, (3, 16, 4))  # 4·16 + 17·4 = 132 weights
_rng = np.random.default_rng(5)
DATA = jnp.asarray(_rng.normal(size=(24, 3)), jnp.float32), jnp.asarray(_rng.integers(4, size=24))


def losses(params, batch):
    return cross_entropy(mlp(params, batch[0]), batch[1])


LOSS = analysis.DatasetLoss.from_examples(losses, DATA, 8)


@functools.cache
def dense_eigenvalues():
    """Of the loss of all examples at once, ascending."""
    flat, unravel = ravel_pytree(PARAMS)
    matrix = jax.jit(jax.hessian(lambda v: jnp.mean(losses(unravel(v), DATA))))(flat)
    return np.linalg.eigvalsh(np.asarray(matrix, np.float64))


def largest(values, k, which):
    order = np.argsort(-np.abs(values) if which == "magnitude" else -values)
    return values[order[:k]]


def rotated(spectrum):
    """A basis of eigenvectors (columns), and the loss with this spectrum in it."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=2 * (len(spectrum),)))[0]
    hessian = jnp.asarray(basis * spectrum @ basis.T, jnp.result_type(float))
    loss = analysis.DatasetLoss(lambda w, h: w @ h[0] @ w / 2, None, remainder=hessian[None])
    return jnp.asarray(basis, hessian.dtype), loss


both_orders = pytest.mark.parametrize("which", ["algebraic", "magnitude"])


@both_orders
@pytest.mark.parametrize("steps", [45, 80])
@pytest.mark.slow
def test_a_network(which, steps):
    """45 steps of Lanczos, and 80, with which the Hessian of 132 rows is taken as a whole."""
    found = analysis.hessian_eigenvalues(LOSS, PARAMS, 5, which=which, steps=steps)
    assert found.exact == (steps == 80)
    expected = largest(dense_eigenvalues(), 5, which)
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=1e-4 * abs(expected[0]))
    assert float(found.ratio()) == pytest.approx(expected[0] / expected[4], rel=1e-3)
    for i in range(5):
        vector = jax.tree.map(lambda leaf, i=i: leaf[i], found.vectors)
        product, v = (ravel_pytree(t)[0] for t in (LOSS.hvp(PARAMS, vector), vector))
        assert float(jnp.linalg.norm(v)) == pytest.approx(1, rel=1e-5)
        residual = float(jnp.linalg.norm(product - found.values[i] * v))
        assert residual == pytest.approx(float(found.residuals[i]), abs=1e-5)


# ---------------------------------------------------------------- Krylov spaces that end early

SPECTRA = {
    "zero": np.zeros(200),
    "identity": np.ones(200),
    "two values": np.repeat([3.0, 1.0], 100),
    "low rank": np.r_[4.0, 2.0, np.zeros(198)],
    "repeated": np.r_[5.0, 5.0, 5.0, np.linspace(-0.9, 1, 197)],
    "negative": np.r_[-1.0, -1.5, -2.0, -3.0, np.linspace(-9, -8, 196)],
    "both signs": np.r_[3.0, 2.0, -7.0, np.linspace(-1, 0.1, 197)],
}


@both_orders
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.slow
def test_spectra_that_break_lanczos_down(name, which):
    """Krylov spaces exhausted after a few steps, and eigenvalues of which they hold one copy."""
    loss = with_spectrum(np.random.default_rng(0).permutation(SPECTRA[name]))
    found = analysis.hessian_eigenvalues(loss, jnp.ones(200), 4, which=which, steps=60)
    assert not found.exact
    expected = largest(SPECTRA[name], 4, which)
    # The fourth may lie in a continuum.
    loose = 0.02 if name in ("negative", "both signs") else 2e-4
    np.testing.assert_allclose(found.values, expected, atol=loose * max(1, abs(expected[0])))
    assert float(found.values[0]) == pytest.approx(expected[0], rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("top", [np.full(400, 3.0), np.r_[2.0, np.zeros(399)], np.zeros(400)])
def test_exhausted_spaces_under_debug_nans(top):
    """The step after the last is not divided by its length, which is zero."""
    loss = with_spectrum(top)
    with jax.debug_nans(True):
        found = analysis.hessian_eigenvalues(loss, jnp.ones(400), 2)
        density = analysis.spectral_density(loss, jnp.ones(400), probes=2)
    np.testing.assert_allclose(found.values, top[:2], rtol=1e-6, atol=1e-6)
    trace = np.sum(density.weights * density.nodes, axis=1) * 400
    np.testing.assert_allclose(trace, np.sum(top), rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-26, 1e21])
@pytest.mark.slow
def test_spectra_whose_squares_leave_the_range_of_float32(scale):
    spectrum = np.linspace(-1, 2, 200) * scale
    found = analysis.hessian_eigenvalues(with_spectrum(spectrum), jnp.ones(200), 2, steps=60)
    np.testing.assert_allclose(found.values, spectrum[:-3:-1], rtol=1e-3)


@pytest.mark.slow
def test_one_reorthogonalization_is_too_few():
    """An isolated eigenvalue is found soon, and rounding then brings its vector back."""
    spectrum = jnp.asarray(np.r_[1e4, np.linspace(0, 1, 199)], jnp.float32)
    assert int(_krylov.lanczos(lambda v: spectrum * v, jnp.ones(200), 60).usable) == 60


@pytest.mark.slow
def test_copies_that_take_further_runs():
    """In float64 no rounding brings copies into a run of 20 steps: only further runs do."""
    with x64():
        _, loss = rotated(SPECTRA["repeated"])
        found = analysis.hessian_eigenvalues(loss, jnp.ones(200), 3, steps=20)
        assert found.values.dtype == jnp.float64
        np.testing.assert_allclose(found.values, 5, rtol=1e-5)


@pytest.mark.parametrize("shift", [-9.0, 0.0])
@pytest.mark.slow
def test_what_is_known_does_not_come_back(shift):
    """Rounding revives known directions; at the low end of the spectrum they are not in the way."""
    basis, loss = rotated(np.r_[-1.0, -1.2, -1.5, np.linspace(-9, -8, 197)])
    start = jnp.asarray(np.random.default_rng(1).normal(size=200), jnp.float32)
    run = _krylov.deflated_lanczos(loss, jnp.ones(200), start, basis.T[:3], shift, 60)
    values, _ = _krylov.decompose(run.diagonal, run.off_diagonal, int(run.usable))
    assert (values[-1] < -7.9) == (shift < -8)  # with shift 0 there is a value near 0


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(("which", "value"), [("algebraic", 1.0), ("magnitude", -5.0)])
def test_which_names_what_is_returned(which, value):
    found = analysis.hessian_eigenvalues(quadratic([1.0, -5.0]), jnp.ones(2), 1, which=which)
    assert float(found.values[0]) == pytest.approx(value)


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
@pytest.mark.slow
def test_sharded_params(axes):
    kinds = (getattr(jax.sharding.AxisType, axes),) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    loss = lambda x: analysis.DatasetLoss(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2, axis=1), x)
    sharded = loss(place(x, None, "data")), place(w, None, "model")
    found = analysis.hessian_eigenvalues(*sharded, 2, steps=40)
    whole = analysis.hessian_eigenvalues(loss(x), w, 128, steps=128)
    assert whole.exact
    np.testing.assert_allclose(found.values, whole.values[:2], rtol=1e-4)
    assert found.vectors.shape == (2, 8, 16)
    density = analysis.spectral_density(*sharded, steps=10, probes=100)
    square = np.mean(np.sum(density.weights * density.nodes**2, axis=1))
    assert square == pytest.approx(float(jnp.mean(whole.values**2)), rel=0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 3}, ValueError, "k must be at most 2"),
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"steps": 0.5}, TypeError, "steps must be a static integer"),
        ({"which": "smallest"}, ValueError, "which must be 'algebraic' or 'magnitude'"),
        ({"params": jnp.ones(2, jnp.complex64)}, ValueError, "params must be real"),
        ({"loss": lambda w: jnp.sum(w**2) * jnp.nan}, ValueError, "not finite"),
        (
            {"loss": with_spectrum(np.full(9, np.inf)), "params": jnp.ones(9), "steps": 4},
            ValueError,
            "not finite",
        ),
    ],
)
def test_errors(options, error, message):
    arguments = {"loss": quadratic([1.0, 2.0]), "params": jnp.ones(2), "k": 1} | options
    with pytest.raises(error, match=message):
        analysis.hessian_eigenvalues(**arguments)


def test_the_ratio_of_what_was_not_computed():
    found = analysis.hessian_eigenvalues(quadratic([1.0, 2.0]), jnp.ones(2), 2)
    assert float(found.ratio(2)) == 2
    with pytest.raises(ValueError, match=r"i must be in \[1, 2\]"):
        found.ratio()
