"""Sparse SAM: perturbs only a chosen subset of the elements."""

import functools
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from optax import Params, Updates

from sam_optax._internal import checks, control_flow, devices, largest_elements, noise, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import Leaf, PyTree
from sam_optax._perturbations.perturbation import Perturbation

_FISHER = "Pass the mean over examples of squared gradients."
Choice = Literal["fisher", "dynamic"]


class SparsifyState(NamedTuple):
    """State of :func:`sam_optax.sparsify`.

    Attributes:
      count: int32 scalar, the number of perturbations so far.
      mask: Boolean arrays with the shapes of the params, true where an element is perturbed;
        ``None`` in place of non-float leaves.
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
    """

    count: chex.Array
    mask: PyTree
    key: chex.Array


def sparsify(
    sparsity: float = 0.5,
    *,
    key: noise.Key,
    choice: Choice = "fisher",
    every: int = hp.static_default(100),
    drop: hp.Hyperparameter = 0.5,
) -> Perturbation:
    r"""Sparse SAM: sets a given share of the elements of the perturbation ε to zero.

    .. math::
        \varepsilon' = m \odot \varepsilon, \qquad m_i \in \{0, 1\}, \qquad
        \textstyle\sum_i m_i = (1 - s)\, n.

    The mask spans the whole tree and is chosen again at every ``every``-th perturbation:

    * ``"fisher"`` (SSAM-F): the elements of largest empirical Fisher information, approximated by
      the squared gradient on the step's batch. The mean over examples of squared gradients, as in
      the paper, can be passed instead: ``update(grads, state, params, grad_fn=grad_fn, fisher=f)``.
    * ``"dynamic"`` (SSAM-D): starts from a random mask; each new choice removes the share ``drop``
      of its elements with the smallest gradients and adds as many others at random.

    Chain it after a perturbation, ``as_perturbation(optax.chain(sam(rho), sparsify(s, key=key)))``,
    where ‖ε'‖ ≤ ρ as in the paper. Chained before one, it chooses the elements that ascend, with
    the full radius. It saves no computation, as the mask acts on dense arrays.

    Args:
      sparsity: share s of the elements that are not perturbed, 0 ≤ s < 1. Default 0.5; the paper
        goes beyond 0.9.
      key: a JAX PRNG key, typed or raw, or an integer seed, for the dynamic mask and for ties.
      choice: ``"fisher"`` or ``"dynamic"``.
      every: number of perturbations between choices, an integer ≥ 1. The paper chooses once per
        epoch.
      drop: share of the mask that a dynamic choice replaces, in [0, 1). Default 0.5. The paper
        decays it: ``optax.cosine_decay_schedule(0.5, steps)``.

    Returns:
      A :class:`~sam_optax.Perturbation` with a :class:`SparsifyState`, for use in ``optax.chain``.
      The mask takes one Boolean per element. Under ``axis_name`` it is chosen by the mean of the
      devices' scores, so that all devices have the same mask. With ``groups`` each group chooses
      its own mask, and that of the last group is kept until the next choice.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key.
      ValueError: a hyperparameter out of range, or an unknown ``choice``; in ``update``, the
        params are sharded over ``norm_axis_name``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> method = sam_optax.as_perturbation(optax.chain(
      ...     sam_optax.sam(rho=1.0), sam_optax.sparsify(0.5, key=jax.random.key(0))))
      >>> g = jnp.array([3.0, 0.1, -4.0, 0.2])
      >>> eps, _ = method.update(g, method.init(g), g)
      >>> print(eps != 0)
      [ True False  True False]

    References:
      Mi et al., `Make Sharpness-Aware Minimization Stronger: A Sparsified Perturbation Approach
      <https://arxiv.org/abs/2210.05177>`_, 2022.
    """
    hp.check_number("sparsity", sparsity, lower=0, upper=1)
    hp.check("drop", drop, lower=0, upper=1)
    hp.check_integer("every", every, lower=1)
    noise.check_key(key)
    if choice not in ("fisher", "dynamic"):
        raise ValueError(f"choice must be 'fisher' or 'dynamic', got {choice!r}.")

    kept = functools.partial(_kept, 1 - float(sparsity))

    def init_fn(params: Params) -> SparsifyState:
        words = noise.first_key(key)
        mask = everything = largest_elements.everywhere(params, True)
        if choice == "dynamic":
            chance = noise.bits_tree(words, everything)
            mask = largest_elements.largest(chance, everything, kept(params), words)
        return SparsifyState(jnp.zeros((), jnp.int32), mask, noise.next_key(words))

    def choose(state: SparsifyState, scores: PyTree, drop: chex.Numeric) -> PyTree:
        """The mask of the elements that are perturbed from now on."""
        ranks = jax.tree.map(largest_elements.rank, scores)
        if choice == "fisher":
            everything = largest_elements.everywhere(scores, True)
            return largest_elements.largest(ranks, everything, kept(scores), state.key)
        n, k = largest_elements.size(scores), kept(scores)
        share = jnp.asarray(drop).astype(jnp.float32)
        exchanged = jnp.minimum(jnp.round(share * k), n - k).astype(jnp.uint32)
        stay = largest_elements.largest(ranks, state.mask, k - exchanged, state.key)
        outside = jax.tree.map(jnp.logical_not, state.mask)
        chance = noise.bits_tree(state.key, ranks)
        join = largest_elements.largest(chance, outside, exchanged, state.key)
        return jax.tree.map(jnp.logical_or, stay, join)

    def update_fn(
        updates: Updates,
        state: SparsifyState,
        params: Params | None = None,
        *,
        drop: chex.Numeric,
        ascent_grads: Updates,
        fisher: Params | None = None,
        norm_axis_name: AxisName | None,
        state_axis_name: AxisName | None,
        **extra: Any,
    ) -> tuple[Updates, SparsifyState]:
        del params, extra
        if norm_axis_name is not None:
            raise ValueError(
                f"norm_axis_name={norm_axis_name!r} cannot be used with sparsify, whose mask spans "
                "the whole tree. Shard the params under jit instead."
            )
        if fisher is not None:
            checks.require_like("fisher", fisher, updates, _FISHER)
        squares = choice == "fisher" and fisher is not None

        def score(m: Leaf, leaf: Leaf) -> jax.Array | None:
            if m is None:
                return None
            x = jnp.zeros(m.shape) if leaf is None else jnp.abs(trees.widen(leaf))
            # Squares of gradients would leave the range of float32; their means do not.
            return devices.pmean(jnp.sqrt(x) if squares else x, state_axis_name)

        def chosen() -> PyTree:
            source = fisher if squares else ascent_grads
            scores = jax.tree.map(score, state.mask, source, is_leaf=trees.is_none)
            return choose(state, scores, drop)

        due = state.count % every == 0
        if choice == "dynamic":
            due &= state.count > 0  # the first mask is random
        mask = control_flow.cond(due, chosen, lambda: state.mask)
        masked = trees.map_inexact(lambda e, m: jnp.where(m, e, jnp.zeros_like(e)), updates, mask)
        count = optax.safe_increment(state.count)
        return masked, SparsifyState(count, mask, noise.next_key(state.key))

    return Perturbation(
        init_fn, update_fn, hyperparameters={"drop": drop}, state_type=SparsifyState
    )


def _kept(share: float, tree: PyTree) -> int:
    """Number of elements in the mask, at least one."""
    n = largest_elements.size(tree)
    return min(n, max(1, round(share * n)))
