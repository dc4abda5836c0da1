# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The methods that the comparison knows: a new one joins by a line here.

The values were chosen on digits with 40 % of the training labels wrong, by the accuracy on a part
of the training set that was held out for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.methods import Base, Method, Option, Step


def _rho(default: float) -> Option:
    return Option(default, "Radius ρ of the perturbation.")


_ETA = Option(0.01, "η, added to |w| in the normalization operator.")
_FISHER_ETA = Option(1.0, "Weight η of the Fisher information.")
_GAMMA = Option(0.01, "Scale γ of the random start's noise.")
_LMBDA = Option(10.0, "Weight λ of the gradient against the noise.")
_SIGMA = Option(1.0, "Share σ of the full gradient that is removed.")
_EMA = Option(0.9, "Decay λ of the average that estimates the full gradient.")
_ALPHA = Option(0.1, "Weight α of the surrogate gap's gradient.")
_SPARSITY = Option(0.5, "Share of the params that is not perturbed.")
_EVERY = Option(100, "Perturbations between two choices of the mask.")
_DECAY = Option(0.9, "Decay β of the average of past gradients.")


def _simple(make: Any) -> Any:
    """The builder of a perturbation that knows of neither base optimizer nor key."""
    return lambda base, key, **options: base.sharp(make(**options))


def _keyed(make: Any) -> Any:
    """The builder of a perturbation that takes a key."""
    return lambda base, key, **options: base.sharp(make(**options, key=key))


def _friendly(make: Any) -> Any:
    """The builder of a perturbation of the gradient without its full-gradient component."""

    def build(base: Base, key: Any, sigma: float, lmbda: float, **options: Any) -> Any:
        del key
        pieces = sam_optax.remove_full_gradient(sigma, lmbda), make(**options)
        return base.sharp(optax.chain(*pieces))

    return build


def _sgd(base: Base, key: Any) -> optax.GradientTransformation:
    del key
    tx = optax.with_extra_args_support(base.tx)

    def update_fn(updates: Any, state: Any, params: Any = None, *, grad_fn: Any, **_: Any) -> Any:
        del updates
        return tx.update(grad_fn(params), state, params)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def _gsam(base: Base, key: Any, alpha: float, lr_max: float, **rho: float) -> Any:
    del key
    radius = sam_optax.rho_from_learning_rate(base.learning_rate, lr_min=0, lr_max=lr_max, **rho)
    return base.sharp(sam_optax.sam(radius), sam_optax.surrogate_gap(alpha))


def _rgsam(base: Base, key: Any, alpha: float, **options: Any) -> Any:
    return base.sharp(sam_optax.rsam(**options, key=key), sam_optax.surrogate_gap(alpha))


def _looksam(base: Base, key: Any, rho: float, k: int, alpha: float) -> Any:
    del key
    reuse = sam_optax.reuse_orthogonal(alpha)
    return base.sharp(sam_optax.sam(rho), reuse, when=sam_optax.every(k))


def _every(base: Base, key: Any, rho: float, k: int) -> Any:
    del key
    return base.sharp(sam_optax.sam(rho), when=sam_optax.every(k))


def _ss_sam(base: Base, key: Any, rho: float, p: float) -> Any:
    when = sam_optax.bernoulli(p, key=key)
    return base.sharp(sam_optax.sam(rho), when=when)


def _vasso(base: Base, key: Any, rho: float, theta: float) -> Any:
    del key
    pieces = sam_optax.smooth_gradient(theta), sam_optax.sam(rho)
    return base.sharp(optax.chain(*pieces))


def _ssam(base: Base, key: Any, rho: float, **options: Any) -> Any:
    choice: Any = "dynamic" if "drop" in options else "fisher"
    mask = sam_optax.sparsify(**options, choice=choice, key=key)
    return base.sharp(optax.chain(sam_optax.sam(rho), mask))


def _esam(base: Base, key: Any, rho: float, beta: float, fraction: float) -> Any:
    del fraction
    pieces = sam_optax.sam(rho), sam_optax.random_mask(beta, key=key)
    return base.sharp(optax.chain(*pieces))


