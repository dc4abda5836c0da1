"""The momentum that a base optimizer keeps in its state."""

import jax
import jax.numpy as jnp
import optax
import optax.tree_utils as otu
from optax import OptState, Params, Updates

from sam_optax._internal import trees
from sam_optax._internal.types import Leaf

# Fields of optax's states: of optax.trace, and of the family of optax.adam.
_FIELDS = ("trace", "mu")


def base_momentum(base_state: OptState | None, params: Params) -> Updates:
    """The one momentum in a base optimizer's state, for the leaves of the params.

    It is a field ``trace`` or ``mu`` of a NamedTuple, with the structure and shapes of the params:
    a parameter of that name is not taken for it.

    Raises:
      ValueError: ``base_state`` is missing, or has no such field or several.
    """
    if base_state is None:
        raise ValueError(
            "momentum_start takes its direction from the state of the base optimizer: pass "
            "base_state=opt_state to start_fn and perturb_fn (sharpness_aware and alternating do "
            "so), or let it keep an average of its own, momentum_start(perturbation, decay=0.9)."
        )
    found = [
        (jax.tree_util.keystr(path), value)
        for field in _FIELDS
        for path, value in otu.tree_get_all_with_path(base_state, field)
        if isinstance(path[-1], otu.NamedTupleKey) and _fits(value, params)
    ]
    if len(found) != 1:
        names = ", ".join(path for path, _ in found) or "none"
        raise ValueError(
            "momentum_start takes its direction from the momentum in the state of the base "
            "optimizer, a field trace (optax.sgd with momentum) or mu (optax.adam and its kind) "
            f"with the structure and shapes of the params. It needs exactly one, found: {names}. "
            "Use such an optimizer, or let momentum_start keep an average of its own, "
            "momentum_start(perturbation, decay=0.9)."
        )
    return jax.tree.map(_chosen, params, found[0][1], is_leaf=_is_masked)


def _is_masked(node: object) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _chosen(p: Leaf, m: Leaf) -> Leaf:
    """The leaf, where ``perturb_only`` has not left it out."""
    return p if _is_masked(p) else m


def _fits(momentum: Updates, params: Params) -> bool:
    def same(p: Leaf, m: Leaf) -> bool:
        return _is_masked(p) or (trees.is_array(m) and jnp.shape(m) == jnp.shape(p))

    try:
        return all(jax.tree.leaves(jax.tree.map(same, params, momentum, is_leaf=_is_masked)))
    except (TypeError, ValueError):
        return False
