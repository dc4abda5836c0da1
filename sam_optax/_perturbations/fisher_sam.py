"""Fisher SAM: ascent in the metric of the diagonal empirical Fisher information."""

import functools
from typing import Any

import jax.numpy as jnp
from chex import Array
from jax import lax
from optax import EmptyState, Params, Updates

from sam_optax._internal import checks, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.steepest_ascent import steepest_ascent
from sam_optax._internal.types import Leaf
from sam_optax._perturbations.perturbation import Perturbation


def fisher_sam(rho: hp.Hyperparameter = 0.1, eta: hp.Hyperparameter = 1.0) -> Perturbation:
    r"""Fisher SAM: perturbs within an ellipsoid of the Fisher metric instead of a ball.

    .. math::
        \varepsilon = \rho\, \frac{T_w^2\, g}{\|T_w\, g\|_2}, \qquad T_w^2 = (1 + \eta f)^{-1},

    where f is the diagonal empirical Fisher information. ε solves the linearized ascent problem in
    ‖T_w⁻¹ε‖₂ ≤ ρ: weights with a large f, to which the output is sensitive, are perturbed less.

    By default f is the squared mini-batch gradient, as in the paper's experiments, also in a chain:
    ``optax.chain(remove_full_gradient(), fisher_sam())`` is F-FisherSAM, equation (51) of the F-SAM
    supplement. It approximates the mean over examples of squared gradients, a tree like the params
    that can be passed instead: ``update(grads, state, params, grad_fn=grad_fn, fisher=f)``.

    Args:
      rho: radius ρ ≥ 0 (the Fisher SAM paper's γ). Default 0.1, as in public implementations.
      eta: η ≥ 0, the weight of the Fisher information. Default 1. 0 is SAM.

    Returns:
      A :class:`~sam_optax.Perturbation`. Its state is empty unless a hyperparameter is a schedule.

    Raises:
      ValueError: a hyperparameter out of range; in ``update``, ``fisher`` has another structure.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.fisher_sam(rho=1.0, eta=1.0)
      >>> g = jnp.array([1.0, 0.0])
      >>> eps, _ = method.update(g, method.init(g), g)
      >>> print(eps.round(4))  # (1 · 1/2) / (1 · √½)
      [0.7071 0.    ]

    References:
      Kim et al., `Fisher SAM: Information Geometry and Sharpness Aware Minimisation
      <https://arxiv.org/abs/2206.04920>`_, 2022.
    """
    hp.check("rho", rho, lower=0)
    hp.check("eta", eta, lower=0)

    def update_fn(
        updates: Updates, state: EmptyState, params: Params | None, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        rho, eta, fisher = extra["rho"], extra["eta"], extra.get("fisher")
        if fisher is not None:
            remedy = "Pass the mean over examples of squared gradients."
            checks.require_like("fisher", fisher, updates, remedy)

        def normalization_operator(x: Leaf) -> Array:
            """(1 + η f)^(−1/2)."""
            if fisher is not None:
                f = trees.widen(x)
                return lax.rsqrt(1 + jnp.asarray(eta).astype(f.dtype) * f)
            magnitude = jnp.abs(trees.widen(x))
            root = jnp.sqrt(jnp.asarray(eta).astype(magnitude.dtype)) * magnitude
            # Where the square might overflow, the 1 is negligible.
            return jnp.where(
                root > 2.0**30, 1 / jnp.maximum(root, 1), lax.rsqrt(1 + jnp.square(root))
            )

        source = extra["ascent_grads"] if fisher is None else fisher
        operator = functools.partial(trees.map_inexact, normalization_operator, source)
        return steepest_ascent(updates, operator, rho, 2, extra["norm_axis_name"]), state

    values = {"rho": rho, "eta": eta}
    return Perturbation(hp.stateless, update_fn, hyperparameters=values, state_type=EmptyState)