def _rising(step: Step, fraction: float, **_: Any) -> dict[str, Any]:
    rising = sam_optax.rising_samples(step.losses_fn, step.params, step.batch, fraction)
    return {"grad_fn": rising, "ascent_grad_fn": step.grad_fn(step.batch)}


def _reweighted(step: Step, **_: Any) -> dict[str, Any]:
    ascent = sam_optax.reweighted_ascent(step.losses_fn, step.batch, key=step.key)
    return {"ascent_grad_fn": ascent}


def _sam(base: Base, key: Any, rho: float, **_: Any) -> Any:
    del key
    return base.sharp(sam_optax.sam(rho))


def _part(step: Step, fraction: float, **_: Any) -> dict[str, Any]:
    return {"ascent_grad_fn": step.grad_fn(sam_optax.part_of_batch(step.batch, fraction))}


def _whole(step: Step, **_: Any) -> dict[str, Any]:
    return {"ascent_grad_fn": step.grad_fn(step.data)}


def _another_batch(step: Step, **_: Any) -> dict[str, Any]:
    examples, size = len(step.data[1]), len(step.batch[1])
    index = jax.random.choice(step.key, examples, (size,), replace=False)
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], step.data)
    return {"ascent_grad_fn": step.grad_fn(batch)}


def _noise_of_batch(base: Base, key: Any, rho: float) -> Any:
    del key
    pieces = sam_optax.project_out(), sam_optax.sam(rho)
    return base.sharp(optax.chain(*pieces))


def _full_gradient(step: Step, **_: Any) -> dict[str, Any]:
    return {"full_grads": step.grad_fn(step.data)(step.params)}


def _momentum(base: Base, key: Any, rho: float, decay: float) -> Any:
    del key
    return base.sharp(sam_optax.momentum_start(sam_optax.sam(rho), decay))


def _msam(base: Base, key: Any, rho: float, decay: float) -> Any:
    del key
    ahead = optax.chain(sam_optax.sam(rho), optax.scale(-1.0))
    return base.sharp(sam_optax.momentum_start(ahead, decay))


def _wsam(base: Base, key: Any, rho: float, gamma: float) -> Any:
    del key
    return base.sharp(sam_optax.sam(rho), sam_optax.mix_gradients(_odds(gamma)))


def _wsam_decoupled(base: Base, key: Any, rho: float, gamma: float) -> Any:
    del key
    tx = sam_optax.decoupled_sharpness(base.tx, base.learning_rate, _odds(gamma))
    return base._replace(tx=tx).sharp(sam_optax.sam(rho))


