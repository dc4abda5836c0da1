"""The steps to measure, the library's and the hand-written ones, and what they train."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sam_optax.experiments.cost.handwritten import METHODS as BY_HAND
from sam_optax.experiments.cost.handwritten import Loss, Step, by_hand
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import method
from sam_optax.experiments.methods.registry import METHODS as REGISTERED
from sam_optax.experiments.networks import own, registry
from sam_optax.experiments.networks.small import MLP
from sam_optax.experiments.types import PyTree, Record

OPTIONS = ("info", "skip_nonfinite", "sync_perturbation")
"""Options of the library's step, as SAM's."""
# Without methods whose cost depends on the size of the training set.
METHODS = [name for name, of in REGISTERED.items() if name != "sgd" and not of.needs_data]
METHODS += OPTIONS
OPTIMIZERS = {"sgd": optax.sgd(1e-3, momentum=0.9), "adam": optax.adam(1e-3)}
BASE = "base optimizer"


class Problem(NamedTuple):
    """A network with the loss of each example; ``batch`` has shapes only, so it may be large."""

    init: Callable[[], optax.Params]
    losses: Loss
    batch: PyTree


def make(name: str, size: int, shape: tuple[int, ...], dtype: Any) -> Problem:
    """A network on ``size`` examples of a shape; mlp:DEPTHxWIDTH is of vectors of its width."""
    if found := re.fullmatch(r"mlp:([1-9]\d*)x([1-9]\d*)", name):
        depth, width = map(int, found.groups())
        return classification(MLP(width, width, depth - 1, dtype), size, (width,))
    module = registry.build(name, shape, 10, dtype)
    if named.is_spec(name):
        try:
            own.check(module, name, jnp.zeros((1, *shape)), None)
        except UserError as error:
            raise UserError(f"{error} --shape gives the shape of an example.") from error
    return classification(module, size, shape)


def classification(module: Any, size: int, shape: tuple[int, ...]) -> Problem:
    """Of examples. BatchNorm keeps no averages of its statistics, and dropout one mask."""
    x = jax.ShapeDtypeStruct((size, *shape), jnp.float32)
    init = jax.jit(lambda x: module.init(jax.random.key(0), x, train=True))
    rest = dict(jax.eval_shape(init, x))
    params = rest.pop("params")

    def logits(params: optax.Params, x: jax.Array) -> jax.Array:
        variables = {"params": params, **jax.tree.map(jnp.zeros_like, rest)}
        streams = dict.fromkeys(("params", "dropout"), jax.random.key(1))
        return module.apply(variables, x, train=True, mutable=[*rest], rngs=streams)[0]

    def losses(params: optax.Params, batch: PyTree) -> jax.Array:
        return optax.softmax_cross_entropy(logits(params, batch[0]), batch[1])

    y = jax.eval_shape(logits, params, x)  # probabilities of the classes
    return Problem(lambda: init(jnp.zeros((1, *shape)))["params"], losses, (x, y))


def rows(methods: Sequence[str], losses: Loss, base: Any, axis: str | None) -> Record:
    """The steps to measure for some methods, by name, in the order to show them.

    Each with its gradients, and as the reference the hand-written step of its method or of SAM.
    """
    found: Record = {}
    for name in ("sgd", "sam", *methods):
        of = name if name in BY_HAND else "sam"
        known, reference = variant(of), BASE if of == "sgd" else f"{of} by hand"
        step = by_hand(BY_HAND[of], losses, base, axis, **known.hyperparameters)
        found[reference] = step, {"reference": reference, "gradients": known.gradients(1)}
        if name in methods:
            step, gradients = library(name, losses, base, axis), variant(name).gradients(1)
            found[name] = step, {"reference": reference, "gradients": gradients}
    return found


def variant(name: str, **changes: Any) -> method.Variant:
    """A method, or SAM for an option, with the registry's hyperparameters except those given."""
    return REGISTERED["sam" if name in OPTIONS else name].variant(**changes)


def library(name: str, losses: Loss, base: Any, axis: str | None = None, **changes: Any) -> Step:
    """The library's step of a method, as ``compare`` takes it; ``changes`` as of ``variant``."""
    of = variant(name, **changes)
    options: Record = {"axis_name": axis} | ({name: True} if name in OPTIONS else {})
    given = method.Base(lambda rate: base, optax.constant_schedule(1e-3), options=options)
    tx = of.transformation(given, jax.random.key(0))

    def step(params: optax.Params, state: optax.OptState, batch: PyTree) -> PyTree:
        values = jax.value_and_grad(lambda p: (jnp.mean(losses(p, batch)), None), has_aux=True)
        at = method.Step(losses, values, params, batch, jax.random.key(0), batch, batch)
        params, state, first = of.update(tx, state, at)
        return params, state, None if first is None else first[0]

    return Step(tx.init, step)
