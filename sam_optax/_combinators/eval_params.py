"""The unperturbed params of a run with :func:`sam_optax.alternating`."""

import itertools
import operator
from typing import Any

import jax
import optax
import optax.contrib
from optax import OptState, Params

from sam_optax._combinators.alternating import AlternatingState
from sam_optax._internal import trees


def eval_params(params: Params, state: OptState) -> Params:
    """Returns the exact unperturbed params of a training run with :func:`alternating`.

    Args:
      params: the params of the training loop, with the structure that the optimizer was initialized
        with; for NNX ``nnx.state(model, wrt)``.
      state: state of :func:`alternating`, or of an optimizer that contains it: in ``optax.chain``,
        ``optax.masked``, or once per label of ``optax.partition``; for NNX ``optimizer.opt_state``.

    Returns:
      The trained params w, with the structure of ``params``. Leaves that no ``alternating`` updates
      (non-float, masked out, or of another label's optimizer) are returned from ``params``.

    Raises:
      ValueError: ``state`` does not contain an :class:`AlternatingState`, contains two for the same
        leaf, or belongs to other params; or something around ``alternating`` changes its updates.

    Example:
      >>> import jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.alternating(optax.sgd(0.1), sam_optax.sam(rho=1.0))
      >>> params = jnp.array(3.0)
      >>> updates, state = tx.update(2 * params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(params, sam_optax.eval_params(params, state))
      4.0 3.0
    """
    # Leaves are matched by path: a state may hold some of them only (with None or a MaskedNode for
    # the others), and NNX holds each in a Variable of another type than the model's.
    held: dict[Any, Any] = {}
    for found in alternating_states(state):
        for path, leaf in jax.tree_util.tree_leaves_with_path(found.params):
            if path in held:
                raise ValueError(
                    "eval_params needs a state that holds each leaf of the params once, but two "
                    f"states of alternating(...) hold {jax.tree_util.keystr(path) or 'the params'}:"
                    " pass the state of one optimizer."
                )
            held[path] = leaf
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    own = [held.pop(path, leaf) for path, leaf in leaves]
    if held:
        missing = jax.tree_util.keystr(next(iter(held))) or "the only leaf"
        raise ValueError(
            "eval_params needs the params that the state belongs to, in the structure that the "
            f"optimizer was initialized with: the state holds {missing}, which params of structure "
            f"{structure} do not have. For NNX pass nnx.state(model, wrt)."
        )
    return jax.tree.unflatten(structure, own)


def alternating_states(state: OptState) -> list[AlternatingState]:
    """The states of :func:`alternating` in an optimizer's state; raises if there are none.

    It also raises if something after or around one of them changes its updates.
    """
    found: list[AlternatingState] = []
    for node in _nodes(state):
        if isinstance(node, AlternatingState):
            found.append(node)
        elif isinstance(node, _REWRITING) and any(
            isinstance(n, AlternatingState) for n in _nodes(node)
        ):
            raise ValueError(
                f"alternating(...) lies inside a wrapper that rewrites its updates, whose state is "
                f"{type(node).__name__}: the params have not moved to its points. {_REMEDY}"
            )
        elif type(node) is tuple and not all(
            itertools.dropwhile(operator.not_, map(_ends_alternating, node))
        ):
            raise ValueError(
                "alternating(...) is followed by another transformation in optax.chain, which may "
                f"change its updates: alternating must be the last. {_REMEDY}"
            )
    if not found:
        raise ValueError(
            "the state must be that of an optimizer that contains alternating(...), got "
            f"{type(state).__name__}. sharpness_aware and other optimizers leave the params "
            "unperturbed: use these themselves."
        )
    return found


_REMEDY = (
    "Put what follows or surrounds it inside, alternating(optax.chain(base_tx, ...), "
    "perturbation), and choose what is perturbed with perturb_only. optax.lookahead cannot be used."
)
_REWRITING = (optax.LookaheadState, optax.contrib.MechanicState, optax.contrib.ScheduleFreeState)


def _ends_alternating(part: Any) -> bool:
    """Whether a part of a chain contains ``alternating`` for all of the params."""

    def is_whole(state: AlternatingState) -> bool:
        leaves = jax.tree.leaves(state.params, is_leaf=trees.is_missing)
        return not any(isinstance(leaf, optax.MaskedNode) for leaf in leaves)

    return any(isinstance(node, AlternatingState) and is_whole(node) for node in _nodes(part))


def _nodes(tree: Any) -> list[Any]:
    """The tree and the nodes inside it, down to the states of ``alternating``."""
    if isinstance(tree, AlternatingState) or jax.tree_util.all_leaves([tree]):
        return [tree]
    children = jax.tree.leaves(tree, is_leaf=lambda node: node is not tree)
    return [tree, *(node for child in children for node in _nodes(child))]
