"""What a method of the experiments is, how it is declared, and its training steps."""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, UnionType
from typing import Annotated, Any, NamedTuple, TypeAlias, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.named import reported
from sam_optax.experiments.types import PyTree, Record

Optimizer: TypeAlias = optax.GradientTransformation


class Base(NamedTuple):
    """Common to all methods: the base optimizer, and groups of the batch."""

    make: Callable[[optax.Schedule], Optimizer]  # from its learning rate
    learning_rate: optax.Schedule
    groups: int | None = None  # of the batch, each with a separate perturbation
    weight_decay: float = 0.0
    examples: int = 1  # to train on
    decay: float | None = None  # of an average of gradients, where it keeps no momentum of them
    key: Any = None  # of a method's draws
    options: Mapping[str, Any] = MappingProxyType({})  # further ones, of ``sharpness_aware``

    @property
    def tx(self) -> Optimizer:
        """The base optimizer."""
        return self.make(self.learning_rate)

    def sharp(
        self, perturbation: Optimizer, descent: Optimizer | None = None, **options: Any
    ) -> Optimizer:
        """The base optimizer (behind ``descent``, if given), driven by the sharp gradient."""
        options |= {"descent": descent, "groups": self.groups, **self.options}
        return sam_optax.sharpness_aware(self.tx, perturbation, **options)


