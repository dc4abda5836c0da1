"""What a method of the experiments is, how it is declared, and its training steps."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.types import PyTree

Optimizer: TypeAlias = optax.GradientTransformation
Build: TypeAlias = Callable[..., Optimizer]
"""From the base optimizer and the hyperparameters of a method."""
Arguments: TypeAlias = dict[str, Any]
"""Of a call of ``update``."""
METHODS: "dict[str, Method]" = {}
"""The methods by name; see ``registry``."""
BLOCK = 500
"""Examples per microbatch of a gradient over the whole training set, to bound its memory."""


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

    def replaced(self, make: Callable[[optax.Schedule], Optimizer], lr: float) -> "Base":
        """With the base optimizer that a method prescribes, this weight decay and rate × ``lr``."""
        decay = optax.add_decayed_weights(self.weight_decay)
        return self._replace(
            make=lambda rate: optax.chain(decay, make(rate)),
            learning_rate=lambda step: lr * self.learning_rate(step),
        )

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

    def full_grad_fn(self, params: optax.Params) -> optax.Updates:
        """The gradient of the mean loss of all examples."""
        n = len(self.data[1])
        if n <= 8 * BLOCK:
            return self.grad_fn(self.data)(params)
        count = -(-n // BLOCK)

        def block(params: optax.Params, i: jax.Array) -> jax.Array:
            index = BLOCK * i + jnp.arange(BLOCK)
            batch = jax.tree.map(lambda leaf: leaf[jnp.minimum(index, n - 1)], self.data)
            return count / n * jnp.sum((index < n) * self.losses_fn(params, batch))

        return sam_optax.accumulate(jax.grad(block), count)(params)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, with hyperparameters suitable for the default task of the command.

    ``build(base, **options)`` is a :func:`sam_optax.sharpness_aware` or the base optimizer;
    ``arguments(step, **options)`` are the arguments of ``update`` in addition to ``grad_fn`` or in
    its place.
    """

    title: str
    build: Build
    # NAME is --METHOD.NAME on the command line. One without a default, ``None``, is passed on where
    # it is given; else the library's default holds.
    options: Mapping[str, inspect.Parameter]
    # Of a batch, in a step: a number, or f(batches in the training set, **hyperparameters).
    gradients: float | Callable[..., float] = 2.0
    arguments: Callable[..., Arguments] | None = None
    needs_data: bool = False  # whether a step needs all training examples in memory
    needs_previous: bool = False  # whether a step needs the batch of the previous step
    # Whether groups of a batch can have separate perturbations: not for methods that use the whole
    # batch or past gradients.
    groups: bool = True
    # The hyperparameters that scale the radius, together; a method without one has none.
    radius: tuple[str, ...] = ("rho",)
    decays: bool = True  # whether it has the weight decay of the base optimizer
    weight_decay: float | None = None  # chosen on digits; ``None``: the command's

    def variant(self, **changes: Any) -> "Variant":
        """The method with its default hyperparameters, except those given."""
        defaults = {name: option.default for name, option in self.options.items()}
        known = {name: value for name, value in defaults.items() if value is not None}
        return Variant(self, known | changes)


def method(title: str, **traits: Any) -> Callable[[Build], Build]:
    """Registers ``build(base, **hyperparameters)`` by its name, with traits of :class:`Method`.

    What a method adds to the arguments of ``update`` is of the whole batch: it has no ``groups``.
    """
    traits = {"groups": "arguments" not in traits, **traits}

    def register(build: Build) -> Build:
        _, *parameters = inspect.signature(build).parameters.values()
        METHODS[build.__name__] = Method(title, build, {p.name: p for p in parameters}, **traits)
        return build

    return register


class Variant(NamedTuple):
    """A method with values of its hyperparameters."""

    method: Method
    hyperparameters: Mapping[str, Any]

    def gradients(self, batches: float) -> float:
        """Gradients on a batch per step, given the number of batches in the training set."""
        found = self.method.gradients
        return found(batches, **self.hyperparameters) if callable(found) else found

    def transformation(self, base: Base, key: jax.Array) -> Optimizer:
        """Its optimizer."""
        return self.method.build(base._replace(key=key), **self.hyperparameters)

    def update(
        self, tx: Optimizer, state: optax.OptState, step: Step
    ) -> tuple[Any, optax.OptState, tuple[Any, Any] | None]:
        """A training step: ``(params, state, (loss, aux))``.

        Loss and aux are those of the first pass, or ``None`` if a method computes its own
        gradients.
        """
        if not self.method.radius:  # the base optimizer by itself
            first, grads = step.value_and_grad_fn(step.params)
            updates, state = tx.update(grads, state, step.params)
            return optax.apply_updates(step.params, updates), state, first
        of = self.method.arguments
        arguments = of(step, **self.hyperparameters) if of else {}
        if not arguments.keys() & {"grad_fn", "value_and_grad_fn"}:
            if "ascent_grad_fn" in arguments:  # a step along another ascent gradient needs no loss
                arguments["grad_fn"] = step.grad_fn(step.batch)
            else:
                arguments["value_and_grad_fn"] = step.value_and_grad_fn
        updates, state = tx.update(None, state, step.params, **arguments)
        given, first = arguments.get("value_and_grad_fn"), None
        if given:
            state, first = sam_optax.pop_first_pass(state)
        params = optax.apply_updates(step.params, updates)
        return params, state, first if given is step.value_and_grad_fn else None


def check(name: str, variant: Variant) -> None:
    """Raises :class:`UserError` for invalid hyperparameters, by a step on a toy problem."""

    def toy() -> Any:
        batch = jnp.ones((10, 2)), jnp.zeros(10, jnp.int32)
        params, key = jnp.ones(2), jax.random.key(0)

        def losses_fn(params: jax.Array, batch: PyTree) -> jax.Array:
            return batch[0] @ params

        both = jax.value_and_grad(lambda p: (jnp.mean(losses_fn(p, batch)), None), has_aux=True)
        step = Step(losses_fn, both, params, batch, key, batch, batch)
        tx = variant.transformation(Base(optax.adam, optax.constant_schedule(0.1)), key)
        return variant.update(tx, tx.init(params), step)

    try:
        jax.eval_shape(toy)
    except (TypeError, ValueError) as error:
        # Messages of the library begin with the name of the argument.
        raise UserError(f"--{name.replace('_', '-')}.{error}") from error
