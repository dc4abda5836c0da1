"""The steps to measure: the library's, those by hand, and optax.contrib.sam."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import sam_optax
from sam_optax.experiments.bench import handwritten
from sam_optax.experiments.bench.handwritten import HANDWRITTEN, RHO, Loss, Step
from sam_optax.experiments.bench.models import Problem
from sam_optax.experiments.methods import method, registry

BASE = "sgd"
SAM_BY_HAND = "sam by hand"
DEFAULT = ("sam", "asam", "fsam", "rsam")
METHODS = {
    # Without those whose cost depends on the size of the training set.
    **{name: of for name, of in registry.METHODS.items() if name != BASE and not of.needs_data},
    "info": method.Method(
        "SAM that records its step in numbers",
        lambda base, key: base._replace(info=True).sharp(sam_optax.sam(RHO)),
        {},
    ),
    "skip_nonfinite": method.Method(
        "SAM that skips steps that are not finite",
        lambda base, key: base.sharp(sam_optax.sam(RHO), skip_nonfinite=True),
        {},
    ),
}
# As the hand-written steps have them. For other methods the registry's values are as good: no cost
# depends on ρ.
_HYPERPARAMETERS: dict[str, dict[str, float]] = {
    "sam": {"rho": RHO},
    "asam": {"rho": 0.5, "eta": 0.01},
    "fsam": {"rho": 0.1, "sigma": 1.0, "lmbda": 0.9},
    "rsam": {"rho": RHO, "gamma": 0.1, "lmbda": 2.0},
    "gsam": {"rho_max": RHO, "rho_min": RHO, "alpha": 0.4},
    "fisher_sam": {"rho": RHO, "eta": 1.0},
    "part": {"rho": RHO, "fraction": handwritten.FRACTION},
    "momentum": {"rho": RHO, "decay": 0.9},
}


class Measured(NamedTuple):
    """A step to measure.

    Attributes:
      make: builds the step for a problem.
      reference: name of the hand-written step that it is compared with.
    """

    make: Callable[[Problem], Step]
    reference: str


def steps(methods: Iterable[str]) -> dict[str, Measured]:
    """The steps to measure for some methods, in the order to show them."""
    names = [BASE, f"{BASE} by hand", SAM_BY_HAND, "optax.contrib.sam"]
    for name in methods:
        names += [name, f"{name} by hand"] if name in HANDWRITTEN else [name]
    return {name: _measured(name) for name in dict.fromkeys(names)}


def _measured(name: str) -> Measured:
    if name == "optax.contrib.sam":
        return Measured(lambda problem: optax_contrib_step(problem.loss), SAM_BY_HAND)
    of = name.removesuffix(" by hand")
    reference = f"{of} by hand" if of in HANDWRITTEN else SAM_BY_HAND
    if name != of:
        return Measured(lambda problem: HANDWRITTEN[of](problem.loss), reference)
    return Measured(lambda problem: library(name)(problem.losses), reference)


def base_tx() -> optax.GradientTransformation:
    """The base optimizer of every measured step."""
    return optax.sgd(handwritten.LEARNING_RATE, momentum=handwritten.MOMENTUM)


def library(name: str) -> Callable[[Loss], Step]:
    """The library's step of a method, as the experiments take it.

    It is made from the losses of the examples; their mean is enough for methods that do not choose
    among examples.
    """
    chosen = registry.METHODS[BASE] if name == BASE else METHODS[name]
    variant = chosen.variant(**_HYPERPARAMETERS.get(name, {}))
    schedule = optax.constant_schedule(handwritten.LEARNING_RATE)
    tx = variant.transformation(method.Base(base_tx(), schedule), jax.random.key(0))

    def of_losses(losses: Loss) -> Step:
        def step(params: optax.Params, state: Any, batch: Any) -> Any:
            def loss(p: optax.Params) -> tuple[jax.Array, None]:
                return jnp.mean(losses(p, batch)), None

            values = jax.value_and_grad(loss, has_aux=True)
            key = jax.random.key(0)
            at = method.Step(losses, values, params, batch, key, batch)
            params, state, first = variant.update(tx, state, at)
            return params, state, None if first is None else first[0]

        return Step(tx.init, step)

    return of_losses


def optax_contrib_step(loss: Loss) -> Step:
    """A SAM step with ``optax.contrib.sam``, as its documentation writes it."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(RHO))
    tx = optax.contrib.sam(base_tx(), adversary, sync_period=2, opaque_mode=True)

    def step(params: optax.Params, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        grad_fn = jax.grad(lambda p, _: loss(p, batch))
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)
