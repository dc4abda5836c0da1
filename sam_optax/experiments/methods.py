"""What a method of the comparison is, and the training step that all of them share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.errors import UserError


class Option(NamedTuple):
    """A hyperparameter of a method: its default value and what it is."""

    default: float | int
    help: str


class Base(NamedTuple):
    """What every method is built around.

    Attributes:
      tx: the base optimizer.
      learning_rate: the schedule in it.
      info: whether states keep the last step in numbers.
      groups: groups of the batch with perturbations of their own; ``None`` for one of all.
    """

    tx: optax.GradientTransformation
    learning_rate: optax.Schedule
    info: bool = False
    groups: int | None = None

    def sharp(
        self,
        perturbation: optax.GradientTransformation,
        first: optax.GradientTransformation | None = None,
        **options: Any,
    ) -> optax.GradientTransformationExtraArgs:
        """The base optimizer, behind ``first`` if there is one, driven by the sharp gradient."""
        tx = self.tx if first is None else optax.chain(first, self.tx)
        return sam_optax.sharpness_aware(
            tx, perturbation, info=self.info, groups=self.groups, **options
        )


class Step(NamedTuple):
    """What a training step has at hand.

    Attributes:
      losses_fn: ``(params, batch) -> losses``, one for each example.
      params: the params before the step.
      batch: the step's examples and labels.
      key: a PRNG key for this step.
      data: all examples and labels of the training set.
    """

    losses_fn: Callable[[Any, Any], chex.Array]
    params: Any
    batch: Any
    key: chex.PRNGKey
    data: Any

    def mean_loss(self, batch: Any) -> Callable[[Any], Any]:
        """The mean loss of some examples."""
        return lambda params: jnp.mean(self.losses_fn(params, batch))

    def grad_fn(self, batch: Any) -> Callable[[Any], Any]:
        """Its gradient."""
        return jax.grad(self.mean_loss(batch))


def _nothing(step: Step, **options: Any) -> dict[str, Any]:
    del step, options
    return {}


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, with the hyperparameters that suit the comparison's task.

    Attributes:
      title: what it is, in a few words.
      build: ``(base, key, **options) -> optimizer``, whose ``update`` takes ``grad_fn``.
      options: the hyperparameters; NAME is the option ``--METHOD.NAME`` of the command line.
      gradients: what a step costs, in gradients on a batch.
      arguments: ``(step, **options) -> `` what its ``update`` takes beside ``grad_fn``, or in its
        place.
    """

    title: str
    build: Callable[..., optax.GradientTransformation]
    options: Mapping[str, Option]
    gradients: float = 2.0
    arguments: Callable[..., dict[str, Any]] = _nothing

    def variant(self, **changes: Any) -> "Variant":
        """The method with its default hyperparameters, but for some."""
        defaults = {name: option.default for name, option in self.options.items()}
        return Variant(self, defaults | changes)


class Variant(NamedTuple):
    """A method with hyperparameters."""

    method: Method
    hyperparameters: Mapping[str, Any]

    def transformation(self, base: Base, key: chex.PRNGKey) -> optax.GradientTransformation:
        """Its optimizer."""
        return self.method.build(base, key, **self.hyperparameters)

    def look(self, base: Base, key: chex.PRNGKey, state: Any, step: Step) -> Any:
        """A training step in numbers, which is not taken.

        Returns:
          :class:`sam_optax.StepInfo`, or ``None`` for the base optimizer.
        """
        if not isinstance(state, sam_optax.SharpnessAwareState):
            return None
        tx = self.transformation(base._replace(info=True), key)
        state = state._replace(info=tx.init(step.params).info)
        arguments = self.method.arguments(step, **self.hyperparameters)
        if "grad_fn" not in arguments:
            mean = step.mean_loss(step.batch)
            values = jax.value_and_grad(lambda params: (mean(params), None), has_aux=True)
            arguments = {"value_and_grad_fn": values, **arguments}
        _, state = tx.update(None, state, step.params, **arguments)
        if "value_and_grad_fn" in arguments:
            state, _ = sam_optax.pop_first_pass(state)
        return state.info

    def update(
        self, tx: optax.GradientTransformation, state: optax.OptState, step: Step
    ) -> tuple[Any, optax.OptState]:
        """A training step: the new params and the new state."""
        arguments = self.method.arguments(step, **self.hyperparameters)
        arguments = {"grad_fn": step.grad_fn(step.batch), **arguments}
        updates, state = tx.update(None, state, step.params, **arguments)
        return optax.apply_updates(step.params, updates), state


def base_optimizer(*, lr: float, momentum: float, weight_decay: float, steps: int) -> Base:
    """SGD with momentum, coupled weight decay and a cosine learning rate that ends at 0."""
    schedule = optax.cosine_decay_schedule(lr, steps)
    sgd = optax.sgd(schedule, momentum=momentum)
    return Base(optax.chain(optax.add_decayed_weights(weight_decay), sgd), schedule)


def check(name: str, variant: Variant) -> None:
    """Raises :class:`UserError` for what the library refuses, by a step on a toy problem."""

    def toy() -> Any:
        batch = jnp.ones((10, 2)), jnp.zeros(10, jnp.int32)
        params, key = jnp.ones(2), jax.random.key(0)
        step = Step(lambda p, b: b[0] @ p, params, batch, key, batch)
        base = base_optimizer(lr=0.1, momentum=0.9, weight_decay=0.0, steps=10)
        tx = variant.transformation(base, key)
        return variant.update(tx, tx.init(params), step)

    try:
        jax.eval_shape(toy)
    except (TypeError, ValueError) as error:
        # The library's messages begin with the argument's name.
        raise UserError(f"--{name.replace('_', '-')}.{error}") from error
