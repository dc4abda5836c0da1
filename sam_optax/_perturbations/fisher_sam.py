"""Fisher SAM: ascent in the metric of the diagonal empirical Fisher information."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import tree_checks, trees
from sam_optax._internal.devices import AxisName
from sam_optax._internal.steepest_ascent import steepest_ascent
from sam_optax._internal.types import Leaf
from sam_optax._perturbations.perturbation import Perturbation


def fisher_sam(rho: hp.Hyperparameter = 0.1, eta: hp.Hyperparameter = 1.0) -> Perturbation:
    r"""Fisher SAM: perturbs within an ellipsoid of the Fisher metric instead of a ball.

    .. math::
        \varepsilon = \rho\, \frac{T_w^2\, g}{\|T_w\, g\|_2},
        \qquad T_w^2 = (1 + \eta f)^{-1},

    where f is the diagonal empirical Fisher information. ε solves the linearized ascent problem in
    ‖T_w⁻¹ε‖₂ ≤ ρ: weights with a large f, to which the output is sensitive, are perturbed less. η =
    0 is SAM.

    By default f is the squared mini-batch gradient, as in the paper's experiments. It approximates
    the mean over examples of squared gradients, which can be passed instead: ``update(grads, state,
    params, grad_fn=grad_fn, fisher=f)`` with a tree like the params.

    ``as_perturbation(optax.chain(remove_full_gradient(), fisher_sam()))`` is F-FisherSAM, equation
    (51) of the F-SAM supplement: there f is still the square of the whole mini-batch gradient.

    Args:
      rho: radius ρ ≥ 0 (the Fisher SAM paper's γ). Default 0.1, as in public implementations.
      eta: η ≥ 0, the weight of the Fisher information. Default 1.

    Returns:
      A :class:`~sam_optax.Perturbation`. Its state is empty unless a hyperparameter
      is a schedule, which needs a step count.

    Raises:
      ValueError: a hyperparameter out of range.

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

    def init_fn(params: optax.Params) -> optax.OptState:
        del params
        return hp.init_schedules(rho, eta)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        fisher: optax.Params | None = None,
        ascent_grads: optax.Updates | None = None,
        training_step: chex.Numeric | None = None,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra
        if fisher is not None:
            remedy = "Pass the mean over examples of squared gradients."
            tree_checks.require_like("fisher", fisher, updates, remedy)
        step = hp.step_of(state, training_step)
        eta_t = hp.evaluate(eta, step)
        grads = updates if ascent_grads is None else ascent_grads

        def normalization_operator(x: Leaf) -> jax.Array:
            """(1 + η f)^(−1/2)."""
            if fisher is not None:
                f = trees.widen(x)
                return lax.rsqrt(1 + jnp.asarray(eta_t).astype(f.dtype) * f)
            magnitude = jnp.abs(trees.widen(x))
            root = jnp.sqrt(jnp.asarray(eta_t).astype(magnitude.dtype)) * magnitude
            # Where the square might overflow, the 1 is negligible.
            return jnp.where(
                root > 2.0**30, 1 / jnp.maximum(root, 1), lax.rsqrt(1 + jnp.square(root))
            )

        source = grads if fisher is None else fisher
        eps = steepest_ascent(
            updates,
            lambda: trees.map_inexact(normalization_operator, source),
            hp.evaluate(rho, step),
            2,
            norm_axis_name,
        )
        return eps, hp.advance(state, step)

    return Perturbation(init_fn, update_fn, state_type=hp.schedules_type(rho, eta))
