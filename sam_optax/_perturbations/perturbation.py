"""The type of every perturbation: a gradient transformation from the ascent gradient to ε."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import optax
from jax.typing import DTypeLike
from optax import OptState, Params, Updates

from sam_optax._internal import checks, control_flow, roles, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.devices import AxisName
from sam_optax._internal.start_state import StartState, refuse_lost_start, unmarked
from sam_optax._internal.types import ExtraArgs, Function

TREE_EXTRAS = ("ascent_grads", "fisher", "full_grads")
"""Extra arguments of perturbations that have the structure of the params."""

StartFn: TypeAlias = Callable[..., Params]
"""``(params, state, **extra) -> params``: where the ascent gradient is taken."""


Start: TypeAlias = tuple[StartFn, bool, int]
"""The ``start_fn`` of a :class:`StartState`, ``single_pass`` and ``samples``."""


class Perturbation(optax.GradientTransformationExtraArgs):
    """A gradient transformation that maps the ascent gradient g to a displacement ε.

    It is an optax transformation whose output is *added* to the params. In ``optax.chain``, every
    part can read the raw gradient from the extra argument ``ascent_grads``. For hand-written loops:

    * ``start_fn(params, state) -> params`` is where to take the ascent gradient: at the params
      themselves, except for methods with a start (``has_start``).
    * ``perturb_fn(params, grads, state, **extra) -> (perturbed_params, new_state)``, jitted,
      returns ``params + ε`` in the dtype of the params (or in ``perturb_dtype``).

    The state of a method with a start is marked as a :class:`StartState`: ``optax.chain`` and other
    wrappers keep only ``init`` and ``update``, and raise an error where they would lose the start.

    Args:
      init: ``params -> state``, any pytree.
      update: ``(grads, state, params, **extra) -> (eps, state)``.
      start_fn: ``(params, state, **extra) -> params``; ``None`` is the identity.
      hyperparameters: numbers and schedules by name. ``update`` and ``start_fn`` receive their
        values at the training step as keyword arguments. With a schedule the state is a
        :class:`ScheduleState`.
      single_pass: whether the start *is* the perturbed point, ``start_fn(params, state) ==
        params + eps``, so that a step takes one gradient.
      samples: number of draws of a random start over which a step averages its gradient.
      state_type: type of the state (or a tuple of types), for a clear error if ``update`` receives
        another method's state. ``None`` accepts any state.

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

    start_fn: StartFn
    perturb_fn: Callable[..., tuple[Params, OptState]]
    has_start: bool
    single_pass: bool
    samples: int

    def __new__(
        cls,
        init: Function,
        update: Function,
        start_fn: StartFn | None = None,
        *,
        hyperparameters: Mapping[str, hp.Hyperparameter] | None = None,
        single_pass: bool = False,
        samples: int = 1,
        state_type: checks.StateType | None = None,
    ) -> "Perturbation":
        method = hp.scheduled(
            hyperparameters or {},
            init,
            _with_state_of(state_type, update),
            _with_state_of(state_type, start_fn or _identity),
        )
        if start_fn is None:
            init, update, _ = _guarded(method, refuse_lost_start, lambda state: state)
            return cls._made(init, update, None)
        own = functools.partial(unmarked, state_type=state_type)
        init, update, start = _guarded(method, StartState, own)
        return cls._made(init, update, (start, single_pass, samples))

    @classmethod
    def around(
        cls, inner: "Perturbation", init: Function, update: Function, start: StartFn, **options: Any
    ) -> "Perturbation":
        """A perturbation that wraps ``inner``, with a start if ``inner`` has one."""
        start_fn = start if inner.has_start else None
        return cls(
            init, update, start_fn, single_pass=inner.single_pass, samples=inner.samples, **options
        )

    @classmethod
    def _made(cls, init: Function, update: Function, start: Start | None) -> "Perturbation":
        """A perturbation from functions that are already guarded, with their start."""
        self = super().__new__(cls, init, update)
        self._start = start
        self.has_start = start is not None
        start_fn, self.single_pass, self.samples = start or (None, False, 1)
        self.start_fn = control_flow.jitted_on_arrays(start_fn) if start_fn else _identity
        self.perturb_fn = jax.jit(
            functools.partial(displace, self), static_argnames="perturb_dtype"
        )
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "Perturbation":
        return cls(*iterable)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._made, (self.init, self.update, self._start)


