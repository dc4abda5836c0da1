"""The steps to measure, and what they train.

Those by hand, each for one method from its paper, are what an expert would write for a training
script that needs only this method: plain JAX and the base optimizer. The library's are compared
with them.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sam_optax.experiments import named
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import method, registry
from sam_optax.experiments.networks import builtin, own
from sam_optax.experiments.types import Function, PyTree, Record

OPTIONS = ("info", "skip_nonfinite", "sync_perturbation")
"""Options of the library's step, as SAM's."""
OPTIMIZERS = {"sgd": optax.sgd(1e-3, momentum=0.9), "adam": optax.adam(1e-3)}
BASE = "base optimizer"
Loss = Callable[[optax.Params, PyTree], jax.Array]


class Problem(NamedTuple):
    """A network with the loss of each example; ``batch`` has shapes only, so it may be large."""

    init: Callable[[], optax.Params]
    losses: Loss
    batch: PyTree


def make(name: str, size: int, shape: tuple[int, ...] = ()) -> Problem:
    """A network on ``size`` examples of a shape; mlp:DEPTHxWIDTH is of vectors of its width."""
    if found := re.fullmatch(r"mlp:([1-9]\d*)x([1-9]\d*)", name):
        depth, width = map(int, found.groups())
        return classification(builtin.MLP(width, width, depth - 1), size, (width,))
    if not named.is_spec(name):
        return classification(builtin.build(name, shape, 10), size, shape)
    module, _ = own.adapted(named.find(name), name, 10)
    try:
        own.check(module, name, jnp.zeros((1, *shape)), None)
    except UserError as error:
        raise UserError(f"{error} --shape gives the shape of an example.") from error
    return classification(module, size, shape)


def classification(module: Any, size: int, shape: tuple[int, ...]) -> Problem:
    """A network with cross entropy. BatchNorm keeps no averages, and dropout draws one mask."""
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


class Step(NamedTuple):
    """``step(params, state, batch)`` returns params, state and the first pass's loss, if any."""

    init: Callable[[optax.Params], PyTree]
    step: Callable[[optax.Params, PyTree, PyTree], tuple[optax.Params, PyTree, jax.Array | None]]


class At(NamedTuple):
    """What a method's step starts from; ``state`` is the method's own."""

    params: optax.Params
    state: PyTree
    base_state: optax.OptState
    batch: PyTree
    value_and_grad: Function  # (params, batch = this one) -> loss, gradient
    mean: Function  # over the devices


def sgd(at: At) -> PyTree:
    """The base optimizer alone."""
    return *at.value_and_grad(at.params), ()


def sam(at: At, rho: float) -> PyTree:
    """SAM: ε = ρ g/‖g‖."""
    value, grads = at.value_and_grad(at.params)
    return value, at.value_and_grad(along(at.params, grads, rho))[1], ()


def asam(at: At, rho: float, eta: float) -> PyTree:
    """ASAM: ε = ρ T² g/‖T g‖, T = |w| + η for weights and 1 for biases."""

    def scaling(path: jax.tree_util.KeyPath, w: jax.Array) -> jax.Array:
        return jnp.ones_like(w) if path[-1].key == "bias" else jnp.abs(w) + eta

    value, grads = at.value_and_grad(at.params)
    scales = jax.tree_util.tree_map_with_path(scaling, at.params)
    products = jax.tree.map(jnp.multiply, scales, grads)
    scale = rho / guarded_norm(products)
    perturbed = jax.tree.map(lambda w, t, tg: w + scale * t * tg, at.params, scales, products)
    return value, at.value_and_grad(perturbed)[1], ()


def fsam(at: At, rho: float, sigma: float, lmbda: float) -> PyTree:
    """F-SAM: d = g − σ m, ε = ρ d/‖d‖, m ← λ m + (1 − λ) g, with m = g after the first step."""
    ema, count = at.state
    value, grads = at.value_and_grad(at.params)
    residual = jax.tree.map(lambda g, m: g - sigma * m, grads, ema)
    weight = jnp.where(count == 0, 0.0, lmbda)
    ema = jax.tree.map(lambda g, m: weight * m + (1 - weight) * g, at.mean(grads), ema)
    return value, at.value_and_grad(along(at.params, residual, rho))[1], (ema, count + 1)


def rsam(at: At, rho: float, gamma: float, lmbda: float) -> PyTree:
    """R-SAM: d = δ/‖δ‖ + λ g/‖g‖, ε = ρ d/‖d‖, with g at w + δ and δ ~ N(0, γ² ‖w_j‖²/n_j)."""

    def draw(w: jax.Array, key: jax.Array) -> jax.Array:
        axes = tuple(range(w.ndim - 1)) if w.ndim > 1 else None
        rms = jnp.sqrt(jnp.mean(jnp.square(w), axis=axes, keepdims=True))
        return gamma * rms * jax.random.normal(key, w.shape, w.dtype)

    next_key, key = jax.random.split(at.state)
    keys = optax.tree_utils.tree_split_key_like(key, at.params)
    delta = jax.tree.map(draw, at.params, keys)
    _, grads = at.value_and_grad(jax.tree.map(jnp.add, at.params, delta))
    by_delta, by_grads = 1 / guarded_norm(delta), lmbda / guarded_norm(grads)
    direction = jax.tree.map(lambda d, g: by_delta * d + by_grads * g, delta, grads)
    return None, at.value_and_grad(along(at.params, direction, rho))[1], next_key


BY_HAND: dict[str, tuple[Function, Function]] = {
    "sgd": (sgd, lambda params: ()),
    "sam": (sam, lambda params: ()),
    "asam": (asam, lambda params: ()),
    "fsam": (fsam, lambda params: (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), int))),
    "rsam": (rsam, lambda params: jax.random.key_data(jax.random.key(0))),
}
"""By name in the registry: loss, gradient and next state of a step; and the first state."""


def by_hand(method: Any, losses: Loss, base: Any, axis: str | None, **options: Any) -> Step:
    """The step of one of ``BY_HAND`` with its options; with ``axis``, the program of one device."""
    of, init = method
    mean = partial(jax.lax.pmean, axis_name=axis) if axis else lambda tree: tree

    def step(params: optax.Params, state: PyTree, batch: PyTree) -> Any:
        def value_and_grad(at: optax.Params, some: PyTree = batch) -> PyTree:
            return jax.value_and_grad(lambda w: jnp.mean(losses(w, some)))(at)

        own, base_state = state
        at = At(params, own, base_state, batch, value_and_grad, mean)
        value, grads, own = of(at, **options)
        updates, base_state = base.update(mean(grads), base_state, params)
        return optax.apply_updates(params, updates), (own, base_state), value

    return Step(lambda params: (init(params), base.init(params)), step)


def guarded_norm(tree: PyTree) -> jax.Array:
    """‖·‖₂ of a tree, or 1 if it is 0."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
    return jnp.where(norm > 0, norm, 1.0)


def along(params: optax.Params, direction: optax.Updates, rho: float) -> optax.Params:
    """W + ρ d/‖d‖."""
    scale = rho / guarded_norm(direction)
    return jax.tree.map(lambda w, d: w + scale * d, params, direction)


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
    """A method, or SAM for an option, with its default hyperparameters except those given."""
    found = registry.get("sam" if name in OPTIONS else name)
    if found.needs_data:
        raise UserError(f"--methods {name}: its cost is that of the training set; leave it out.")
    return found.variant(**changes)


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

    return Step(partial(of.init, tx), step)
