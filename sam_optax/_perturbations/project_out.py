"""SAM-noise: ascent orthogonal to the full gradient."""

from typing import Any

from optax import EmptyState, Params, Updates

from sam_optax._internal import checks, trees, vectors
from sam_optax._internal import hyperparameters as hp
from sam_optax._perturbations.perturbation import Perturbation


def project_out() -> Perturbation:
    r"""SAM-noise: removes the component of the ascent gradient along the full gradient.

    .. math::
        g - \frac{\langle g, \nabla L \rangle}{\|\nabla L\|^2}\, \nabla L,

    with each tree as one vector. ∇L, the gradient over the whole training set, is an argument of
    the step: ``update(grads, state, params, grad_fn=grad_fn, full_grads=full_grads)``.

    ``optax.chain(project_out(), sam(rho))`` is SAM-noise. The supplement's SAM-full and SAM-db need
    no transformation: pass the full gradient, or that of another batch, as ``grads``. F-SAM
    estimates the full gradient instead: :func:`remove_full_gradient`.

    Returns:
      A :class:`~sam_optax.Perturbation` without state, in the dtypes of the gradient, for use in
      ``optax.chain``. The result is 0 if it is no larger than the rounding error of g, which
      ``sam`` would scale up to its radius.

    Raises:
      ValueError: (from ``update``) ``full_grads`` is missing or has another structure.

    Example:
      >>> import jax.numpy as jnp, optax, sam_optax
      >>> method = sam_optax.as_perturbation(
      ...     optax.chain(sam_optax.project_out(), sam_optax.sam(rho=1.0)))
      >>> g, full = jnp.array([3.0, 4.0]), jnp.array([1.0, 0.0])
      >>> eps, _ = method.update(g, method.init(g), g, full_grads=full)
      >>> print(eps)
      [0. 1.]

    References:
      Li et al., `Friendly Sharpness-Aware Minimization <https://arxiv.org/abs/2403.12350>`_,
      2024, supplement A5.
    """

    def update_fn(
        updates: Updates, state: EmptyState, params: Params | None, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        full_grads = extra.get("full_grads")
        if full_grads is None:
            raise ValueError(
                "project_out needs the full gradient: call update(grads, state, params, "
                "grad_fn=grad_fn, full_grads=full_grads)."
            )
        remedy = "Pass the gradient of the loss over the whole training set."
        checks.require_like("full_grads", full_grads, updates, remedy)
        rest, _ = vectors.reject(updates, full_grads, extra["norm_axis_name"])
        return trees.map_inexact(trees.cast_like, rest, updates), state

    return Perturbation(hp.stateless, update_fn, state_type=EmptyState)
