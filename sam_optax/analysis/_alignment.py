"""Mini-batch gradients compared with the full gradient: common component and residual."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import vectors
from sam_optax._internal.types import PyTree
from sam_optax.analysis._dataset import DatasetLoss
from sam_optax.analysis._loss import native


class Alignment(NamedTuple):
    """Components of each mini-batch gradient g_B relative to the full gradient g.

    Attributes:
      cosine: (batches,) cosine of g_B and g.
      full: (batches,) ⟨g_B, g⟩/‖g‖, the length of the full gradient component, with its sign.
      residual: (batches,) ‖g_B − Proj_g g_B‖, the length of the residual.
      full_norm: scalar, ‖g‖.
      estimate: scalar, cosine of the estimate m and g; ``None`` without one.
      friendly: (batches,) cosine of F-SAM's direction g_B − σ m and g. With a perfect estimate and
        σ = 1, its sign is random. ``None`` without an estimate.
    """

    cosine: jax.Array
    full: jax.Array
    residual: jax.Array
    full_norm: jax.Array
    estimate: jax.Array | None = None
    friendly: jax.Array | None = None


def alignment(
    loss: DatasetLoss,
    params: optax.Params,
    *,
    batch_size: int | None = None,
    estimate: optax.Updates | None = None,
    sigma: float = 1.0,
) -> Alignment:
    r"""Splits mini-batch gradients into the full gradient's direction and a residual.

    .. math::
        \nabla L_B = \mathrm{Proj}_{\nabla L} \nabla L_B
        + \mathrm{Proj}^\perp_{\nabla L} \nabla L_B .

    The F-SAM paper finds that SAM owes its generalization to the second part, the noise of the
    batch, and removes an estimate of the first: d = ∇L_B − σ m. Cosines are NaN where a vector is
    zero.

    Args:
      loss: a :class:`DatasetLoss`, whose batches are the mini-batches.
      params: pytree of weights w.
      batch_size: number of examples per mini-batch. Default: the batches of ``loss``.
      estimate: m, an estimate of the full gradient with its structure, such as the average in the
        state of :func:`sam_optax.fsam`. Default: none.
      sigma: share σ ≥ 0 of the estimate that is removed. Default 1, as in F-SAM.

    Returns:
      :class:`Alignment`.

    Raises:
      TypeError: ``loss`` is not a :class:`DatasetLoss`.
      ValueError: ``batch_size`` or ``sigma`` out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> loss = analysis.DatasetLoss.from_examples(
      ...     lambda w, x: x @ w, jnp.array([[1.0, 1.0], [1.0, -1.0]]), batch_size=1)
      >>> parts = analysis.alignment(loss, jnp.zeros(2))
      >>> print(parts.full, parts.residual)
      [1. 1.] [1. 1.]

    References:
      Li et al., `Friendly Sharpness-Aware Minimization <https://arxiv.org/abs/2403.12350>`_,
      2024.
    """
    if not isinstance(loss, DatasetLoss):
        raise TypeError(f"loss must be an analysis.DatasetLoss, which has batches, got {loss!r}.")
    hp.check("sigma", sigma, lower=0, schedule=False)
    if batch_size is not None:
        loss = loss.rebatch(batch_size)
    parts = _parts(loss, *native((params, estimate)), sigma)
    return Alignment(**parts)


@jax.jit
def _parts(loss: DatasetLoss, params: optax.Params, estimate: PyTree, sigma: Any) -> dict[str, Any]:
    _, full = loss.value_and_grad(params)
    direction = vectors.unit(full)

    def of(batch: DatasetLoss) -> dict[str, jax.Array]:
        _, grads = batch.value_and_grad(params)
        along = vectors.inner(grads, direction)
        residual = vectors.add(grads, vectors.scale(direction, -along))
        found = {
            "cosine": vectors.cosine(grads, full),
            "full": along,
            "residual": vectors.norm(residual),
        }
        if estimate is not None:
            friendly = vectors.add(grads, vectors.scale(estimate, -jnp.asarray(sigma)))
            found["friendly"] = vectors.cosine(friendly, full)
        return found

    found, _ = loss.each(of)
    if estimate is not None:
        found["estimate"] = vectors.cosine(estimate, full)
    return found | {"full_norm": vectors.norm(full)}
