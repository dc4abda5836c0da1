# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The methods that the experiments know: a new one joins by a line here.

The values were chosen on digits with 40 % of the training labels wrong, by the accuracy on a part
of the training set that was held out for it; R-SAM's γ and λ are the library's defaults.
"""

import inspect

import sam_optax
from sam_optax.experiments.methods import builders as build
from sam_optax.experiments.methods.method import Method, Option


def _rho(default: float) -> Option:
    return Option(default, "Radius ρ of the perturbation.")


_ETA = Option(0.01, "η, added to |w| in the normalization operator.")
_FISHER_ETA = Option(1.0, "Weight η of the Fisher information.")
_RSAM = inspect.signature(sam_optax.rsam).parameters
_GAMMA = Option(_RSAM["gamma"].default, "Scale γ of the random start's noise.")
_LMBDA = Option(_RSAM["lmbda"].default, "Weight λ of the gradient against the noise.")
_SIGMA = Option(1.0, "Share σ of the full gradient that is removed.")
_EMA = Option(0.9, "Decay λ of the average that estimates the full gradient.")
_ALPHA = Option(0.1, "Weight α of the surrogate gap's gradient.")
_SPARSITY = Option(0.5, "Share of the params that is not perturbed.")
_EVERY = Option(100, "Perturbations between two choices of the mask.")
_DECAY = Option(0.9, "Decay β of the average of past gradients.")


METHODS: dict[str, Method] = {
    "sgd": Method("the base optimizer", build.sgd, {}, 1, groups=False),
    "sam": Method("SAM", build.simple(sam_optax.sam), {"rho": _rho(0.5)}),
    "asam": Method("ASAM", build.simple(sam_optax.asam), {"rho": _rho(2.0), "eta": _ETA}),
    "rsam": Method(
        "R-SAM", build.keyed(sam_optax.rsam), {"rho": _rho(0.5), "gamma": _GAMMA, "lmbda": _LMBDA}
    ),
    "fsam": Method(
        "F-SAM", build.simple(sam_optax.fsam), {"rho": _rho(0.5), "sigma": _SIGMA, "lmbda": _EMA}
    ),
    "f_asam": Method(
        "F-ASAM",
        build.friendly(sam_optax.asam),
        {"rho": _rho(2.0), "eta": _ETA, "sigma": _SIGMA, "lmbda": _EMA},
    ),
    "fisher_sam": Method(
        "Fisher SAM", build.simple(sam_optax.fisher_sam), {"rho": _rho(0.5), "eta": _FISHER_ETA}
    ),
    "f_fisher_sam": Method(
        "F-FisherSAM",
        build.friendly(sam_optax.fisher_sam),
        {"rho": _rho(0.5), "eta": _FISHER_ETA, "sigma": _SIGMA, "lmbda": _EMA},
    ),
    "gsam": Method(
        "GSAM",
        build.gsam,
        {
            "rho_max": Option(0.8, "Radius ρ at the highest learning rate."),
            "rho_min": Option(0.2, "Radius ρ at learning rate 0."),
            "alpha": _ALPHA,
            "lr_max": Option(0.1, "Learning rate at which the radius is ρ."),
        },
    ),
    "rgsam": Method(
        "R-GSAM",
        build.rgsam,
        {"rho": _rho(0.5), "gamma": _GAMMA, "lmbda": _LMBDA, "alpha": _ALPHA},
    ),
    "wsam": Method(
        "WSAM, coupled: a weighted sum of both gradients",
        build.wsam,
        {"rho": _rho(0.5), "gamma": Option(0.5, "Sharpness has the weight γ/(1 − γ).")},
    ),
    "wsam_decoupled": Method(
        "WSAM, decoupled",
        build.wsam_decoupled,
        {"rho": _rho(0.5), "gamma": Option(0.9, "Sharpness has the weight γ/(1 − γ).")},
    ),
    "vasso": Method(
        "VaSSO",
        build.vasso,
        {"rho": _rho(0.5), "theta": Option(0.4, "Weight θ of the new gradient in the average.")},
    ),
    "ssam_f": Method(
        "SSAM with a Fisher mask",
        build.ssam,
        {"rho": _rho(0.5), "sparsity": _SPARSITY, "every": _EVERY},
    ),
    "ssam_d": Method(
        "SSAM with a dynamic mask",
        build.ssam,
        {
            "rho": _rho(0.5),
            "sparsity": _SPARSITY,
            "every": _EVERY,
            "drop": Option(0.5, "Share of the mask that a choice exchanges."),
        },
    ),
    "delta_sam": Method("δ-SAM", build.sam, {"rho": _rho(0.5)}, 3, build.reweighted, groups=False),
    "sam_full": Method(
        "SAM along the full gradient", build.sam, {"rho": _rho(0.5)}, 15, build.whole, True, False
    ),
    "sam_db": Method(
        "SAM along another batch",
        build.sam,
        {"rho": _rho(0.5)},
        2,
        build.another_batch,
        True,
        False,
    ),
    "sam_noise": Method(
        "SAM off the full gradient",
        build.noise_of_batch,
        {"rho": _rho(0.5)},
        16,
        build.full_gradient,
        needs_data=True,
        groups=False,
    ),
    "esam": Method(
        "ESAM",
        build.esam,
        {
            "rho": _rho(0.5),
            "beta": Option(0.6, "Share β of the params that is perturbed."),
            "fraction": Option(0.5, "Share γ of the examples in the second pass."),
        },
        2,
        build.rising,
        groups=False,
    ),
    "ss_sam": Method(
        "SS-SAM",
        build.ss_sam,
        {"rho": _rho(0.5), "p": Option(0.5, "Probability that a step perturbs.")},
        1.5,
    ),
    "every": Method(
        "SAM at every k-th step", build.every, {"rho": _rho(1.0), "k": Option(5, "Period.")}, 1.2
    ),
    "looksam": Method(
        "LookSAM",
        build.looksam,
        {
            "rho": _rho(0.3),
            "k": Option(5, "Period of the SAM steps."),
            "alpha": Option(0.7, "Size α of the reused part."),
        },
        1.2,
    ),
    "part": Method(
        "SAM, ascent on part of the batch",
        build.sam,
        {
            "rho": _rho(0.95),
            "fraction": Option(0.02, "Share of the batch that leads the ascent."),
        },
        1.02,
        build.part,
        groups=False,
    ),
    "momentum": Method(
        "ascent along past gradients",
        build.momentum,
        {"rho": _rho(0.3), "decay": _DECAY},
        1,
        groups=False,
    ),
    "msam": Method(
        "Momentum-SAM", build.msam, {"rho": _rho(2.0), "decay": _DECAY}, 1, groups=False
    ),
    "m_asam": Method(
        "Momentum-SAM with ASAM's normalization",
        build.m_asam,
        {"rho": _rho(5.0), "eta": _ETA, "decay": _DECAY},
        1,
        groups=False,
    ),
    "low_pass": Method(
        "LPF-SGD: smoothing by noise",
        build.keyed(sam_optax.low_pass),
        {
            "gamma": Option(0.02, "Scale γ of the noise."),
            "samples": Option(1, "Draws of the noise in a step."),
        },
        1,
    ),
}
DEFAULT = ("sgd", "sam", "asam", "rsam", "fsam")