def _odds(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be in [0, 1), got {gamma!r}.")
    return gamma / (1 - gamma)


METHODS: dict[str, Method] = {
    "sgd": Method("the base optimizer", _sgd, {}, 1),
    "sam": Method("SAM", _simple(sam_optax.sam), {"rho": _rho(0.5)}),
    "asam": Method("ASAM", _simple(sam_optax.asam), {"rho": _rho(2.0), "eta": _ETA}),
    "rsam": Method(
        "R-SAM", _keyed(sam_optax.rsam), {"rho": _rho(0.5), "gamma": _GAMMA, "lmbda": _LMBDA}
    ),
    "fsam": Method(
        "F-SAM", _simple(sam_optax.fsam), {"rho": _rho(0.5), "sigma": _SIGMA, "lmbda": _EMA}
    ),
    "f_asam": Method(
        "F-ASAM",
        _friendly(sam_optax.asam),
        {"rho": _rho(2.0), "eta": _ETA, "sigma": _SIGMA, "lmbda": _EMA},
    ),
    "fisher_sam": Method(
        "Fisher SAM", _simple(sam_optax.fisher_sam), {"rho": _rho(0.5), "eta": _FISHER_ETA}
    ),
    "f_fisher_sam": Method(
        "F-FisherSAM",
        _friendly(sam_optax.fisher_sam),
        {"rho": _rho(0.5), "eta": _FISHER_ETA, "sigma": _SIGMA, "lmbda": _EMA},
    ),
    "gsam": Method(
        "GSAM",
        _gsam,
        {
            "rho_max": Option(0.8, "Radius ρ at the highest learning rate."),
            "rho_min": Option(0.2, "Radius ρ at learning rate 0."),
            "alpha": _ALPHA,
            "lr_max": Option(0.1, "Learning rate at which the radius is ρ."),
        },
    ),
    "rgsam": Method(
        "R-GSAM",
        _rgsam,
        {"rho": _rho(0.5), "gamma": _GAMMA, "lmbda": _LMBDA, "alpha": _ALPHA},
    ),
    "wsam": Method(
        "WSAM, coupled: a weighted sum of both gradients",
        _wsam,
        {"rho": _rho(0.5), "gamma": Option(0.5, "Sharpness has the weight γ/(1 − γ).")},
    ),
    "wsam_decoupled": Method(
        "WSAM, decoupled",
        _wsam_decoupled,
        {"rho": _rho(0.5), "gamma": Option(0.9, "Sharpness has the weight γ/(1 − γ).")},
    ),
    "vasso": Method(
        "VaSSO",
        _vasso,
        {"rho": _rho(0.5), "theta": Option(0.4, "Weight θ of the new gradient in the average.")},
    ),
    "ssam_f": Method(
        "SSAM with a Fisher mask",
        _ssam,
        {"rho": _rho(0.5), "sparsity": _SPARSITY, "every": _EVERY},
    ),
    "ssam_d": Method(
        "SSAM with a dynamic mask",
        _ssam,
        {
            "rho": _rho(0.5),
            "sparsity": _SPARSITY,
            "every": _EVERY,
            "drop": Option(0.5, "Share of the mask that a choice exchanges."),
        },
    ),
    "delta_sam": Method("δ-SAM", _sam, {"rho": _rho(0.5)}, 3, _reweighted),
    "sam_full": Method("SAM along the full gradient", _sam, {"rho": _rho(0.5)}, 15, _whole),
    "sam_db": Method("SAM along another batch", _sam, {"rho": _rho(0.5)}, 2, _another_batch),
    "sam_noise": Method(
        "SAM off the full gradient", _noise_of_batch, {"rho": _rho(0.5)}, 16, _full_gradient
    ),
    "esam": Method(
        "ESAM",
        _esam,
        {
            "rho": _rho(0.5),
            "beta": Option(0.6, "Share β of the params that is perturbed."),
            "fraction": Option(0.5, "Share γ of the examples in the second pass."),
        },
        2,
        _rising,
    ),
    "ss_sam": Method(
        "SS-SAM",
        _ss_sam,
        {"rho": _rho(0.5), "p": Option(0.5, "Probability that a step perturbs.")},
        1.5,
    ),
    "every": Method(
        "SAM at every k-th step", _every, {"rho": _rho(1.0), "k": Option(5, "Period.")}, 1.2
    ),
    "looksam": Method(
        "LookSAM",
        _looksam,
        {
            "rho": _rho(0.3),
            "k": Option(5, "Period of the SAM steps."),
            "alpha": Option(0.7, "Size α of the reused part."),
        },
        1.2,
    ),
    "part": Method(
        "SAM, ascent on part of the batch",
        _sam,
        {
            "rho": _rho(0.95),
            "fraction": Option(0.02, "Share of the batch that leads the ascent."),
        },
        1.02,
        _part,
    ),
    "momentum": Method(
        "ascent along past gradients", _momentum, {"rho": _rho(0.3), "decay": _DECAY}, 1
    ),
    "msam": Method("Momentum-SAM", _msam, {"rho": _rho(2.0), "decay": _DECAY}, 1),
    "low_pass": Method(
        "LPF-SGD: smoothing by noise",
        _keyed(sam_optax.low_pass),
        {
            "gamma": Option(0.02, "Scale γ of the noise."),
            "samples": Option(1, "Draws of the noise in a step."),
        },
        1,
    ),
}
DEFAULT = ("sgd", "sam", "asam", "rsam", "fsam")
