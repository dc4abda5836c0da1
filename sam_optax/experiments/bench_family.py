"""The wider family in the benchmark: each method's step, and one written by hand for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.bench_handwritten import Loss, Step, descend, guarded_norm, zeros
from sam_optax.experiments.bench_methods import base_tx

RHO = 0.05
FRACTION = 0.125


class Entry(NamedTuple):
    """A method to measure.

    Attributes:
      library: its step with the library.
      handwritten: its step by hand; ``None`` where the comparison is with SAM's.
    """

    library: Callable[[Loss], Step]
    handwritten: Callable[[Loss], Step] | None


def _step(
    make: Callable[[], optax.GradientTransformationExtraArgs],
    ascent: Callable[[Loss, Any], dict[str, Any]] = lambda loss, batch: {},
) -> Callable[[Loss], Step]:
    """The library's step, whose passes all are the optimizer's."""

    def of_loss(loss: Loss) -> Step:
        tx = make()

        def step(params: optax.Params, state: Any, batch: Any) -> Any:
            updates, state = tx.update(
                None,
                state,
                params,
                value_and_grad_fn=jax.value_and_grad(
                    lambda p: (loss(p, batch), None), has_aux=True
                ),
                **ascent(loss, batch),
            )
            state, (value, _) = sam_optax.pop_first_pass(state)
            return optax.apply_updates(params, updates), state, value

        return Step(tx.init, step)

    return of_loss


def _sharp(perturbation: Any, before: Any = None, **options: Any) -> Any:
    def make() -> optax.GradientTransformationExtraArgs:
        base = base_tx() if before is None else optax.chain(before(), base_tx())
        return sam_optax.sharpness_aware(base, perturbation(), **options)

    return make


def _part(loss: Loss, batch: Any) -> dict[str, Any]:
    part = sam_optax.part_of_batch(batch, FRACTION)
    return {"ascent_grad_fn": jax.grad(lambda p: loss(p, part))}


def gsam(loss: Loss, alpha: float = 0.4) -> Step:
    """GSAM: g_s − α g_⊥ with g_⊥ = g − ⟨g, g_s⟩/‖g_s‖² g_s."""

    def step(params: optax.Params, momentum: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        scale = RHO / guarded_norm(grads)
        perturbed = jax.tree.map(lambda w, g: w + scale * g, params, grads)
        sharp = jax.grad(loss)(perturbed, batch)
        norm = guarded_norm(sharp)
        products = jax.tree.map(lambda g, s: jnp.sum(g * s), grads, sharp)
        share = jax.tree.reduce(jnp.add, products) / norm**2
        gap = jax.tree.map(lambda g, s: s - alpha * (g - share * s), grads, sharp)
        params, momentum = descend(params, momentum, gap)
        return params, momentum, value

    return Step(zeros, step)


def fisher_sam(loss: Loss, eta: float = 1.0) -> Step:
    """Fisher SAM: ε = ρ T² g/‖T g‖ with T² = 1/(1 + η g²)."""

    def step(params: optax.Params, momentum: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        scaled = jax.tree.map(lambda g: g * jax.lax.rsqrt(1 + eta * g**2), grads)
        scale = RHO / guarded_norm(scaled)
        perturbed = jax.tree.map(
            lambda w, g, s: w + scale * s * jax.lax.rsqrt(1 + eta * g**2), params, grads, scaled
        )
        params, momentum = descend(params, momentum, jax.grad(loss)(perturbed, batch))
        return params, momentum, value

    return Step(zeros, step)


def part(loss: Loss) -> Step:
    """SAM whose ascent gradient is that of evenly spaced examples."""

    def step(params: optax.Params, momentum: Any, batch: Any) -> Any:
        few = jax.tree.map(lambda leaf: leaf[:: round(1 / FRACTION)], batch)
        grads = jax.grad(loss)(params, few)
        scale = RHO / guarded_norm(grads)
        perturbed = jax.tree.map(lambda w, g: w + scale * g, params, grads)
        value, sharp = jax.value_and_grad(loss)(perturbed, batch)
        params, momentum = descend(params, momentum, sharp)
        return params, momentum, value

    return Step(zeros, step)


def momentum_ascent(loss: Loss, decay: float = 0.9) -> Step:
    """The gradient at w + ρ m/‖m‖, m ← β m + (1 − β) g."""

    def init(params: optax.Params) -> Any:
        return zeros(params), zeros(params)

    def step(params: optax.Params, state: Any, batch: Any) -> Any:
        ema, momentum = state
        scale = RHO / guarded_norm(ema)
        perturbed = jax.tree.map(lambda w, m: w + scale * m, params, ema)
        value, grads = jax.value_and_grad(loss)(perturbed, batch)
        ema = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, ema, grads)
        params, momentum = descend(params, momentum, grads)
        return params, (ema, momentum), value

    return Step(init, step)


def _key() -> jax.Array:
    return jax.random.key(0)


FAMILY = {
    "gsam": Entry(
        _step(_sharp(lambda: sam_optax.sam(RHO), lambda: sam_optax.surrogate_gap(0.4))), gsam
    ),
    "fisher_sam": Entry(_step(_sharp(lambda: sam_optax.fisher_sam(RHO, 1.0))), fisher_sam),
    "vasso": Entry(
        _step(_sharp(lambda: optax.chain(sam_optax.smooth_gradient(0.4), sam_optax.sam(RHO)))),
        None,
    ),
    "wsam": Entry(
        _step(_sharp(lambda: sam_optax.sam(RHO), lambda: sam_optax.mix_gradients(2.0))), None
    ),
    "ssam": Entry(
        _step(_sharp(lambda: optax.chain(sam_optax.sam(RHO), sam_optax.sparsify(0.5, key=_key())))),
        None,
    ),
    "random_mask": Entry(
        _step(
            _sharp(lambda: optax.chain(sam_optax.sam(RHO), sam_optax.random_mask(0.6, key=_key())))
        ),
        None,
    ),
    "looksam": Entry(
        _step(
            _sharp(
                lambda: sam_optax.sam(RHO),
                lambda: sam_optax.reuse_orthogonal(0.7),
                when=sam_optax.every(5),
            )
        ),
        None,
    ),
    "every": Entry(_step(_sharp(lambda: sam_optax.sam(RHO), when=sam_optax.every(5))), None),
    "part": Entry(_step(_sharp(lambda: sam_optax.sam(RHO)), _part), part),
    "momentum": Entry(
        _step(_sharp(lambda: sam_optax.momentum_start(sam_optax.sam(RHO), 0.9))), momentum_ascent
    ),
    "info": Entry(_step(_sharp(lambda: sam_optax.sam(RHO), info=True)), None),
    "skip_nonfinite": Entry(_step(_sharp(lambda: sam_optax.sam(RHO), skip_nonfinite=True)), None),
    "low_pass": Entry(_step(_sharp(lambda: sam_optax.low_pass(0.01, key=_key()))), None),
}
"""Methods, and SAM with an option, by name.

Those that choose among examples are not here: the loss is a mean already.
"""