Perturbation.__module__ = "sam_optax"  # where users find it: signatures and pickles show it
# Without this, JAX would flatten a perturbation as a pair of functions and lose the start.
jax.tree_util.register_pytree_node(
    Perturbation,
    lambda p: ((p.init, p.update), p._start),
    lambda start, functions: Perturbation._made(*functions, start),
)


def _with_state_of(expected: checks.StateType | None, function: Function) -> Function:
    """``function``, whose second argument must be a state of the expected type."""
    if expected is None:
        return function

    def checked(first: Any, state: OptState, *rest: Any, **extra: Any) -> Any:
        checks.require_state("perturbation_state", state, expected)
        return function(first, state, *rest, **extra)

    return checked


def _guarded(
    method: hp.Scheduled, mark: Function, own: Function
) -> tuple[Function, Function, StartFn]:
    """``init``, ``update`` and ``start_fn`` with all arguments; ``own`` undoes ``mark``."""

    def init_fn(params: Params) -> OptState:
        roles.refuse_other_places()
        return mark(method.init(params))

    def update_fn(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        given = roles.of_perturbation(updates, extra)
        eps, new_state = method.update(updates, own(state), params, **given)
        return eps, mark(new_state)

    def start_fn(params: Params, state: OptState, **extra: Any) -> Params:
        return method.start(params, own(state), **roles.of_perturbation(None, extra))

    return init_fn, update_fn, start_fn


def require_params(name: str, params: Params | None, hint: str = ".") -> None:
    """Raises if a method that reads the params is called without them."""
    if params is None:
        raise ValueError(f"{name} needs the params: call update(grads, state, params){hint}")


def refuse_shards(axis_name: AxisName | None, method: str) -> None:
    """Raises if leaves are split along a named axis, for a method that needs whole leaves."""
    if axis_name is not None:
        raise ValueError(
            f"norm_axis_name={axis_name!r} cannot be used with {method}: shard them under jit."
        )


def _identity(params: Params, state: OptState, **extra: Any) -> Params:
    return params


def displace(
    method: Perturbation,
    params: Params,
    grads: Updates,
    state: OptState,
    *,
    perturb_dtype: DTypeLike | None = None,
    **extra: Any,
) -> tuple[Params, OptState]:
    """``params + ε`` and the new state: what ``perturb_fn`` jits."""
    eps, state = method.update(grads, state, params, **extra)
    return trees.add(params, eps, perturb_dtype), state


def perturbed_params(
    method: Perturbation,
    params: Params,
    grads: Updates,
    state: OptState,
    perturb_dtype: DTypeLike | None,
    extra: ExtraArgs,
) -> tuple[Params, OptState]:
    """The result of ``perturb_fn``; arguments may include functions and axis names.

    It is jitted unless the caller is being traced: inside a larger program, an inner jit would keep
    the compiler from sharing norms with the surrounding code.
    """
    jitted = trees.all_arrays(extra) and not control_flow.is_traced(params, grads, state, extra)
    perturb = method.perturb_fn if jitted else functools.partial(displace, method)
    return perturb(params, grads, state, perturb_dtype=perturb_dtype, **extra)


def as_perturbation(transformation: optax.GradientTransformation) -> Perturbation:
    """Converts any optax transformation to a :class:`Perturbation`.

    ε is its output for the ascent gradient, in the gradient's dtypes, and is *added* to the params:
    ``optax.scale(rho)`` ascends and ``optax.sgd(rho)`` descends.

    Args:
      transformation: an optax transformation. A :class:`Perturbation` is returned unchanged.

    Returns:
      The :class:`Perturbation`.

    Raises:
      TypeError: the argument is not a gradient transformation.
      ValueError: (from ``init`` and ``update``) a wrapper in it has lost a start.

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
    inner = roles.open_to_arguments(transformation)

    def update_fn(
        updates: Updates, state: OptState, params: Params | None, **extra: Any
    ) -> tuple[Updates, OptState]:
        eps, state = inner.update(updates, state, params, **extra)
        return trees.map_inexact(trees.cast_like, eps, updates), state

    return Perturbation(inner.init, update_fn)
