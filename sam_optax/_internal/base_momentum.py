"""The momentum that a base optimizer keeps in its state."""

import jax
import jax.numpy as jnp
import optax
import optax.tree_utils as otu
from optax import OptState, Params, Updates

from sam_optax._internal import trees
from sam_optax._internal.types import KeyPath, Leaf

_FIELDS = ("trace", "mu")  # of the states of optax.trace, and of the family of optax.adam
_OWN = "let momentum_start keep an average of its own, momentum_start(perturbation, decay=0.9)."


def base_momentum(base_state: OptState | None, params: Params) -> Updates:
    """The one momentum in a base optimizer's state, for the leaves of the params.

    Leaves for which a masked base optimizer keeps none are ``None``.
    """
    if base_state is None:
        raise ValueError(
            "momentum_start takes its direction from the state of the base optimizer: pass "
            "base_state=opt_state to start_fn and perturb_fn (sharpness_aware and alternating do "
            f"so), or {_OWN}"
        )
    found = [  # fields of a NamedTuple: a parameter of that name is not taken for one
        (path, value)
        for field in _FIELDS
        for path, value in otu.tree_get_all_with_path(base_state, field)
        if isinstance(path[-1], otu.NamedTupleKey) and _fits(value, params)
    ]
    if len(found) != 1:
        names = ", ".join(jax.tree_util.keystr(path) for path, _ in found) or "none"
        raise ValueError(
            "momentum_start takes its direction from the momentum in the state of the base "
            "optimizer, a field trace (optax.sgd with momentum) or mu (optax.adam and its kind) "
            f"with the structure and shapes of the params. It needs exactly one, found: {names}. "
            f"Use such an optimizer, or {_OWN}"
        )
    ((path, momentum),) = found
    if _comes_after_scaling(base_state, path):
        raise ValueError(
            "momentum_start needs a momentum of gradients, but that of the base optimizer, "
            f"{jax.tree_util.keystr(path)}, comes behind a transformation with a state, as in "
            "optax.rmsprop: it is of updates, which descend. Use optax.sgd with momentum or "
            f"optax.adam and its kind, or {_OWN}"
        )

    def direction(p: Leaf, m: Leaf) -> Leaf:
        if _is_masked(p):  # left out by perturb_only
            return p
        return None if _is_masked(m) else m  # None: no direction

    return jax.tree.map(direction, params, momentum, is_leaf=_is_masked)


def _comes_after_scaling(state: OptState, path: KeyPath) -> bool:
    """Whether a chain around the momentum has statistics of gradients in front of it."""
    for key in path:
        if isinstance(key, jax.tree_util.SequenceKey):
            if trees.inexact_leaves(state[: key.idx]):
                return True
            state = state[key.idx]
        else:
            state = getattr(state, key.name) if hasattr(key, "name") else state[key.key]
    return False


def _is_masked(node: object) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _fits(momentum: Updates, params: Params) -> bool:
    def same(p: Leaf, m: Leaf) -> bool:
        if _is_masked(p) or _is_masked(m):
            return True
        return trees.is_array(m) and jnp.shape(m) == jnp.shape(p)

    try:
        fits = jax.tree.map(same, params, momentum, is_leaf=_is_masked)
        return bool(jax.tree.leaves(momentum)) and all(jax.tree.leaves(fits))
    except (TypeError, ValueError):
        return False
