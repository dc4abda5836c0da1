"""X-SAM: corrects the sharp gradient along an eigenvector of the Hessian."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from chex import Numeric
from optax import OptState, Params, Updates

from sam_optax._descent.descent import descent, require, where_perturbed
from sam_optax._internal import checks, trees, vectors
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import Leaf


def away_from_eigenvector(alpha: hp.Hyperparameter) -> optax.GradientTransformationExtraArgs:
    r"""X-SAM: corrects the sharp gradient along the top eigenvector of the Hessian.

    .. math::
        \frac{g_s}{\|g_s\|} - \alpha\, |\langle g_s, v \rangle|\, v,

    with g_s the sharp gradient and v a unit eigenvector of the Hessian's largest eigenvalue. X-SAM
    is ``sharpness_aware(base, sam(rho), descent=away_from_eigenvector(alpha))``. The caller
    computes v from time to time and passes it to every step as ``eigenvector=v``: by a few steps of
    power iteration, as in the paper, or by ``sam_optax.analysis.hessian_eigenvalues(loss, params,
    k=1).vectors``, whose leaves have a leading axis of 1.

    The formula is not dimensionless, since only the first term is normalized, and it depends on the
    sign of v, although the sign of an eigenvector is arbitrary: with ⟨g_s, v⟩ > 0 it removes a
    share of the component along v. We could not obtain the paper and followed its public
    description. Steps that do not perturb keep their gradient.

    Args:
      alpha: α ≥ 0, or an optax schedule of it; in the paper at most 2.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, without state unless ``alpha`` is a schedule.

    Raises:
      ValueError: ``alpha`` < 0; in ``update``, ``eigenvector`` is missing or unlike the params.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.away_from_eigenvector(alpha=0.1)
      >>> g_sharp, v = jnp.array([3.0, 4.0]), jnp.array([0.0, 1.0])
      >>> updates, _ = tx.update(g_sharp, tx.init(g_sharp), eigenvector=v, perturbed=True)
      >>> print(f"{updates[0]:.1f} {updates[1]:.1f}")  # (0.6, 0.8) − 0.1 · 4 · (0, 1)
      0.6 0.4

    References:
      Duan et al., `X-SAM: Boosting Sharpness-Aware Minimization with Dominant-Eigenvector Gradient
      Correction <https://arxiv.org/abs/2601.10251>`_, 2026.
    """
    hp.check("alpha", alpha, lower=0)

    def update_fn(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        alpha: Numeric,
        eigenvector: Params | None = None,
        perturbed: Numeric | None = None,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[Updates, OptState]:
        perturbed = require("away_from_eigenvector", "perturbed", perturbed, extra)
        if eigenvector is None:
            raise ValueError(
                "away_from_eigenvector needs a unit eigenvector of the Hessian: call "
                "update(grads, state, params, grad_fn=grad_fn, eigenvector=v)."
            )
        remedy = "Remove the leading axis of the vectors of hessian_eigenvalues: leaf[0]."
        checks.require_like("eigenvector", eigenvector, updates, remedy)
        length = vectors.norm(updates, norm_axis_name)
        scale = where_perturbed(perturbed, 1 / jnp.where(length > 0, length, 1), 1)
        along = jnp.abs(vectors.inner(eigenvector, updates, norm_axis_name))
        share = where_perturbed(perturbed, jnp.asarray(alpha).astype(along.dtype) * along, 0)

        def corrected(g_s: jax.Array, v: Leaf) -> jax.Array:
            wide = vectors.times(g_s, scale)
            if v is None:
                return wide
            return wide - vectors.times(jnp.asarray(v).astype(wide.dtype), share)

        return trees.map_wide(corrected, updates, eigenvector), state

    return descent(hp.stateless, update_fn, alpha=alpha)
