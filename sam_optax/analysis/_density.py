"""The density of the eigenvalues of the Hessian, by stochastic Lanczos quadrature."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sam_optax._internal import generator, noise
from sam_optax._internal import hyperparameters as hp
from sam_optax.analysis import _krylov
from sam_optax.analysis._loss import Loss, LossLike, as_loss, native
from sam_optax.analysis._random import first_words

_MARGIN = 4.0
"""Margin of the grid beyond the outermost nodes, in standard deviations of the smoothing."""


class SpectralDensity(NamedTuple):
    """The distribution of the Hessian's eigenvalues.

    Attributes:
      grid: (points,) values of λ.
      density: (points,) share of eigenvalues per unit of λ, smoothed; its integral is 1.
      nodes: (probes, steps) nodes of the quadrature of each probe.
      weights: (probes, steps) ≥ 0, each row summing to 1: Σ weights · f(nodes), averaged over the
        probes, estimates trace f(H)/n. Steps beyond an exhausted Krylov space have weight 0.
      sigma: standard deviation of the Gaussian that smooths the density.
      exact: whether the nodes are all eigenvalues, of a fully decomposed Hessian.
    """

    grid: np.ndarray
    density: np.ndarray
    nodes: np.ndarray
    weights: np.ndarray
    sigma: float
    exact: bool


def spectral_density(
    loss: LossLike,
    params: optax.Params,
    *,
    steps: int = 80,
    probes: int = 8,
    sigma: float | None = None,
    points: int = 1000,
    key: noise.Key | None = None,
) -> SpectralDensity:
    r"""Estimates the density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

    .. math::
        \phi(t) = \frac{1}{n} \sum_{i=1}^n N(t;\, \lambda_i, \sigma^2)
        \approx \frac{1}{m} \sum_v \sum_j (e_1^\top y_j)^2\, N(t;\, \theta_j, \sigma^2),

    with θ_j, y_j the eigenpairs of the Lanczos matrix T that starts at one of m probes v, vectors
    of random signs. The weight of a node is the squared first component of its vector. A Hessian of
    up to 2·``steps`` rows is decomposed exactly.

    Args:
      loss: see :func:`hessian_eigenvalues`.
      params: see :func:`hessian_eigenvalues`.
      steps: Lanczos steps of each probe, an integer ≥ 1. Default 80, after Ghorbani et al.
      probes: number of random vectors v, an integer ≥ 1. Default 8.
      sigma: standard deviation σ > 0 of the smoothing, in the unit of λ. Default: 0.01 times the
        width of the spectrum.
      points: number of points of the grid, an integer ≥ 2. Default 1000.
      key: a JAX PRNG key, or an integer seed, for the probes. Default: always the same one.

    Returns:
      A :class:`SpectralDensity`, of NumPy arrays. Not for use under jit.

    Raises:
      TypeError: ``loss`` is not callable, ``key`` is not a PRNG key, or a count is not an integer.
      ValueError: complex params, an argument out of range, or a Hessian that is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> loss = lambda w: 3 * w[0] ** 2 / 2 + jnp.sum(w[1:] ** 2) / 2
      >>> found = analysis.spectral_density(loss, jnp.ones(1000), probes=4)
      >>> share = found.weights[abs(found.nodes - 3) < 0.01].sum() / 4
      >>> print(f"{share:.4f}")
      0.0010

    References:
      Ghorbani et al., `An Investigation into Neural Net Optimization via Hessian Eigenvalue
      Density <https://arxiv.org/abs/1901.10159>`_, 2019.
    """
    measured, params = as_loss(loss), native(params)
    n = _krylov.size(params)
    hp.check_integer("steps", steps, lower=1)
    hp.check_integer("probes", probes, lower=1)
    hp.check_integer("points", points, lower=2)
    if sigma is not None and not sigma > 0:
        raise ValueError(f"sigma must be positive, got {sigma!r}.")
    words = first_words(key)
    if n <= 2 * steps:
        nodes = np.linalg.eigvalsh(_krylov.dense(measured, params))[None]
        weights = np.full_like(nodes, 1 / n)
    else:
        nodes, weights = _quadratures(_probe(measured, params, words, steps, probes))
    width = float(np.ptp(nodes[weights > 0]))
    if sigma is None:
        sigma = width / 100 if width > 0 else 1e-3 * max(1e-3, float(np.max(np.abs(nodes))))
    low, high = np.min(nodes[weights > 0]), np.max(nodes[weights > 0])
    grid = np.linspace(low - _MARGIN * sigma, high + _MARGIN * sigma, points)
    bumps = np.exp(-0.5 * ((grid[:, None] - nodes.ravel()) / sigma) ** 2)
    density = bumps @ weights.ravel() / (sigma * np.sqrt(2 * np.pi) * len(nodes))
    return SpectralDensity(grid, density, nodes, weights, float(sigma), n <= 2 * steps)


@functools.partial(jax.jit, static_argnames=("steps", "probes"))
def _probe(
    loss: Loss, params: optax.Params, words: jax.Array, steps: int, probes: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The Lanczos matrices of all probes, computed sequentially, and their usable steps."""
    flat, _ = _krylov.flatten(params)
    product = _krylov.hessian(loss, params)

    def of(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        signs = jnp.sign(generator.normal(noise.fold_in(words, i), flat.shape))
        found = _krylov.lanczos(product, jnp.where(signs < 0, -1, 1).astype(flat.dtype), steps)
        return found.diagonal, found.off_diagonal, found.usable

    return lax.map(of, jnp.arange(probes, dtype=jnp.int32))


def _quadratures(found: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of each probe; unused ones repeat the first node with weight 0."""
    diagonals, off_diagonals, usable = (np.asarray(x) for x in found)
    nodes, weights = np.zeros(diagonals.shape), np.zeros(diagonals.shape)
    for i, m in enumerate(usable):
        theta, vectors = _krylov.decompose(diagonals[i], off_diagonals[i], int(m))
        nodes[i] = theta[0]
        nodes[i, :m], weights[i, :m] = theta, vectors[0] ** 2
    return nodes, weights
