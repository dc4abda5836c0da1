"""The type of every perturbation: a gradient transformation that can also be applied."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import chex
import jax
import optax

from sam_optax import _trees


class RandomStartState(NamedTuple):
    """State of :func:`sam_optax.random_start`.

    Attributes:
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
      inner_state: state of the perturbation that follows the start.
      schedule: :class:`~sam_optax.ScheduleState` if a hyperparameter is a schedule, else
        ``optax.EmptyState``.
    """

    key: chex.Array
    inner_state: optax.OptState
    schedule: Any


class Perturbation(optax.GradientTransformationExtraArgs):
    """A gradient transformation that maps the ascent gradient g to a displacement ε.

    It is an optax transformation like any other (``init``, ``update``, usable in
    ``optax.chain``), whose output is *added* to the weights, and carries two functions for
    hand-written training loops:

    * ``start_fn(params, state) -> params`` at which the ascent gradient is to be taken: the
      params themselves but for random starts.
    * ``perturb_fn(params, grads, state, **extra) -> (perturbed_params, new_state)``, jitted:
      ``params + ε`` in the dtype of the params (or in ``perturb_dtype``).

    Args:
      init: ``params -> state``.
      update: ``(grads, state, params, **extra) -> (eps, state)``.
      start_fn: ``(params, state, **extra) -> params``; ``None`` is the identity.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> method = sam_optax.sam(rho=0.1)
      >>> params = jnp.array([3.0, 4.0])
      >>> state = method.init(params)
      >>> grads = jax.grad(lambda w: 0.5 * jnp.sum(w**2))(method.start_fn(params, state))
      >>> perturbed, state = method.perturb_fn(params, grads, state)
      >>> print(perturbed)
      [3.06 4.08]
    """

    start_fn: Callable[..., optax.Params]
    perturb_fn: Callable[..., tuple[optax.Params, optax.OptState]]
    has_random_start: bool

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        start_fn: Callable[..., Any] | None = None,
    ) -> "Perturbation":
        # The start travels with the update function: whatever takes the pair apart and makes
        # another of it, such as jax.tree.map, then does not lose it.
        if start_fn is None:
            start_fn = getattr(update, "start_fn", None)
        else:
            update.start_fn = start_fn  # type: ignore[attr-defined]
        self = super().__new__(cls, init, update)
        self.has_random_start = start_fn is not None
        self.start_fn = _identity if start_fn is None else jax.jit(start_fn)
        self.perturb_fn = jax.jit(self._perturb, static_argnames="perturb_dtype")
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "Perturbation":
        return cls(*iterable)

    def _perturb(
        self,
        params: optax.Params,
        grads: optax.Updates,
        state: optax.OptState,
        *,
        perturb_dtype: Any | None = None,
        **extra: Any,
    ) -> tuple[optax.Params, optax.OptState]:
        eps, state = self.update(grads, state, params, **extra)
        return _trees.add(params, eps, perturb_dtype), state

    def perturb(
        self,
        params: optax.Params,
        grads: optax.Updates,
        state: optax.OptState,
        perturb_dtype: Any | None,
        extra: dict[str, Any],
    ) -> tuple[optax.Params, optax.OptState]:
        """``perturb_fn``, also for extra arguments that are no arrays (functions, names)."""
        arrays = all(_trees.is_array(leaf) for leaf in jax.tree.leaves(extra))
        perturb = self.perturb_fn if arrays else self._perturb
        return perturb(params, grads, state, perturb_dtype=perturb_dtype, **extra)


def _identity(params: optax.Params, state: optax.OptState, **extra: Any) -> optax.Params:
    del state, extra
    return params


def as_perturbation(transformation: optax.GradientTransformation) -> Perturbation:
    """Gives any optax transformation a ``start_fn`` and a ``perturb_fn``.

    ε is what the transformation returns for the ascent gradient, with its sign: it is *added*
    to the weights, so ``optax.scale(rho)`` climbs and ``optax.sgd(rho)`` descends.

    Args:
      transformation: an optax transformation. A :class:`Perturbation` is returned as it is.

    Returns:
      The :class:`Perturbation`.

    Raises:
      TypeError: the argument is not a gradient transformation.
      ValueError: (from ``init`` and ``update``) it holds a random start that a wrapper such as
        ``optax.chain`` has cut off from its ``start_fn``.

    Example:
      >>> import optax, sam_optax
      >>> method = sam_optax.as_perturbation(
      ...     optax.chain(sam_optax.remove_full_gradient(), sam_optax.asam(rho=0.5)))
      >>> isinstance(method, sam_optax.Perturbation)
      True
    """
    if isinstance(transformation, Perturbation):
        return transformation
    if not isinstance(transformation, optax.GradientTransformation):
        raise TypeError(
            "perturbation must be an optax.GradientTransformation, such as sam_optax.sam(), got "
            f"{transformation!r}."
        )
    inner = optax.with_extra_args_support(transformation)

    def init_fn(params: optax.Params) -> optax.OptState:
        return _refuse_lost_start(inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        return inner.update(updates, _refuse_lost_start(state), params, **extra)

    return Perturbation(init_fn, update_fn)


def _refuse_lost_start(state: optax.OptState) -> optax.OptState:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, RandomStartState))
    if any(isinstance(node, RandomStartState) for node in nodes):
        raise ValueError(
            "the perturbation contains a random start (random_start or rsam) inside a wrapper "
            "such as optax.chain or optax.inject_hyperparams, which would take the ascent "
            "gradient at the params and not at the start. Put random_start outermost, "
            "random_start(optax.chain(...), key=key), and inject_hyperparams around "
            "sharpness_aware."
        )
    return state
