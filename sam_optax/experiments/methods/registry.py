# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The methods of the experiments; a new one is added by a line here.

The values were chosen on digits with 40 % wrong training labels, by the accuracy on a held-out part
of the training set; R-SAM's γ and λ are the library's defaults.
"""

import functools
import inspect
from typing import Any

import optax

import sam_optax
from sam_optax.experiments.methods import builders as build
from sam_optax.experiments.methods.builders import built
from sam_optax.experiments.methods.method import Method, Option

_HELP = {
    "rho": "Radius ρ of the perturbation.",
    "eta": "η, added to |w| in the normalization operator.",
    "sigma": "Share σ of the full gradient that is removed.",
    "lmbda": "Decay λ of the average that estimates the full gradient.",
    "alpha": "Weight α of the surrogate gap's gradient.",
    "gamma": "The weight of the sharpness is γ/(1 − γ).",
    "sparsity": "Share of the params that is not perturbed.",
    "every": "Number of perturbations between choices of the mask.",
    "decay": "Decay β of the average of past gradients.",
    "k": "Period of the SAM steps.",
}


def _options(**values: Any) -> dict[str, Option]:
    """Hyperparameters: a default, or a default and what it is."""
    pairs = {k: v if isinstance(v, tuple) else (v, _HELP[k]) for k, v in values.items()}
    return {name: Option(value, text, type(value)) for name, (value, text) in pairs.items()}


_REGION = {  # what ASAM's figure 4 varies
    "p": Option(None, "Norm p of the neighbourhood, such as 2 or inf.", float),
    "normalization": Option(None, "Normalization operator: elementwise or filterwise.", str),
    "normalize_biases": Option(None, "Whether biases are normalized as other params are.", bool),
}
_RSAM = inspect.signature(sam_optax.rsam).parameters
_START = _options(
    gamma=(_RSAM["gamma"].default, "Scale γ of the random start's noise."),
    lmbda=(_RSAM["lmbda"].default, "Weight λ of the gradient relative to the noise."),
)
_FISHER = _options(eta=(1.0, "Weight η of the Fisher information."))
_EMA = _options(sigma=1.0, lmbda=0.9)
_MASK = _options(sparsity=0.5, every=100)
_SSAM = functools.partial(
    built, lambda key, rho, **mask: optax.chain(sam_optax.sam(rho), build.sparse(key, **mask))
)
# Methods that use past gradients or the whole batch perturb all groups of it alike.
_PAST = functools.partial(Method, gradients=1, groups=False)
_WHOLE = functools.partial(Method, build=build.sam, groups=False)


def _periodic(batches: float, k: int, **_: float) -> float:
    return 1 + 1 / k


METHODS: dict[str, Method] = {
    "sgd": Method("the base optimizer", lambda base, key: base.tx, {}, 1, groups=False, radius=()),
    "sam": Method("SAM", build.sam, _options(rho=0.5)),
    "asam": Method("ASAM", built(build.asam), _options(rho=2.0, eta=0.01) | _REGION),
    # With the default λ, the cosine of ε and the gradient is 0.89, so ρ = 0.6 goes about as far
    # along the gradient as SAM with 0.5.
    "rsam": Method("R-SAM", built(build.keyed(sam_optax.rsam)), _options(rho=0.6) | _START),
    "fsam": Method("F-SAM", built(build.keyless(sam_optax.fsam)), _options(rho=0.5) | _EMA),
    "f_asam": Method(
        "F-ASAM", built(build.friendly(sam_optax.asam)), _options(rho=2.0, eta=0.01) | _EMA
    ),
    "fisher_sam": Method(
        "Fisher SAM", built(build.keyless(sam_optax.fisher_sam)), _options(rho=0.5) | _FISHER
    ),
    "f_fisher_sam": Method(
        "F-FisherSAM",
        built(build.friendly(sam_optax.fisher_sam)),
        _options(rho=0.5) | _FISHER | _EMA,
    ),
    "gsam": Method(
        "GSAM",
        build.gsam,
        _options(
            rho_max=(0.8, "Radius ρ at the highest learning rate."),
            rho_min=(0.2, "Radius ρ at learning rate 0."),
            alpha=0.1,
            lr_max=(0.1, "Learning rate at which the radius is ρ."),
        ),
        radius=("rho_max", "rho_min"),
    ),
    "rgsam": Method("R-GSAM", build.rgsam, _options(rho=0.5) | _START | _options(alpha=0.1)),
    "wsam": Method(
        "WSAM, coupled: a weighted sum of both gradients",
        build.wsam,
        _options(rho=0.5, gamma=0.5),
    ),
    "wsam_decoupled": Method("WSAM, decoupled", build.wsam_decoupled, _options(rho=0.5, gamma=0.9)),
    "vasso": Method(
        "VaSSO",
        built(
            lambda key, rho, theta: optax.chain(
                sam_optax.smooth_gradient(theta), sam_optax.sam(rho)
            )
        ),
        _options(rho=0.5, theta=(0.4, "Weight θ of the new gradient in the average.")),
    ),
    "ssam_f": Method("SSAM with a Fisher mask", _SSAM(), _options(rho=0.5) | _MASK),
    "ssam_d": Method(
        "SSAM with a dynamic mask",
        _SSAM(),
        _options(rho=0.5)
        | _MASK
        | _options(drop=(0.5, "Share of the mask that a choice replaces.")),
    ),
    "delta_sam": _WHOLE(
        "δ-SAM", options=_options(rho=0.5), gradients=3, arguments=build.reweighted
    ),
    "sam_full": _WHOLE(
        "SAM along the full gradient",
        options=_options(rho=0.5),
        gradients=lambda batches, **_: 1 + batches,
        arguments=build.whole,
        needs_data=True,
    ),
    "sam_db": _WHOLE(
        "SAM along another batch",
        options=_options(rho=0.5),
        arguments=build.another_batch,
        needs_data=True,
    ),
    "sam_batches": _WHOLE(
        "SAM along several batches",
        options=_options(
            rho=0.5,
            batches=(2, "Batches that lead the ascent: the step's, and others; at most all."),
        ),
        gradients=lambda data, batches, **_: 1 + min(data, batches),
        arguments=build.several_batches,
        needs_data=True,
    ),
    "sam_noise": _WHOLE(
        "SAM orthogonal to the full gradient",
        build=built(lambda key, rho: optax.chain(sam_optax.project_out(), sam_optax.sam(rho))),
        options=_options(rho=0.5),
        gradients=lambda batches, **_: 2 + batches,
        arguments=build.full_gradient,
        needs_data=True,
    ),
    "esam": _WHOLE(
        "ESAM",
        build=build.esam,
        options=_options(
            rho=0.5,
            beta=(0.6, "Share β of the params that is perturbed."),
            fraction=(0.5, "Share γ of the examples in the second pass."),
        ),
        arguments=build.rising,
    ),
    "ss_sam": Method(
        "SS-SAM",
        build.ss_sam,
        _options(rho=0.5, p=(0.5, "Probability that a step perturbs.")),
        lambda batches, p, **_: 1 + p,
    ),
    "every": Method("SAM at every k-th step", build.every, _options(rho=1.0, k=5), _periodic),
    "looksam": Method(
        "LookSAM",
        build.looksam,
        _options(rho=0.3, k=5, alpha=(0.7, "Size α of the reused part.")),
        _periodic,
    ),
    "part": _WHOLE(
        "SAM, ascent on part of the batch",
        options=_options(rho=0.95, fraction=(0.02, "Share of the batch for the ascent gradient.")),
        gradients=lambda batches, fraction, **_: 1 + fraction,
        arguments=build.part,
    ),
    "momentum": _PAST(
        "ascent along past gradients",
        built(lambda key, rho, decay: sam_optax.momentum_start(sam_optax.sam(rho), decay)),
        _options(rho=0.3, decay=0.9),
    ),
    "msam": _PAST(
        "Momentum-SAM",
        built(lambda key, rho, decay: build.ahead(sam_optax.sam(rho), decay)),
        _options(rho=2.0, decay=0.9),
    ),
    "m_asam": _PAST(
        "Momentum-SAM with ASAM's normalization",
        built(lambda key, rho, eta, decay: build.ahead(sam_optax.asam(rho, eta), decay)),
        _options(rho=5.0, eta=0.01, decay=0.9),
    ),
    "low_pass": Method(
        "LPF-SGD: smoothing by noise",
        built(build.keyed(sam_optax.low_pass)),
        _options(
            gamma=(0.02, "Scale γ of the noise."), samples=(1, "Number of noise draws per step.")
        ),
        1,
        radius=("gamma",),
    ),
    # The values below have not been chosen yet: radii are SAM's, the others the papers' or a guess.
    "le_sam": Method(
        "LE-SAM",
        built(lambda key, rho, tau: sam_optax.limit_rise(sam_optax.sam(rho), tau)),
        _options(rho=0.5, tau=(0.1, "Budget τ for the rise of the loss.")),
        radius=("tau",),
    ),
    "stable_sam": Method("Stable SAM", build.stable_sam, _options(rho=0.5)),
    "gc_sam": Method("GC-SAM", build.gc_sam, _options(rho=0.5)),
    "zsharp": Method(
        "ZSharp",
        built(
            lambda key, rho, quantile: optax.chain(
                sam_optax.zscore_filter(quantile), sam_optax.sam(rho)
            )
        ),
        _options(rho=0.5, quantile=(0.95, "Share of a layer that does not lead the ascent.")),
    ),
    "ae_sam": Method(  # at most 2 gradients
        "AE-SAM",
        build.ae_sam,
        _options(
            rho=0.5,
            c=(0.0, "Threshold in standard deviations of the squared gradient norm."),
            decay=(0.9, "Decay δ of its statistics."),
        ),
        groups=False,
    ),
    "lookbehind": _WHOLE(
        "Lookbehind-SAM",
        options=_options(rho=0.25, k=(2, "Number of gradients that are averaged.")),
        gradients=lambda batches, k, **_: 1 + k,
        arguments=build.lookbehind,
    ),
    "xsam": _WHOLE(
        "XSAM",
        build=build.xsam,
        options=_options(rho=0.5, every=(100, "Steps between two searches of the maximum.")),
        arguments=build.value,
    ),
}
DEFAULT = ("sgd", "sam", "asam", "rsam", "fsam")
