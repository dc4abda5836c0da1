"""Returns the loss and auxiliary output of a step's first pass through the optimizer's state."""

from typing import NamedTuple

import jax
from optax import OptState

from sam_optax._internal.types import LossAndAux, PyTree


class FirstPassState(NamedTuple):
    """State returned by ``update(..., value_and_grad_fn=...)``; see :func:`pop_first_pass`.

    Do not carry this state to the next step: call :func:`pop_first_pass` first.

    Attributes:
      state: :class:`~sam_optax.SharpnessAwareState`.
      value: ``(loss, aux)`` of the first pass.
    """

    state: OptState
    value: LossAndAux


def pop_first_pass(opt_state: OptState) -> tuple[OptState, LossAndAux]:
    """Separates the loss and auxiliary output of the first pass from the new optimizer state.

    Args:
      opt_state: the state that ``update(..., value_and_grad_fn=...)`` returned; it may be nested in
        ``optax.chain`` and other wrappers.

    Returns:
      ``(opt_state, (loss, aux))``; the state has the structure that ``init`` returns.

    Raises:
      ValueError: the state does not contain exactly one first pass.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1), sam_optax.rsam(rho=0.1, key=jax.random.key(0)))
      >>> params = jnp.array([3.0, 4.0])
      >>> state = tx.init(params)
      >>> def loss_fn(w):
      ...     return 0.5 * jnp.sum(w**2), {"largest": jnp.max(w)}
      >>> updates, state = tx.update(
      ...     None, state, params, value_and_grad_fn=jax.value_and_grad(loss_fn, has_aux=True))
      >>> state, (loss, aux) = sam_optax.pop_first_pass(state)
      >>> bool(loss != 12.5)  # the first pass of R-SAM is at its random start
      True
    """

    def is_first_pass(node: PyTree) -> bool:
        return isinstance(node, FirstPassState)

    nodes, structure = jax.tree.flatten(opt_state, is_leaf=is_first_pass)
    found = [node.value for node in nodes if is_first_pass(node)]
    if len(found) != 1:
        raise ValueError(
            f"the optimizer state must hold exactly one first pass, not {len(found)}: call "
            "pop_first_pass once, on what update(..., value_and_grad_fn=...) returned."
        )
    nodes = [node.state if is_first_pass(node) else node for node in nodes]
    return jax.tree.unflatten(structure, nodes), found[0]
