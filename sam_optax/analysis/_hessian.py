"""The largest eigenvalues of the Hessian."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax._internal import generator, noise, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.types import PyTree
from sam_optax.analysis import _krylov
from sam_optax.analysis._loss import Loss, LossLike, as_loss, native
from sam_optax.analysis._random import first_words

Which = Literal["algebraic", "magnitude"]


class HessianEigenvalues(NamedTuple):
    """The largest eigenvalues of the Hessian.

    Attributes:
      values: (k,) λ₁, …, λ_k, descending (in magnitude for ``which="magnitude"``).
      residuals: (k,) ‖Hv − λv‖₂ for the unit eigenvector v of λ. Some eigenvalue lies within this
        distance; for an isolated eigenvalue the error is of the order of its square.
      vectors: the eigenvectors v, a tree like the gradient whose leaves have a leading axis k.
      exact: whether the whole Hessian was decomposed, without the Lanczos process.
      products: number of Hessian-vector products used.
    """

    values: jax.Array
    residuals: jax.Array
    vectors: optax.Params
    exact: bool
    products: int

    def ratio(self, i: int = 5) -> jax.Array:
        """λ₁/λ_i, a measure of the spectrum that the F-SAM paper uses with i = 5."""
        if not 1 <= i <= len(self.values):
            raise ValueError(
                f"i must be in [1, {len(self.values)}], the number of eigenvalues, got {i!r}: "
                "increase k in hessian_eigenvalues."
            )
        return self.values[0] / self.values[i - 1]


def hessian_eigenvalues(
    loss: LossLike,
    params: optax.Params,
    k: int = 5,
    *,
    which: Which = "algebraic",
    steps: int = 80,
    key: noise.Key | None = None,
) -> HessianEigenvalues:
    r"""Computes the k largest eigenvalues of the Hessian of the loss, a measure of sharpness.

    .. math::
        \nabla^2 L(w)\, v_i = \lambda_i v_i.

    They come from Lanczos runs with full reorthogonalization (by matfree). One Krylov space
    contains a single copy of a repeated eigenvalue, so further runs in the complement of the
    vectors found so far look for more, until a run changes nothing: usually the second, at most 2k
    + 1. The eigenvalues are then computed in the span of all vectors found (Rayleigh–Ritz), so λ_i
    is never above the true one. A Hessian of up to 2·``steps`` rows is decomposed exactly.

    Not for use under jit, as the number of runs depends on the values; the runs are jitted. They
    hold ``steps`` vectors of the size of the params.

    Args:
      loss: a :class:`DatasetLoss`, or a function ``params -> scalar``, twice differentiable. It
        must be deterministic: dropout off, frozen BatchNorm statistics.
      params: pytree of real weights w; non-float leaves are constants.
      k: number of eigenvalues, 1 ≤ k ≤ ``steps``. Default 5, for λ₁/λ₅.
      which: ``"algebraic"`` (the largest, of any sign) or ``"magnitude"`` (the largest in
        absolute value: for diag(1, −5) that is −5, while the algebraically largest is 1).
      steps: Lanczos steps of one run. Default 80, after Ghorbani et al.
      key: a JAX PRNG key, or an integer seed, for the start vectors. Default: always the same one.

    Returns:
      :class:`HessianEigenvalues`. If ``residuals`` are large, increase ``steps``.

    Raises:
      TypeError: ``loss`` is not callable, ``key`` is not a PRNG key, or ``k`` or ``steps`` is not
        an integer.
      ValueError: complex params, ``k`` or ``steps`` out of range, an unknown ``which``, or a
        Hessian that is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> loss = lambda w: (w[0] ** 2 - 5 * w[1] ** 2) / 2
      >>> print(analysis.hessian_eigenvalues(loss, jnp.ones(2), k=1).values)
      [1.]
      >>> print(analysis.hessian_eigenvalues(loss, jnp.ones(2), k=1, which="magnitude").values)
      [-5.]

    References:
      Ghorbani et al., `An Investigation into Neural Net Optimization via Hessian Eigenvalue
      Density <https://arxiv.org/abs/1901.10159>`_, 2019.
      Li et al., `Friendly Sharpness-Aware Minimization <https://arxiv.org/abs/2403.12350>`_,
      2024, supplement A7.
    """
    measured, params = as_loss(loss), native(params)
    n = _krylov.size(params)
    hp.check_integer("k", k, lower=1)
    hp.check_integer("steps", steps, lower=1)
    if which not in ("algebraic", "magnitude"):
        raise ValueError(f"which must be 'algebraic' or 'magnitude', got {which!r}.")
    if k > min(n, steps):
        raise ValueError(
            f"k must be at most {min(n, steps)}, the smaller of the number of weights ({n}) and "
            f"of steps ({steps}), got {k!r}."
        )
    words = first_words(key)
    if n <= 2 * steps:
        basis, products = np.eye(n), n
        images = _krylov.dense(measured, params)
        values, residuals, coefficients = _project(basis, images, k, which)
        vectors, exact = jnp.asarray(coefficients, _dtype(params)), True
    else:
        values, residuals, vectors, products = _iterate(measured, params, k, which, steps, words)
        exact = False
    return HessianEigenvalues(
        jnp.asarray(values, _dtype(params)),
        jnp.asarray(residuals, _dtype(params)),
        _stacked(vectors, params),
        exact,
        products,
    )


def _iterate(
    loss: Loss, params: optax.Params, k: int, which: Which, steps: int, words: jax.Array
) -> tuple[np.ndarray, np.ndarray, jax.Array, int]:
    """Lanczos runs, each in the complement of the vectors found by earlier runs."""
    n, dtype = _krylov.size(params), _dtype(params)
    precision = float(jnp.finfo(dtype).eps)
    converged = precision**0.5
    known = jnp.zeros((k, n), dtype)
    values = residuals = np.full(k, np.nan)
    shift, products = 0.0, 0
    for run in range(2 * k + 1):
        # Converged vectors are set aside. The run starts from the others plus a random vector,
        # which has a component along every eigenvector.
        found = jnp.asarray(residuals <= converged * np.max(np.abs(values)))[:, None]
        random = generator.normal(noise.fold_in(words, run), (n,)).astype(dtype)
        start = random / jnp.linalg.norm(random) + jnp.sum(jnp.where(found, 0, known), axis=0)
        settled = jnp.where(found, known, 0)
        krylov = _krylov.deflated_lanczos(loss, params, start, settled, shift, steps)
        usable, products = int(krylov.usable), products + steps
        theta, weights = _krylov.decompose(krylov.diagonal, krylov.off_diagonal, usable)
        if run == 0 and which == "algebraic":
            shift = float(theta[0])  # puts known directions at the low end of the spectrum
        best = jnp.asarray(weights[:, _order(theta, which)[:k]], dtype)
        new = jnp.zeros((k, n), dtype).at[: best.shape[1]].set(best.T @ krylov.vectors[:usable])
        basis, images = _krylov.rayleigh_ritz(loss, params, jnp.concatenate([known, new]))
        products += 2 * k
        before = values
        values, residuals, coefficients = _project(np.asarray(basis), np.asarray(images), k, which)
        known = jnp.asarray(coefficients, dtype) @ basis
        # Changes below rounding error, or small compared with the error that the residuals allow.
        rounding = 10 * precision * max(np.max(np.abs(values)), 1e-30)
        resolution = rounding + 1e-3 * residuals
        if np.all(np.abs(values - before) <= resolution):
            break
    return values, residuals, known, products


def _project(
    basis: np.ndarray, images: np.ndarray, k: int, which: Which
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eigenvalues of H in the span of orthonormal rows, residuals, and vectors in the basis."""
    basis, images = basis.astype(np.float64), images.astype(np.float64)
    small = basis @ images.T
    values, vectors = np.linalg.eigh((small + small.T) / 2)
    chosen = _order(values, which)[:k]
    values, coefficients = values[chosen], vectors[:, chosen].T
    residuals = coefficients @ images - values[:, None] * (coefficients @ basis)
    return values, np.linalg.norm(residuals, axis=1), coefficients


def _stacked(vectors: jax.Array, params: optax.Params) -> PyTree:
    """Rows of an array as trees like the params, stacked."""
    leaves, structure = jax.tree.flatten(trees.inexact_only(params))
    parts = jnp.split(vectors, np.cumsum([np.size(leaf) for leaf in leaves])[:-1], axis=1)
    shaped = [
        part.reshape(len(vectors), *jnp.shape(leaf))
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


def _order(values: np.ndarray, which: Which) -> np.ndarray:
    return np.argsort(-np.abs(values) if which == "magnitude" else -values, kind="stable")


def _dtype(params: optax.Params) -> np.dtype:
    return jax.eval_shape(lambda p: _krylov.flatten(p)[0], params).dtype
