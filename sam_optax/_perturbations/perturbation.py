"""The type of every perturbation: a gradient transformation that can also be applied."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from sam_optax._internal import states, trees


class StartState(NamedTuple):
    """State of every perturbation that takes its first gradient at a start of its own.

    It marks such a state wherever it lies in the state of a larger transformation: a wrapper that
    takes over ``init`` and ``update`` but loses ``start_fn`` is known by it.

    Attributes:
      state: the method's own state, such as :class:`~sam_optax.RandomStartState`.
    """

    state: Any


TREE_EXTRAS = ("ascent_grads", "fisher", "full_grads")
"""Extra arguments of the perturbations that line up with the params, leaf by leaf."""


class Start(NamedTuple):
    """Where a perturbation takes its first gradient, if not at the params.

    Attributes:
      fn: ``(params, state, **extra) -> params``.
      single_pass: see :class:`Perturbation`.
      samples: see :class:`Perturbation`.
    """

    fn: Callable[..., optax.Params]
    single_pass: bool
    samples: int


class Perturbation(optax.GradientTransformationExtraArgs):
    """A gradient transformation that maps the ascent gradient g to a displacement ε.

    It is an optax transformation like any other (``init``, ``update``, usable in
    ``optax.chain``), whose output is *added* to the weights, and carries two functions for
    hand-written training loops:

    * ``start_fn(params, state) -> params`` at which the ascent gradient is to be taken: the
      params themselves but for methods with a start of their own (``has_start``).
    * ``perturb_fn(params, grads, state, **extra) -> (perturbed_params, new_state)``, jitted:
      ``params + ε`` in the dtype of the params (or in ``perturb_dtype``). Every part of a chain
      can see the raw gradient, as the extra argument ``ascent_grads``.

    Args:
      init: ``params -> state``.
      update: ``(grads, state, params, **extra) -> (eps, state)``.
      start_fn: ``(params, state, **extra) -> params``; ``None`` is the identity.
      single_pass: whether the start *is* the perturbed point, ``start_fn(params, state) ==
        params + eps``, so that one gradient makes a step.
      samples: number of draws of a random start over which a step averages its gradient.

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
    has_start: bool
    single_pass: bool
    samples: int

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        start_fn: Callable[..., Any] | None = None,
        *,
        single_pass: bool = False,
        samples: int = 1,
    ) -> "Perturbation":
        # The start travels with the update function: whatever takes the pair apart and makes
        # another of it, such as jax.tree.map, then does not lose it. It is a partial because a
        # caller's function is not ours to change, and a bound method takes no attributes.
        if start_fn is not None:
            update = functools.partial(update)
            update.start = Start(start_fn, single_pass, samples)  # type: ignore[attr-defined]
        start: Start | None = getattr(update, "start", None)
        self = super().__new__(cls, init, update)
        self.has_start = start is not None
        self.single_pass = start is not None and start.single_pass
        self.samples = 1 if start is None else start.samples
        self.start_fn = _identity if start is None else jax.jit(start.fn)
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
        eps, state = self.update(grads, state, params, **{"ascent_grads": grads, **extra})
        return trees.add(params, eps, perturb_dtype), state

    def with_start_of(self, start_fn: Callable[..., Any], inner: "Perturbation") -> "Perturbation":
        """This perturbation, which wraps ``inner``, with a start if that has one."""
        if not inner.has_start:
            return self
        return Perturbation(
            self.init,
            self.update,
            start_fn,
            single_pass=inner.single_pass,
            samples=inner.samples,
        )

    def perturb(
        self,
        params: optax.Params,
        grads: optax.Updates,
        state: optax.OptState,
        perturb_dtype: Any | None,
        extra: dict[str, Any],
    ) -> tuple[optax.Params, optax.OptState]:
        """``perturb_fn``, also for extra arguments that are no arrays (functions, names)."""
        perturb = self.perturb_fn if trees.all_arrays(extra) else self._perturb
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
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, START_STATES))
    if any(isinstance(node, START_STATES) for node in nodes):
        raise ValueError(
            "the perturbation contains a start of its own (a random start: random_start, rsam or "
            "low_pass; or momentum_start) inside a wrapper such as optax.chain or "
            "optax.inject_hyperparams, which would take the ascent gradient at the params and "
            "not at the start. Put the start outermost, random_start(optax.chain(...), key=key), "
            "and inject_hyperparams around sharpness_aware."
        )
    return state
