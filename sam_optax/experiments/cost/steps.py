"""The steps to measure: the library's, the hand-written ones, and optax.contrib.sam."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from sam_optax.experiments.cost.handwritten import HANDWRITTEN, Loss, Step, by_hand, fsam_state
from sam_optax.experiments.cost.placement import DATA
from sam_optax.experiments.methods import method, registry
from sam_optax.experiments.types import PyTree

CONTRIB, OPTIONS = "optax.contrib.sam", ("info", "skip_nonfinite")
# Without methods whose cost depends on the size of the training set; with options, as SAM's.
METHODS = [name for name, of in registry.METHODS.items() if name != "sgd" and not of.needs_data]
METHODS += OPTIONS
OPTIMIZERS: Mapping[str, Any] = {
    "sgd": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
}


class Row(NamedTuple):
    """A step: the library's or the hand-written one of a method, or optax's."""

    method: str
    by_hand: bool = False
    synchronized: bool = False

    def __str__(self) -> str:
        if self == BASE:
            return "base optimizer"
        return self.method + " by hand" * self.by_hand + ", synchronized" * self.synchronized

    @property
    def reference(self) -> "Row":
        """The hand-written step of the same method, or else of SAM."""
        of = self.method if self.method in HANDWRITTEN else "sam"
        return Row(of, True, self.synchronized)


BASE = Row("sgd", True)


def rows(methods: Iterable[str], per_device: bool = False) -> list[Row]:
    """The steps to measure for some methods, in the order to show them."""
    found = [BASE] if per_device else [BASE, Row("sam", True), Row(CONTRIB)]
    for synchronized in (False, True)[: 1 + per_device]:
        for row in (Row(name, False, synchronized) for name in methods):
            found += [Row("sam", True, synchronized), row.reference, row]
    return list(dict.fromkeys(found))


def make(
    row: Row, losses: Loss, optimizer: str = "sgd", per_device: bool = False, **changes: Any
) -> Step:
    """Builds a step from the losses of the examples, with the registry's hyperparameters."""

    def loss(params: optax.Params, batch: PyTree) -> jax.Array:
        return jnp.mean(losses(params, batch))

    tx = OPTIMIZERS[optimizer](1e-3)
    base = method.Base(lambda rate: tx, optax.constant_schedule(1e-3))
    if row.method == CONTRIB:  # as its documentation has it
        adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
        contrib = optax.contrib.sam(tx, adversary, sync_period=2, opaque_mode=True)
        return by_hand(HANDWRITTEN["sgd"], loss, contrib)
    axis = DATA if per_device else None
    variant = registry.METHODS["sam" if row.method in OPTIONS else row.method].variant(**changes)
    if row.by_hand:
        of = functools.partial(HANDWRITTEN[row.method], **variant.hyperparameters)
        start = {"fsam": fsam_state}.get(row.method)
        return by_hand(of, loss, tx, start, axis, row.synchronized)
    options = {"axis_name": axis, "sync_perturbation": row.synchronized}
    options |= {row.method: True} if row.method in OPTIONS else {}
    tx = variant.transformation(base._replace(options=options), jax.random.key(0))

    def step(params: optax.Params, state: optax.OptState, batch: PyTree) -> PyTree:
        values = jax.value_and_grad(lambda p: (loss(p, batch), None), has_aux=True)
        at = method.Step(losses, values, params, batch, jax.random.key(0), batch, batch)
        params, state, first = variant.update(tx, state, at)
        return params, state, None if first is None else first[0]

    return Step(tx.init, step)
