"""Random starts: the ascent gradient is taken at a random point near the params."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import optax

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees
from sam_optax._internal.devices import AxisName
from sam_optax._internal.kernel_noise import (
    NoiseScale,
    check_noise_scale,
    deviations,
    expected_length,
    kernel_noise,
)
from sam_optax._internal.leaf_roles import AxisOverride
from sam_optax._internal.weighting import Weighting, check_weighting, of_terms, times
from sam_optax._perturbations.perturbation import Perturbation, RandomStartState, as_perturbation


def random_start(
    perturbation: optax.GradientTransformation,
    gamma: hp.Hyperparameter = 0.1,
    lmbda: hp.Hyperparameter = 1.0,
    *,
    key: noise.Key,
    noise_scale: NoiseScale = "relative",
    weighting: Weighting = "normalized",
    kernel_axis: AxisOverride = hp.static_default(-1),
    draw: noise.Draw | None = None,
) -> Perturbation:
    r"""Doc."""
    return random_start_cast(
        perturbation,
        gamma,
        lmbda,
        key,
        noise_scale,
        weighting,
        kernel_axis,
        draw,
        trees.cast_like,
    )


def random_start_cast(
    perturbation: optax.GradientTransformation,
    gamma: hp.Hyperparameter,
    lmbda: hp.Hyperparameter,
    key: noise.Key,
    noise_scale: NoiseScale,
    weighting: Weighting,
    kernel_axis: AxisOverride,
    draw: noise.Draw | None,
    cast: Callable[[jax.Array, Any], jax.Array],
) -> Perturbation:
    """:func:`random_start`, where ``cast`` gives what becomes ε the dtype of the gradient."""
    hp.check("gamma", gamma, lower=0)
    hp.check("lmbda", lmbda, lower=0)
    check_noise_scale(noise_scale)
    check_weighting(weighting)
    noise.check_key(key)
    noise.check_draw(draw)
    inner = as_perturbation(perturbation)
    if inner.has_start:
        raise ValueError("perturbation has a random start already: use one random_start only.")

    def init_fn(params: optax.Params) -> RandomStartState:
        return RandomStartState(
            key=noise.first_key(key),
            inner_state=inner.init(params),
            schedule=hp.init_schedules(gamma, lmbda),
        )

    def start_fn(
        params: optax.Params,
        state: RandomStartState,
        *,
        training_step: chex.Numeric | None = None,
        draw_index: chex.Numeric | None = None,
        **extra: Any,
    ) -> optax.Params:
        del extra
        gamma_t = hp.evaluate(gamma, hp.step_of(state.schedule, training_step))
        words = noise.fold_in(state.key, draw_index)
        scales = deviations(params, noise_scale, kernel_axis)
        return trees.add(params, kernel_noise(params, scales, words, gamma_t, draw))

    def update_fn(
        updates: optax.Updates,
        state: RandomStartState,
        params: optax.Params | None = None,
        *,
        training_step: chex.Numeric | None = None,
        draw_index: chex.Numeric | None = None,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, RandomStartState]:
        if params is None:
            raise ValueError(
                "random_start needs the params: call update(grads, state, params), with the "
                "gradient at start_fn(params, state)."
            )
        step = hp.step_of(state.schedule, training_step)
        gamma_t = hp.evaluate(gamma, step)
        words = noise.fold_in(state.key, draw_index)
        scales = deviations(params, noise_scale, kernel_axis)
        factors = of_terms(
            weighting,
            updates,
            hp.evaluate(lmbda, step),
            lambda: expected_length(updates, scales, gamma_t, norm_axis_name),
            norm_axis_name,
        )
        delta = kernel_noise(params, scales, words, gamma_t, draw)

        def direction(g: Any, d: jax.Array) -> jax.Array:
            wide = trees.widen(g)
            d = times(d.astype(wide.dtype), *factors.noise)
            return cast(d + times(wide, *factors.gradient), g)

        eps, inner_state = inner.update(
            trees.map_inexact(direction, updates, delta),
            state.inner_state,
            params,
            training_step=training_step,
            draw_index=draw_index,
            norm_axis_name=norm_axis_name,
            **extra,
        )
        eps = trees.map_inexact(trees.cast_like, eps, updates)
        return eps, RandomStartState(
            noise.next_key(state.key), inner_state, hp.advance(state.schedule, step)
        )

    return Perturbation(init_fn, update_fn, start_fn)
