"""bSAM's update of the mean: division by the precision that the perturbation has learned."""

from typing import Any

import jax
import optax
import optax.tree_utils as otu
from optax import OptState, Params, Updates

from sam_optax._descent.descent import require
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees


def scale_by_precision() -> optax.GradientTransformationExtraArgs:
    r"""Divides the gradient by the precision s of :func:`bsam`.

    .. math::
        u / s,

    with s from the beginning of the step. The combinators pass the state of the perturbation, which
    contains s, to the descent, so s is stored only once.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` without state.

    Raises:
      ValueError: (from ``update``) the perturbation is not :func:`bsam` for all leaves.

    Example:
      >>> import optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.scale(-0.1),
      ...     sam_optax.bsam(rho=0.01, data_size=50_000, weight_decay=1e-3, key=0),
      ...     descent=optax.chain(
      ...         optax.add_decayed_weights(1e-3),
      ...         optax.ema(0.9, debias=False),
      ...         sam_optax.scale_by_precision()))

    References:
      Möllenhoff and Khan, `SAM as an Optimal Relaxation of Bayes
      <https://arxiv.org/abs/2210.01620>`_, 2022.
    """

    def update_fn(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        perturbation_state: OptState | None = None,
        **extra: Any,
    ) -> tuple[Updates, OptState]:
        found = require("scale_by_precision", "perturbation_state", perturbation_state, extra)
        key = otu.NamedTupleKey("BsamState", "precision")
        named = otu.tree_get_all_with_path(found, "precision")
        learned = [precision for path, precision in named if path[-1] == key]
        if len(learned) != 1:
            raise ValueError(
                "scale_by_precision needs the precision of bsam: sharpness_aware(base_tx, "
                "sam_optax.bsam(...), descent=scale_by_precision()), got the state "
                f"{type(found).__name__} of another perturbation."
            )
        leaves = jax.tree.leaves(learned, is_leaf=trees.is_missing)
        if any(isinstance(leaf, optax.MaskedNode) for leaf in leaves):
            raise ValueError(
                "scale_by_precision divides all leaves, but perturb_only(bsam(...), mask) learns "
                "the precision of some: perturb all."
            )

        divided = trees.map_wide(lambda u, s: u / trees.as_dtype_of(s, u), updates, *learned)
        return divided, state

    return optax.GradientTransformationExtraArgs(hp.stateless, update_fn)
