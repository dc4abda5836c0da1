"""Eigenvalues of the Hessian against dense decompositions, and where Lanczos breaks down."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import init_mlp, mlp, x64
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from nets import quadratic, with_spectrum

from sam_optax import analysis
from sam_optax.analysis import _krylov


def data():
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.normal(size=(24, 3)), jnp.float32), jnp.asarray(rng.integers(4, size=24))


def losses(params, batch):
    log_p = jax.nn.log_softmax(mlp(params, batch[0]))
    return -jnp.take_along_axis(log_p, batch[1][:, None], axis=1)[:, 0]


def net_loss():
    """4·16 + 17·4 = 132 weights, three batches."""
    params = init_mlp(2, (3, 16, 4))
    return analysis.DatasetLoss.from_examples(losses, data(), 8), params


@functools.cache
def dense_eigenvalues():
    """Of the loss of all examples at once."""
    flat, unravel = ravel_pytree(init_mlp(2, (3, 16, 4)))
    matrix = jax.jit(jax.hessian(lambda v: jnp.mean(losses(unravel(v), data()))))(flat)
    matrix = np.asarray(matrix, np.float64)
    return np.linalg.eigvalsh((matrix + matrix.T) / 2)


def largest(values, k, which):
    order = np.argsort(-np.abs(values) if which == "magnitude" else -values)
    return values[order[:k]]


@pytest.mark.parametrize("which", ["algebraic", "magnitude"])
@pytest.mark.parametrize("steps", [45, 80])
@pytest.mark.fast("80-algebraic")
def test_a_network(which, steps):
    """45 steps of Lanczos, and 80, with which the Hessian of 132 rows is taken as a whole."""
    loss, params = net_loss()
    found = analysis.hessian_eigenvalues(loss, params, 5, which=which, steps=steps)
    assert found.exact == (steps == 80)
    expected = largest(dense_eigenvalues(), 5, which)
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=1e-4 * abs(expected[0]))
    assert float(found.ratio()) == pytest.approx(expected[0] / expected[4], rel=1e-3)
    for i in range(5):
        vector = jax.tree.map(lambda leaf, i=i: leaf[i], found.vectors)
        product, v = (ravel_pytree(t)[0] for t in (loss.hvp(params, vector), vector))
        assert float(jnp.linalg.norm(v)) == pytest.approx(1, rel=1e-5)
        residual = float(jnp.linalg.norm(product - found.values[i] * v))
        assert residual == pytest.approx(float(found.residuals[i]), abs=1e-5)


@pytest.mark.slow
def test_too_few_steps_say_so():
    """Residuals bound the distance to an eigenvalue also where it is large."""
    loss, params = net_loss()
    found = analysis.hessian_eigenvalues(loss, params, 3, steps=4)
    true = dense_eigenvalues()
    distances = np.min(np.abs(np.asarray(found.values)[:, None] - true), axis=1)
    assert np.all(distances <= np.asarray(found.residuals) + 1e-5)
    enough = analysis.hessian_eigenvalues(loss, params, 3)
    assert float(found.residuals[2]) > 100 * float(enough.residuals[2])
    assert np.all(np.asarray(found.values) <= true[::-1][:3] + 1e-5)  # never above


SPECTRA = {
    "zero": np.zeros(200),
    "identity": np.ones(200),
    "two values": np.repeat([3.0, 1.0], 100),
    "low rank": np.r_[4.0, 2.0, np.zeros(198)],
    "repeated": np.r_[5.0, 5.0, 5.0, np.linspace(-0.9, 1, 197)],
    "negative": np.r_[-1.0, -1.5, -2.0, -3.0, np.linspace(-9, -8, 196)],
    "both signs": np.r_[3.0, 2.0, -7.0, np.linspace(-1, 0.1, 197)],
}


@pytest.mark.parametrize("which", ["algebraic", "magnitude"])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.slow
def test_spectra_that_break_lanczos_down(name, which):
    """Krylov spaces exhausted after a few steps, and eigenvalues of which they hold one copy."""
    spectrum = SPECTRA[name]
    rotation = np.random.default_rng(0).permutation(200)
    loss = with_spectrum(spectrum[rotation])
    found = analysis.hessian_eigenvalues(loss, jnp.ones(200), 4, which=which, steps=60)
    assert not found.exact
    expected = largest(spectrum, 4, which)
    tolerance = 2e-4 * max(1.0, abs(expected[0]))
    if name in ("negative", "both signs"):  # the fourth lies in a continuum
        np.testing.assert_allclose(found.values, expected, atol=0.02, rtol=0)
        expected, found = expected[:1], found._replace(values=found.values[:1])
    np.testing.assert_allclose(found.values, expected, atol=tolerance, rtol=0)


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
def test_spectra_whose_squares_leave_the_range_of_float32(scale):
    spectrum = np.linspace(-1, 2, 200) * scale
    found = analysis.hessian_eigenvalues(with_spectrum(spectrum), jnp.ones(200), 2, steps=60)
    np.testing.assert_allclose(found.values, spectrum[:-3:-1], rtol=1e-3)


def test_one_reorthogonalization_is_too_few():
    """An isolated eigenvalue is found soon, and rounding then brings its vector back."""
    spectrum = jnp.asarray(np.r_[1e4, np.linspace(0, 1, 199)], jnp.float32)
    assert int(_krylov.lanczos(lambda v: spectrum * v, jnp.ones(200), 60).usable) == 60


@pytest.mark.slow
def test_a_single_run_misses_copies():
    """What the further runs are for: one Krylov space has one copy of a repeated eigenvalue."""
    spectrum = jnp.asarray(SPECTRA["repeated"], jnp.float32)
    run = _krylov.lanczos(lambda v: spectrum * v, jnp.ones(200), 40)
    m = int(run.usable)
    matrix = np.diag(run.diagonal[:m]) + np.diag(run.off_diagonal[: m - 1], 1)
    ritz = np.linalg.eigvalsh(np.asarray(matrix), UPLO="U")
    assert np.sum(ritz > 4) == 1


@pytest.mark.slow
def test_copies_that_take_further_runs():
    """In float64 no rounding brings copies into a run of 20 steps: only further runs do."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(200, 200)))[0]
    spectrum = np.r_[5.0, 5.0, 5.0, np.linspace(-0.9, 1.0, 197)]
    with x64():
        hessian = jnp.asarray(basis * spectrum @ basis.T)
        loss = analysis.DatasetLoss(lambda w, h: w @ h[0] @ w / 2, None, remainder=hessian[None])
        found = analysis.hessian_eigenvalues(loss, jnp.ones(200), 3, steps=20)
        assert found.values.dtype == jnp.float64
        np.testing.assert_allclose(found.values[:2], 5, rtol=1e-9)
        np.testing.assert_allclose(found.values[2], 5, rtol=1e-5)


