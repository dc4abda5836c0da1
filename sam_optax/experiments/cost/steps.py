"""The steps to measure: the library's and the hand-written ones."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sam_optax.experiments.cost import handwritten
from sam_optax.experiments.cost.handwritten import Loss, Step
from sam_optax.experiments.cost.placement import DATA
from sam_optax.experiments.methods import method, registry
from sam_optax.experiments.methods.method import Variant
from sam_optax.experiments.types import PyTree

OPTIONS = ("info", "skip_nonfinite", "sync_perturbation")
"""Options of the library's step, as SAM's."""
# Without methods whose cost depends on the size of the training set.
METHODS = [name for name, of in registry.METHODS.items() if name != "sgd" and not of.needs_data]
METHODS += OPTIONS
OPTIMIZERS: Mapping[str, Any] = {
    "sgd": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
}


class Row(NamedTuple):
    """A step: the library's or the hand-written one of a method."""

    method: str
    by_hand: bool = False

    def __str__(self) -> str:
        return "base optimizer" if self == BASE else self.method + " by hand" * self.by_hand

    @property
    def reference(self) -> "Row":
        """The hand-written step of the same method, or else of SAM."""
        return Row(self.method if self.method in handwritten.METHODS else "sam", by_hand=True)

    def variant(self, **changes: Any) -> Variant:
        """The method with the registry's hyperparameters, except those given."""
        return registry.METHODS["sam" if self.method in OPTIONS else self.method].variant(**changes)


BASE = Row("sgd", by_hand=True)


def rows(methods: Iterable[str]) -> list[Row]:
    """The steps to measure for some methods, in the order to show them."""
    pairs = [(Row(name).reference, Row(name)) for name in methods]
    return list(dict.fromkeys([BASE, Row("sam", by_hand=True), *sum(pairs, ())]))


def make(
    row: Row, losses: Loss, optimizer: str = "sgd", per_device: bool = False, **changes: Any
) -> Step:
    """Builds a step from the losses of the examples; ``changes`` are of hyperparameters."""

    def loss(params: optax.Params, batch: PyTree) -> jax.Array:
        return jnp.mean(losses(params, batch))

    base, axis = OPTIMIZERS[optimizer](1e-3), DATA if per_device else None
    variant = row.variant(**changes)
    if row.by_hand:
        of, init = handwritten.METHODS[row.method]
        of = functools.partial(of, **variant.hyperparameters)
        return handwritten.by_hand(of, init, loss, base, axis)
    options = {"axis_name": axis} | ({row.method: True} if row.method in OPTIONS else {})
    given = method.Base(lambda rate: base, optax.constant_schedule(1e-3), options=options)
    tx = variant.transformation(given, jax.random.key(0))

    def step(params: optax.Params, state: optax.OptState, batch: PyTree) -> PyTree:
        values = jax.value_and_grad(lambda p: (loss(p, batch), None), has_aux=True)
        at = method.Step(losses, values, params, batch, jax.random.key(0), batch, batch)
        params, state, first = variant.update(tx, state, at)
        return params, state, None if first is None else first[0]

    return Step(tx.init, step)
