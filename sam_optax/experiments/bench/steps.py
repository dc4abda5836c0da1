"""The steps to measure: the library's, the hand-written ones, and optax.contrib.sam."""

import inspect
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import sam_optax
from sam_optax.experiments.bench import handwritten
from sam_optax.experiments.bench.handwritten import HANDWRITTEN, RHO, Loss, Step
from sam_optax.experiments.bench.models import Problem
from sam_optax.experiments.methods import method, registry
from sam_optax.experiments.types import PyTree, Record

BASE = "sgd"
CONTRIB = "optax.contrib.sam"
SAM_BY_HAND = "sam by hand"
DEFAULT = ("sam", "asam", "fsam", "rsam")
METHODS = {
    # Exclude methods whose cost depends on the size of the training set.
    **{name: of for name, of in registry.METHODS.items() if name != BASE and not of.needs_data},
    "info": method.Method(
        "SAM with diagnostics of each step",
        lambda base, key: base._replace(info=True).sharp(sam_optax.sam(RHO)),
        {},
    ),
    "skip_nonfinite": method.Method(
        "SAM that skips non-finite steps",
        lambda base, key: base.sharp(sam_optax.sam(RHO), skip_nonfinite=True),
        {},
    ),
}


def steps(methods: Iterable[str]) -> list[str]:
    """The steps to measure for some methods, in the order to show them."""
    names = [BASE, f"{BASE} by hand", SAM_BY_HAND, CONTRIB]
    for name in methods:
        names += [name, f"{name} by hand"] if name in HANDWRITTEN else [name]
    return list(dict.fromkeys(names))


def reference(name: str) -> str:
    """The hand-written step that a step is compared with."""
    of = name.removesuffix(" by hand")
    return f"{of} by hand" if of in HANDWRITTEN else SAM_BY_HAND


def make(name: str, problem: Problem) -> Step:
    """Builds a step for a problem."""
    if name == CONTRIB:
        return optax_contrib_step(problem.loss)
    if name == reference(name):
        return HANDWRITTEN[name.removesuffix(" by hand")](problem.loss)
    return library(name)(problem.losses)


def base_tx() -> optax.GradientTransformation:
    """The base optimizer of every measured step."""
    return optax.sgd(handwritten.LEARNING_RATE, momentum=handwritten.MOMENTUM)


def library(name: str) -> Callable[[Loss], Step]:
    """The library's step of a method, as in the experiments, from the losses of the examples.

    Methods that do not choose among examples need only the mean loss.
    """
    chosen = registry.METHODS[BASE] if name == BASE else METHODS[name]
    variant = chosen.variant(**_hyperparameters(name))
    base = method.Base(lambda _: base_tx(), optax.constant_schedule(handwritten.LEARNING_RATE))
    tx = variant.transformation(base, jax.random.key(0))

    def of_losses(losses: Loss) -> Step:
        def step(params: optax.Params, state: optax.OptState, batch: PyTree) -> PyTree:
            values = jax.value_and_grad(lambda p: (jnp.mean(losses(p, batch)), None), has_aux=True)
            key = jax.random.key(0)
            at = method.Step(losses, values, params, batch, key, batch, batch)
            params, state, first = variant.update(tx, state, at)
            return params, state, None if first is None else first[0]

        return Step(tx.init, step)

    return of_losses


def _hyperparameters(name: str) -> Record:
    """Those of the hand-written step, or else the registry's, as no cost depends on ρ."""
    if name not in HANDWRITTEN:
        return {}
    _, *parameters = inspect.signature(HANDWRITTEN[name]).parameters.values()
    found = {parameter.name: parameter.default for parameter in parameters}
    if name == "gsam":  # the hand-written one has a constant radius
        found["rho_max"] = found["rho_min"] = found.pop("rho")
    return found


def optax_contrib_step(loss: Loss) -> Step:
    """A SAM step with ``optax.contrib.sam``, as its documentation writes it."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(RHO))
    tx = optax.contrib.sam(base_tx(), adversary, sync_period=2, opaque_mode=True)

    def step(params: optax.Params, state: optax.OptState, batch: PyTree) -> PyTree:
        value, grads = jax.value_and_grad(loss)(params, batch)
        grad_fn = jax.grad(lambda p, _: loss(p, batch))
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)