@pytest.mark.parametrize("shift", [-9.0, 0.0])
@pytest.mark.slow
def test_what_is_known_does_not_come_back(shift):
    """Rounding revives known directions; at the low end of the spectrum they are not in the way."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(200, 200)))[0]
    spectrum = np.r_[-1.0, -1.2, -1.5, np.linspace(-9, -8, 197)]
    hessian = jnp.asarray(basis * spectrum @ basis.T, jnp.float32)
    loss = analysis.DatasetLoss(lambda w, h: w @ h[0] @ w / 2, None, remainder=hessian[None])
    start, known = (jnp.asarray(x, jnp.float32) for x in (rng.normal(size=200), basis.T[:3]))
    run = _krylov.deflated_lanczos(loss, jnp.ones(200), start, known, shift, 60)
    values, _ = _krylov.decompose(run.diagonal, run.off_diagonal, int(run.usable))
    assert (values[-1] < -7.9) == (shift < -8)  # with shift 0 there is a value near 0


def test_names_what_is_returned():
    loss = quadratic([1.0, -5.0])
    for which, value in (("algebraic", 1.0), ("magnitude", -5.0)):
        found = analysis.hessian_eigenvalues(loss, jnp.ones(2), 1, which=which)
        assert float(found.values[0]) == pytest.approx(value)


def test_mixed_leaves():
    """Integers are constants, dtypes may differ, and shapes are those of the params."""
    params = {
        "a": jnp.ones(3, jnp.bfloat16),
        "b": jnp.ones((2, 2)),
        "n": jnp.array(3),
        "none": None,
    }

    def loss(p):
        squares = jnp.sum(p["a"].astype(jnp.float32) ** 2) + 4 * jnp.sum(p["b"] ** 2)
        return p["n"] * squares / 2

    found = analysis.hessian_eigenvalues(loss, params, 5)
    np.testing.assert_allclose(found.values, [12, 12, 12, 12, 3], rtol=1e-2)
    assert found.vectors["b"].shape == (5, 2, 2)
    assert found.vectors["n"] is None


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
@pytest.mark.slow
def test_sharded_params(axes):
    kinds = (getattr(jax.sharding.AxisType, axes),) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2, axis=1)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))
    sharded = analysis.DatasetLoss(loss, place(x, None, "data")), place(w, None, "model")
    flat_loss = lambda v: jnp.mean(loss(v.reshape(w.shape), x.reshape(32, 8)))
    matrix = jax.jit(jax.hessian(flat_loss))(w.ravel())
    spectrum = np.linalg.eigvalsh(np.asarray(matrix, np.float64))
    found = analysis.hessian_eigenvalues(*sharded, 2, steps=40)
    np.testing.assert_allclose(found.values, spectrum[:-3:-1], rtol=1e-4)
    assert found.vectors.shape == (2, 8, 16)
    if axes == "Explicit":
        density = analysis.spectral_density(*sharded, steps=10, probes=100)
        square = np.mean(np.sum(density.weights * density.nodes**2, axis=1))
        assert square == pytest.approx(np.mean(spectrum**2), rel=0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 3}, ValueError, "k must be at most 2"),
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"steps": 0.5}, TypeError, "steps must be a static integer"),
        ({"which": "smallest"}, ValueError, "which must be 'algebraic' or 'magnitude'"),
        ({"params": jnp.ones(2, jnp.complex64)}, ValueError, "params must be real"),
        ({"loss": lambda w: jnp.sum(w**2) * jnp.nan}, ValueError, "not finite"),
    ],
)
def test_errors(options, error, message):
    arguments = {"loss": quadratic([1.0, 2.0]), "params": jnp.ones(2), "k": 1} | options
    with pytest.raises(error, match=message):
        analysis.hessian_eigenvalues(**arguments)


def test_not_finite_in_lanczos():
    with pytest.raises(ValueError, match="not finite"):
        analysis.hessian_eigenvalues(
            with_spectrum(np.full(200, np.inf)), jnp.ones(200), 4, steps=60
        )


def test_ratio_of_what_was_not_computed():
    found = analysis.hessian_eigenvalues(quadratic([1.0, 2.0]), jnp.ones(2), 2)
    assert float(found.ratio(2)) == 2
    with pytest.raises(ValueError, match=r"i must be in \[1, 2\]"):
        found.ratio()
