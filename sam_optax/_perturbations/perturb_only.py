"""Restricts a perturbation to some leaves."""

from typing import Any

import jax
import optax
from optax import OptState, Params, Updates

from sam_optax._internal import trees
from sam_optax._internal.leaf_roles import BiasMask, expand_mask
from sam_optax._internal.types import ExtraArgs, PyTree
from sam_optax._perturbations.perturbation import TREE_EXTRAS, Perturbation, as_perturbation


def perturb_only(perturbation: optax.GradientTransformation, mask: BiasMask) -> Perturbation:
    """Restricts a perturbation to the chosen leaves, as ``optax.masked`` does for updates.

    ε is computed on the tree of the chosen leaves, so that norms (‖ε‖ = ρ) and noise span only
    these, and is 0 elsewhere. The gradient function still differentiates the full tree.

    Args:
      perturbation: any perturbation, including random starts.
      mask: which leaves to perturb: a pytree of booleans (a prefix of the params) or a function
        of the params that returns one, as in ``optax.masked``.

    Returns:
      A :class:`~sam_optax.Perturbation` with the state of ``perturbation`` for the chosen leaves.

    Raises:
      ValueError: the mask does not match the structure of the params.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.perturb_only(sam_optax.sam(rho=0.1), {"a": True, "b": False})
      >>> params = {"a": jnp.array(1.0), "b": jnp.array(1.0)}
      >>> grads = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
      >>> perturbed, _ = method.perturb_fn(params, grads, method.init(params))
      >>> print(perturbed["a"], perturbed["b"])
      1.1 1.0
    """
    inner = as_perturbation(perturbation)

    def split(tree: PyTree, params: Params) -> PyTree:
        """The chosen leaves; a gradient may have ``None`` in place of a leaf or of a subtree."""
        if not jax.tree.leaves(tree):  # such as optax.tree_map_params passes to init
            return tree
        return jax.tree.map(
            lambda leaf, chosen: leaf if leaf is None or chosen else optax.MaskedNode(),
            tree,
            expand_mask("mask", mask, params),
            is_leaf=trees.is_none,
        )

    def split_extra(extra: ExtraArgs, params: Params) -> ExtraArgs:
        chosen = {name: split(extra[name], params) for name in TREE_EXTRAS if name in extra}
        return {**extra, **chosen}

    def merge(chosen: PyTree, full: PyTree) -> PyTree:
        """The chosen leaves from ``chosen``, the others from ``full``."""
        return jax.tree.map(
            lambda c, f: f if isinstance(c, optax.MaskedNode) else c,
            chosen,
            full,
            is_leaf=trees.is_missing,
        )

    def init_fn(params: Params) -> OptState:
        return inner.init(split(params, params))

    def update_fn(
        updates: Updates, state: OptState, params: Params | None, **extra: Any
    ) -> tuple[Updates, OptState]:
        # As in optax.masked, the structure is taken from the updates if params are missing.
        full = updates if params is None else params
        chosen = None if params is None else split(params, params)
        eps, state = inner.update(split(updates, full), state, chosen, **split_extra(extra, full))
        return merge(eps, jax.tree.map(trees.zeros_like, updates)), state

    def start_fn(params: Params, state: OptState, **extra: Any) -> Params:
        chosen = inner.start_fn(split(params, params), state, **split_extra(extra, params))
        return merge(chosen, params)

    return Perturbation.around(inner, init_fn, update_fn, start_fn)
