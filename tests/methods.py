"""Every public method by name, for all tests: a new method joins by one line here."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
import pytest

import sam_optax

KEY = jax.random.key(0)
RHO = 0.3


def _mask(params: optax.Params) -> object:
    """Chooses every leaf but the first."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, [i > 0 for i in range(len(leaves))])


# Name -> factory: takes the radius, and for some the options that a test may choose.
METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sam": sam_optax.sam,
    "sam_1": functools.partial(sam_optax.sam, p=1),
    "sam_1.5": functools.partial(sam_optax.sam, p=1.5),
    "sam_3": functools.partial(sam_optax.sam, p=3),
    "sam_inf": functools.partial(sam_optax.sam, p=np.inf),
    "sam_scheduled": lambda rho, start=1 / 3: sam_optax.sam(
        optax.linear_schedule(start * rho, 5 / 3 * rho, 5)
    ),
    "asam": sam_optax.asam,
    "asam_3": functools.partial(sam_optax.asam, p=3),
    "asam_filterwise": functools.partial(sam_optax.asam, normalization="filterwise"),
    "asam_scheduled": functools.partial(sam_optax.asam, eta=optax.linear_schedule(0.0, 0.1, 5)),
    "fsam": sam_optax.fsam,
    "fsam_zero_new": functools.partial(sam_optax.fsam, sigma=0.5, ema_start="zero", subtract="new"),
    "fsam_corrected": functools.partial(sam_optax.fsam, ema_start="bias_corrected"),
    "fsam_scheduled": functools.partial(sam_optax.fsam, lmbda=optax.linear_schedule(0.5, 0.9, 5)),
    "remove_full_gradient": lambda rho: sam_optax.remove_full_gradient(),
    "fsam_asam": lambda rho: optax.chain(sam_optax.remove_full_gradient(), sam_optax.asam(rho)),
    "rsam": functools.partial(sam_optax.rsam, key=KEY),
    "rsam_raw": lambda rho, **options: sam_optax.rsam(
        rho, 0.2, 0.5, key=0, weighting="raw", **options
    ),
    "rsam_normalized_gradient": functools.partial(
        sam_optax.rsam, gamma=0.2, lmbda=0.5, key=KEY, weighting="normalized_gradient"
    ),
    "rsam_sqrt_norm": functools.partial(sam_optax.rsam, key=KEY, noise_scale="sqrt_norm"),
    "rsam_norm": functools.partial(sam_optax.rsam, key=KEY, noise_scale="norm"),
    "rsam_isotropic": functools.partial(sam_optax.rsam, key=KEY, noise_scale="isotropic"),
    "rsam_draw": functools.partial(sam_optax.rsam, key=KEY, draw=jax.random.normal),
    "rsam_scheduled": lambda rho, gamma=0.2, **options: sam_optax.rsam(
        rho, optax.linear_schedule(0.0, gamma, 5), key=KEY, **options
    ),
    "random_asam": lambda rho, **options: sam_optax.random_start(
        sam_optax.asam(rho), key=KEY, **options
    ),
    "random_fsam": lambda rho: sam_optax.random_start(sam_optax.fsam(rho), key=KEY),
    "fisher": sam_optax.fisher_sam,
    "fisher_scheduled": functools.partial(
        sam_optax.fisher_sam, eta=optax.linear_schedule(0.0, 1.0, 5)
    ),
    "f_fisher": lambda rho: optax.chain(
        sam_optax.remove_full_gradient(), sam_optax.fisher_sam(rho)
    ),
    "smooth_gradient": lambda rho: sam_optax.smooth_gradient(0.6),
    "vasso": lambda rho: optax.chain(sam_optax.smooth_gradient(0.6), sam_optax.sam(rho)),
    "random_mask": lambda rho: sam_optax.random_mask(0.5, key=KEY),
    "esam": lambda rho: optax.chain(sam_optax.sam(rho), sam_optax.random_mask(0.5, key=KEY)),
    "ssam": lambda rho: optax.chain(sam_optax.sam(rho), sam_optax.sparsify(0.5, key=KEY, every=2)),
    "ssam_dynamic": lambda rho: optax.chain(
        sam_optax.sam(rho), sam_optax.sparsify(0.5, key=KEY, choice="dynamic", every=2)
    ),
    "momentum": lambda rho: sam_optax.momentum_start(sam_optax.sam(rho), 0.9),
    "momentum_fsam": lambda rho: sam_optax.momentum_start(sam_optax.fsam(rho), 0.0),
    "low_pass": lambda rho: sam_optax.low_pass(0.1, key=KEY),
    "low_pass_samples": lambda rho: sam_optax.low_pass(0.1, 3, key=KEY),
    "only_momentum": lambda rho: sam_optax.perturb_only(
        sam_optax.momentum_start(sam_optax.asam(rho), 0.9), _mask
    ),
    "only_sam": lambda rho: sam_optax.perturb_only(sam_optax.sam(rho), _mask),
    "only_rsam": lambda rho: sam_optax.perturb_only(sam_optax.rsam(rho, key=KEY), _mask),
    "random_only_fsam": lambda rho: sam_optax.random_start(
        sam_optax.perturb_only(sam_optax.fsam(rho), _mask), key=KEY
    ),
    "limited": lambda rho: sam_optax.limit_rise(sam_optax.sam(rho), 0.1),
    "limited_rsam": lambda rho: sam_optax.limit_rise(
        sam_optax.rsam(rho, key=KEY), optax.linear_schedule(0.1, 0.01, 5)
    ),
    "momentum_limited": lambda rho: sam_optax.momentum_start(
        sam_optax.limit_rise(sam_optax.asam(rho), 0.1), 0.9
    ),
    "zscore_filter": lambda rho: sam_optax.zscore_filter(0.5),
    "zsharp": lambda rho: optax.chain(sam_optax.zscore_filter(0.5), sam_optax.sam(rho)),
    "bsam": lambda rho, **options: sam_optax.bsam(
        rho, data_size=100.0, weight_decay=0.1, key=KEY, **options
    ),
    "stochastic_rounding": lambda rho: sam_optax.stochastic_rounding(sam_optax.sam(rho), key=KEY),
    "scale": optax.scale,
    "by_hand": lambda rho: optax.chain(optax.contrib.normalize(), optax.scale(rho)),
}
NAMES = [*METHODS]
# The papers' methods: their cases are for every day, those of the others for ``-m slow``.
FOUR = ["sam", "asam", "fsam", "rsam"]
# One of each kind, for what costs much to compile and depends little on the formula.
KINDS = ["sam", "sam_scheduled", "asam", "fsam", "rsam", "only_rsam", "ssam", "momentum"]
KINDS += ["low_pass_samples", "by_hand"]
# Made of optax's pieces alone, which decides what they can do.
OF_OPTAX = ["scale", "by_hand"]
# Methods whose ε of a float16 gradient is float32: a difference may leave the range of float16.
WIDEN = {"remove_full_gradient"}
# Methods whose ε is not 0 where the gradient is 0. (Of a random start, the noise is left.)
ASCEND_AT_ZERO: set[str] = set()
# What the combinators add to a step, one at a time.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "info": {"info": True},
    "skip_nonfinite": {"skip_nonfinite": True},
    "every": {"when": sam_optax.every(2)},
    "bernoulli": {"when": sam_optax.bernoulli(0.5, key=KEY)},
    "above_average": {"when": sam_optax.above_average(0.5)},
    "ascent_steps": {"ascent_steps": 2},
    "groups": {"groups": 2},
}


