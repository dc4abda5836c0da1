"""Sparse SAM: perturbs only a chosen subset of the elements."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from chex import Array, Numeric
from optax import Params, Updates

from sam_optax._internal import checks, control_flow, devices, largest_elements, noise, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.types import Leaf, PyTree
from sam_optax._perturbations.perturbation import Perturbation, refuse_shards

Choice = Literal["fisher", "dynamic"]


class SparsifyState(NamedTuple):
    """State of :func:`sam_optax.sparsify`.

    Attributes:
      count: int32 scalar, the number of perturbations so far.
      mask: Booleans, true where an element of the params is perturbed; ``None`` if non-float.
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
    """

    count: Array
    mask: PyTree
    key: Array


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
        \varepsilon' = m \odot \varepsilon, \quad m_i \in \{0, 1\}, \quad
        \sum_i m_i = (1 - s)\, n.

    The mask spans the whole tree and is chosen again at every ``every``-th perturbation:

    * ``"fisher"`` (SSAM-F): the elements of largest empirical Fisher information: the squared
      gradient on the step's batch or, as in the paper, the mean over examples of squared gradients,
      ``update(grads, state, params, grad_fn=grad_fn, fisher=f)``.
    * ``"dynamic"`` (SSAM-D): starts from a random mask; each new choice removes the share ``drop``
      of its elements with the smallest gradients and adds as many others at random.

    Chain it after a perturbation, ``optax.chain(sam(rho), sparsify(s, key=key))``, for ‖ε'‖ ≤ ρ as
    in the paper, or before one, for ascent with the full radius. It saves no computation.

    Args:
      sparsity: share s of unperturbed elements, in [0, 1). Default 0.5; the paper goes beyond 0.9.
      key: a JAX PRNG key, typed or raw, or an integer seed, for the dynamic mask and for ties.
      choice: ``"fisher"`` (default) or ``"dynamic"``.
      every: perturbations between choices, an integer ≥ 1. Default 100; in the paper an epoch.
      drop: share of the mask that a dynamic choice replaces, in [0, 1). Default 0.5; the paper
        decays it, ``optax.cosine_decay_schedule(0.5, steps)``.

    Returns:
      A :class:`~sam_optax.Perturbation` for use in ``optax.chain``. Its state is one Boolean per
      element and a key. Under ``axis_name`` all devices choose the same mask, by their mean scores.
      With ``groups`` each group chooses its own, and the last one is kept until the next choice.

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

    def kept(tree: PyTree) -> int:
        """Number of elements in the mask, at least one."""
        n = largest_elements.size(tree)
        return min(n, max(1, round((1 - float(sparsity)) * n)))

    def init_fn(params: Params) -> SparsifyState:
        words = noise.first_key(key)
        mask = everything = largest_elements.everywhere(params, True)
        if choice == "dynamic":
            chance = noise.bits_tree(words, everything)
            mask = largest_elements.largest(chance, everything, kept(params), words)
        return SparsifyState(jnp.zeros((), jnp.int32), mask, noise.next_key(words))

    def choose(state: SparsifyState, scores: PyTree, drop: Numeric) -> PyTree:
        """The mask of the elements that are perturbed from now on."""
        ranks = jax.tree.map(largest_elements.rank, scores)
        n, k = largest_elements.size(scores), kept(scores)
        if choice == "fisher":
            everything = largest_elements.everywhere(scores, True)
            return largest_elements.largest(ranks, everything, k, state.key)
        share = jnp.asarray(drop).astype(jnp.float32)
        exchanged = jnp.minimum(jnp.round(share * k), n - k).astype(jnp.uint32)
        stay = largest_elements.largest(ranks, state.mask, k - exchanged, state.key)
        outside = jax.tree.map(jnp.logical_not, state.mask)
        chance = noise.bits_tree(state.key, ranks)
        join = largest_elements.largest(chance, outside, exchanged, state.key)
        return jax.tree.map(jnp.logical_or, stay, join)

    def update_fn(
        updates: Updates, state: SparsifyState, params: Params | None, drop: Numeric, **extra: Any
    ) -> tuple[Updates, SparsifyState]:
        refuse_shards(extra["norm_axis_name"], "sparsify, whose mask spans the whole tree")
        fisher = extra.get("fisher")
        if fisher is not None:
            remedy = "Pass the mean over examples of squared gradients."
            checks.require_like("fisher", fisher, updates, remedy)
        squares = choice == "fisher" and fisher is not None

        def score(leaf: Leaf, m: Leaf) -> PyTree:
            if leaf is None:  # of a frozen part
                return jax.tree.map(lambda kept: jnp.zeros(kept.shape), m)
            if m is None:
                return None
            x = jnp.abs(trees.widen(leaf))
            # Squares of gradients would leave the range of float32; their means do not.
            return devices.pmean(jnp.sqrt(x) if squares else x, extra["state_axis_name"])

        def chosen() -> PyTree:
            source = fisher if squares else extra["ascent_grads"]
            scores = jax.tree.map(score, source, state.mask, is_leaf=trees.is_none)
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
