"""The momentum that a base optimizer keeps in its state."""

import jax
import jax.numpy as jnp
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
            f"base_state=opt_state to start_fn and perturb_fn, or {_OWN}"
        )
    if not jax.tree.leaves(params):
        return params
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
    if _is_of_updates(base_state, path):
        raise ValueError(
            "momentum_start needs a momentum of gradients, but that of the base optimizer, "
            f"{jax.tree_util.keystr(path)}, comes behind other transformations and may be of "
            "updates, as in optax.rmsprop and lars. Put what acts on gradients in front of a whole "
            f"optimizer, optax.chain(..., optax.sgd(lr, momentum)), or {_OWN}"
        )

    def direction(p: Leaf, m: Leaf) -> Leaf:
        if trees.is_missing(p):  # left out by perturb_only
            return p
        return None if trees.is_missing(m) else m  # None: no direction

    return jax.tree.map(direction, params, momentum, is_leaf=trees.is_missing)


def _is_of_updates(state: OptState, path: KeyPath) -> bool:
    """Whether other pieces of its chain, or statistics of gradients, come before the momentum."""
    chain = None
    for key in path:
        if isinstance(key, jax.tree_util.SequenceKey):
            if trees.inexact_leaves(state[: key.idx]):
                return True
            chain, state = key.idx, state[key.idx]
        else:
            state = getattr(state, key.name) if hasattr(key, "name") else state[key.key]
    return bool(chain)


def _fits(momentum: Updates, params: Params) -> bool:
    def same(p: Leaf, m: Leaf) -> bool:
        if trees.is_missing(p) or trees.is_missing(m):
            return True
        return trees.is_array(m) and jnp.shape(m) == jnp.shape(p)

    try:
        fits = jax.tree.map(same, params, momentum, is_leaf=trees.is_missing)
        return bool(jax.tree.leaves(momentum)) and all(jax.tree.leaves(fits))
    except (TypeError, ValueError):
        return False
