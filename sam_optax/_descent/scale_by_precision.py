"""bSAM's update of the mean: division by the precision that the perturbation has learned."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import trees
from sam_optax._internal.types import Leaf


def scale_by_precision() -> optax.GradientTransformationExtraArgs:
    r"""Divides the update by the precision s of :func:`bsam`, in the base optimizer's chain.

    .. math::
        u / s,

    with s from the beginning of the step. ``sharpness_aware`` passes the state of the perturbation,
    which contains s, to a base optimizer that asks for it, so s is stored only once.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` without state.

    Raises:
      ValueError: (from ``update``) the perturbation is not :func:`bsam`, or the combinator is
        ``alternating``, which has already updated the state by then.

    Example:
      >>> import optax, sam_optax
      >>> base = optax.chain(
      ...     optax.add_decayed_weights(1e-3),
      ...     optax.ema(0.9, debias=False),
      ...     sam_optax.scale_by_precision(),
      ...     optax.scale(-0.1))
      >>> method = sam_optax.bsam(rho=0.01, data_size=50_000, weight_decay=1e-3, key=0)
      >>> tx = sam_optax.sharpness_aware(base, method)

    References:
      Möllenhoff and Khan, `SAM as an Optimal Relaxation of Bayes
      <https://arxiv.org/abs/2210.01620>`_, 2022.
    """

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        perturbation_state: optax.OptState | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra
        precision = getattr(perturbation_state, "precision", None)
        if precision is None:
            raise ValueError(
                "scale_by_precision needs the precision of bsam: put it in the base optimizer of "
                "sharpness_aware(base, sam_optax.bsam(...)), in front of a wrapper that drops "
                "extra arguments (optax.MultiSteps)."
            )

        def divide(u: Leaf, s: Leaf) -> jax.Array:
            wide = trees.widen(u)
            return trees.cast_like(wide / jnp.asarray(s).astype(wide.dtype), u)

        return trees.map_inexact(divide, updates, precision), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)