def often(names: Iterable[str] = NAMES, *few: str) -> list[Any]:
    """Cases by method: those of ``few`` (by default FOUR) for every day, the others slow."""
    daily = few or FOUR
    return [n if n in daily else pytest.param(n, marks=pytest.mark.slow) for n in names]


def build(name: str, rho: Any = RHO, **options: Any) -> optax.GradientTransformation:
    """A new instance of the method, as a user writes it."""
    return METHODS[name](rho, **options)


@functools.cache
def make(name: str, rho: Any = RHO, **options: Any) -> sam_optax.Perturbation:
    """The method, one instance for all tests, so that what it compiles is shared."""
    return sam_optax.as_perturbation(build(name, rho, **options))


def _along(params: optax.Params) -> optax.Params:
    """A unit vector, in place of an eigenvector."""
    squares = [(leaf * leaf).sum() for leaf in jax.tree.leaves(params)]
    return jax.tree.map(lambda leaf: leaf / sum(squares) ** 0.5, params)


# Catalogued methods that are more than a perturbation around any base optimizer. Each step's
# further arguments are functions of the params and of its gradient function.
WHOLE: dict[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]] = {
    "stable_sam": lambda base: sam_optax.sharpness_aware(
        base, sam_optax.sam(RHO), descent=sam_optax.match_ascent_norm()
    ),
    "x_sam": lambda base: _given(
        sam_optax.sharpness_aware(
            base, sam_optax.sam(RHO), descent=sam_optax.away_from_eigenvector(0.5)
        ),
        lambda params, grad_fn: {"eigenvector": _along(params)},
    ),
    "xsam": lambda base: _given(
        sam_optax.sharpness_aware(
            base, sam_optax.sam(RHO), descent=sam_optax.toward_maximum(RHO, every=2)
        ),
        lambda params, grad_fn: {
            "value_fn": lambda p: sum((x**4).sum() for x in jax.tree.leaves(p))
        },
    ),
    "bsam": lambda base: sam_optax.sharpness_aware(
        base, build("bsam", 0.01), descent=sam_optax.scale_by_precision()
    ),
    "momentum_sam": lambda base: sam_optax.sharpness_aware(
        base, sam_optax.momentum_start(optax.chain(sam_optax.sam(RHO), optax.scale(-1.0)))
    ),
    "sampa": lambda base: _given(
        sam_optax.simultaneous(base, sam_optax.sam(RHO)),
        lambda params, grad_fn: {"previous_grad_fn": grad_fn},
    ),
    "lookbehind": lambda base: sam_optax.lookbehind(base, sam_optax.sam(RHO), 2),
}


def _given(
    tx: optax.GradientTransformationExtraArgs, arguments: Callable[..., dict[str, Any]]
) -> optax.GradientTransformationExtraArgs:
    """Adds arguments to each step."""

    def update(updates: Any, state: Any, params: Any, *, grad_fn: Any) -> Any:
        given = arguments(params, grad_fn)
        return tx.update(updates, state, params, grad_fn=grad_fn, **given)

    return optax.GradientTransformationExtraArgs(tx.init, update)


@functools.cache
def subject(name: str, base: str | None) -> optax.GradientTransformationExtraArgs:
    """The method, alone or inside ``sharpness_aware`` with a base optimizer."""
    if base is None:
        return make(name)
    bases = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(0.1)}
    return sam_optax.sharpness_aware(bases[base], make(name))