@dataclasses.dataclass(frozen=True)
class Step:
    """The inputs of a training step.

    ``value_and_grad_fn`` is ``params -> ((loss, aux), grads)`` on the step's batch; with groups
    ``(params, i)``, on one of them.
    """

    losses_fn: Callable[[optax.Params, PyTree], jax.Array]  # of each example of a batch
    value_and_grad_fn: Callable[..., Any]
    params: optax.Params
    batch: PyTree  # examples and labels, as the network receives them
    key: jax.Array
    data: PyTree  # the training set, not augmented
    previous: PyTree = ()  # the batch of the previous step, in the first step its own

    def loss_fn(self, batch: PyTree) -> Callable[[optax.Params], jax.Array]:
        """The mean loss of the given examples."""
        return lambda params: jnp.mean(self.losses_fn(params, batch))

    def grad_fn(self, batch: PyTree) -> Callable[[optax.Params], optax.Updates]:
        """The gradient of the mean loss of the given examples."""
        return jax.grad(self.loss_fn(batch))


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, with hyperparameters suitable for the default task of the command.

    ``build(base, **hyperparameters)`` is a :func:`sam_optax.sharpness_aware`, or without a radius
    an optimizer of gradients; ``arguments(step, **hyperparameters)`` are what its ``update`` is
    called with.
    """

    name: str  # NAME of --NAME.HYPERPARAMETER
    title: str
    build: Callable[..., Optimizer]
    # Annotated with type and help. Without a default, ``None``, the library's is used.
    options: Mapping[str, inspect.Parameter]
    # Of a batch, in a step: a number, or f(batches in the training set, **hyperparameters).
    gradients: float | Callable[..., float] = 2.0
    arguments: Callable[..., Record] = lambda s, **_: {"value_and_grad_fn": s.value_and_grad_fn}
    needs_data: bool = False  # whether a step needs all training examples
    needs_previous: bool = False  # whether a step needs the batch of the previous step
    # Whether groups of a batch can have separate perturbations: not for methods that use the whole
    # batch or past gradients.
    groups: bool = True
    # The hyperparameters that scale the radius, together; an optimizer of gradients has none.
    radius: tuple[str, ...] = ("rho",)
    decays: bool = True  # whether it has the weight decay of the base optimizer
    weight_decay: float | None = None  # chosen for it; ``None``: the command's

    def variant(self, **changes: Any) -> "Variant":
        """The method with its default hyperparameters, except those given."""
        defaults = {name: option.default for name, option in self.options.items()}
        known = {name: value for name, value in defaults.items() if value is not None}
        return Variant(self, known | changes)


def method(title: str, **traits: Any) -> Callable[[Callable[..., Optimizer]], Method]:
    """Makes a method of a function, in a file for ``compare --methods sgd FILE.py:half``, say.

    Its parameters after the base optimizer are hyperparameters, as in ``--half.rho 0.1 0.2``; with
    ``--tune`` the radius is traced, as under ``jit``. The traits are attributes of :class:`Method`;
    with ``arguments`` it has no ``groups``, for they are of the whole batch.

    Example:
      >>> from sam_optax.experiments import Base, method
      >>> @method("SAM with half of the radius")
      ... def half(base: Base, rho: float = 0.5):
      ...     return base.sharp(sam_optax.sam(rho / 2))
    """

    def declare(build: Callable[..., Optimizer]) -> Method:
        name, options = build.__name__, _hyperparameters(build)
        own = {"groups": "arguments" not in traits, **traits}
        found = Method(name, title, build, options, **own)
        numbers = {of.name for of in options.values() if isinstance(of.default, int | float)}
        if not numbers >= {*found.radius}:
            raise TypeError(
                f"{name} has no hyperparameter {', '.join(found.radius)} with a number as its "
                "default; name that of its radius in radius=(NAME,), or give () for an optimizer "
                "that takes gradients"
            )
        return found

    return declare


def _hyperparameters(build: Callable[..., Optimizer]) -> dict[str, inspect.Parameter]:
    found = {}
    for of in [*inspect.signature(build, eval_str=True).parameters.values()][1:]:
        hint, text = of.annotation, f"{of.name}."
        if get_origin(hint) is Annotated:
            hint, text, *_ = get_args(hint)
        among = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [kind for kind in (*among, type(of.default)) if kind in (int, float, bool, str)]
        if not kinds or not isinstance(of.default, int | float | str | None):
            wanted = "needs a default of type int, float, bool or str; or None, annotated with one"
            raise TypeError(f"{of.name} of {build.__name__} {wanted}")
        found[of.name] = of.replace(annotation=Annotated[kinds[0], text])
    return found


class Variant(NamedTuple):
    """A method with values of its hyperparameters."""

    method: Method
    hyperparameters: Mapping[str, Any]  # as in results, where infinity is text

    @property
    def values(self) -> Record:
        """The hyperparameters as the method's functions get them."""
        floats = {k for k, of in self.method.options.items() if get_args(of.annotation)[0] is float}
        infinite = {k for k in floats if str(self.hyperparameters.get(k)) == "inf"}
        return {**self.hyperparameters, **dict.fromkeys(infinite, math.inf)}

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Turns what the method's functions raise into a :class:`UserError` that names it."""
        name = self.method.name
        with reported(f"--methods {name}:"):
            try:
                yield
            except (TypeError, ValueError) as error:
                if str(error).partition(" ")[0] in self.method.options:  # as the library's messages
                    raise UserError(f"--{name.replace('_', '-')}.{error}") from error
                raise

    def gradients(self, batches: float) -> float:
        """Gradients on a batch per step, given the number of batches in the training set."""
        found = self.method.gradients
        with self._reported():
            return float(found(batches, **self.values) if callable(found) else found)

    def transformation(self, base: Base, key: jax.Array) -> Optimizer:
        """Its optimizer, or a :class:`UserError` that says what is wrong with it."""
        with self._reported():
            found = self.method.build(base._replace(key=key), **self.values)
            if not isinstance(found, optax.GradientTransformation):
                raise TypeError(f"it returns {found!r}; let it return base.sharp(...), say")
            return found

    def init(self, tx: Optimizer, params: optax.Params) -> optax.OptState:
        """The first state of its optimizer."""
        with self._reported():
            return tx.init(params)

    def update(
        self, tx: Optimizer, state: optax.OptState, step: Step
    ) -> tuple[Any, optax.OptState, tuple[Any, Any] | None]:
        """A training step: params, state, and ``(loss, aux)`` of the first pass if it has one."""
        with self._reported():
            if not self.method.radius:  # an optimizer that takes gradients
                first, grads = step.value_and_grad_fn(step.params)
                updates, state = tx.update(grads, state, step.params)
                return optax.apply_updates(step.params, updates), state, first
            arguments = self.method.arguments(step, **self.values)
            updates, state = tx.update(None, state, step.params, **arguments)
            if updates is None:  # as optax's return without gradients
                raise TypeError("it needs gradients; give radius=(), or return base.sharp(...)")
            given, first = arguments.get("value_and_grad_fn"), None
            if given:
                state, first = sam_optax.pop_first_pass(state)
            params = optax.apply_updates(step.params, updates)
            return params, state, first if given is step.value_and_grad_fn else None


def check(variant: Variant) -> None:
    """Raises :class:`UserError` for invalid hyperparameters, before there is a network."""
    variant.transformation(Base(optax.adam, optax.constant_schedule(0.1)), jax.random.key(0))
