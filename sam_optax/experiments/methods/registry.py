# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The methods of the experiments; a new one is added by a line here.

The values were chosen on digits with 40 % wrong training labels, by the accuracy on a held-out part
of the training set; R-SAM's γ and λ are the library's defaults.
"""

import functools
import inspect

import optax

import sam_optax
from sam_optax.experiments.methods import arguments
from sam_optax.experiments.methods import builders as build
from sam_optax.experiments.methods.builders import built
from sam_optax.experiments.methods.catalogue import CATALOGUE
from sam_optax.experiments.methods.method import Method, Option
from sam_optax.experiments.methods.options import WHOLE, options

_REGION = {  # what ASAM's figure 4 varies
    "p": Option(None, "Norm p of the neighbourhood, such as 2 or inf.", float),
    "normalization": Option(None, "Normalization operator: elementwise or filterwise.", str),
    "normalize_biases": Option(None, "Whether biases are normalized as other params are.", bool),
}
_RSAM = inspect.signature(sam_optax.rsam).parameters
_START = options(
    gamma=(_RSAM["gamma"].default, "Scale γ of the random start's noise."),
    lmbda=(_RSAM["lmbda"].default, "Weight λ of the gradient relative to the noise."),
)
_FISHER = options(eta=(1.0, "Weight η of the Fisher information."))
_EMA = options(sigma=1.0, lmbda=0.9)
_MASK = options(sparsity=0.5, every=100)
_SSAM = functools.partial(
    built, lambda key, rho, **mask: optax.chain(sam_optax.sam(rho), build.sparse(key, **mask))
)
# Methods that use past gradients perturb all groups of a batch alike.
_PAST = functools.partial(Method, gradients=1, groups=False)


def _periodic(batches: float, k: int, **_: float) -> float:
    return 1 + 1 / k


METHODS: dict[str, Method] = {
    "sgd": Method("the base optimizer", lambda base, key: base.tx, {}, 1, groups=False, radius=()),
    "sam": Method("SAM", build.sam, options(rho=0.5)),
    "asam": Method("ASAM", built(build.asam), options(rho=2.0, eta=0.01) | _REGION),
    # With the default λ, the cosine of ε and the gradient is 0.89, so ρ = 0.6 goes about as far
    # along the gradient as SAM with 0.5.
    "rsam": Method("R-SAM", built(build.keyed(sam_optax.rsam)), options(rho=0.6) | _START),
    "fsam": Method("F-SAM", built(build.keyless(sam_optax.fsam)), options(rho=0.5) | _EMA),
    "f_asam": Method(
        "F-ASAM", built(build.friendly(sam_optax.asam)), options(rho=2.0, eta=0.01) | _EMA
    ),
    "fisher_sam": Method(
        "Fisher SAM", built(build.keyless(sam_optax.fisher_sam)), options(rho=0.5) | _FISHER
    ),
    "f_fisher_sam": Method(
        "F-FisherSAM",
        built(build.friendly(sam_optax.fisher_sam)),
        options(rho=0.5) | _FISHER | _EMA,
    ),
    "gsam": Method(
        "GSAM",
        build.gsam,
        options(
            rho_max=(0.8, "Radius ρ at the highest learning rate."),
            rho_min=(0.2, "Radius ρ at learning rate 0."),
            alpha=0.1,
            lr_max=(0.1, "Learning rate at which the radius is ρ."),
        ),
        radius=("rho_max", "rho_min"),
    ),
    "rgsam": Method("R-GSAM", build.rgsam, options(rho=0.5) | _START | options(alpha=0.1)),
    "wsam": Method(
        "WSAM, coupled: a weighted sum of both gradients",
        build.after_sam(build.weighted),
        options(rho=0.5, gamma=0.5),
    ),
    "wsam_decoupled": Method("WSAM, decoupled", build.wsam_decoupled, options(rho=0.5, gamma=0.9)),
    "vasso": Method(
        "VaSSO",
        build.before_sam(build.smooth),
        options(rho=0.5, theta=(0.4, "Weight θ of the new gradient in the average.")),
    ),
    "ssam_f": Method("SSAM with a Fisher mask", _SSAM(), options(rho=0.5) | _MASK),
    "ssam_d": Method(
        "SSAM with a dynamic mask",
        _SSAM(),
        options(rho=0.5) | _MASK | options(drop=(0.5, "Share of the mask that a choice replaces.")),
    ),
    "delta_sam": WHOLE(
        "δ-SAM", options=options(rho=0.5), gradients=3, arguments=arguments.reweighted
    ),
    "sam_full": WHOLE(
        "SAM along the full gradient",
        options=options(rho=0.5),
        gradients=lambda batches, **_: 1 + batches,
        arguments=arguments.whole,
        needs_data=True,
    ),
    "sam_db": WHOLE(
        "SAM along another batch",
        options=options(rho=0.5),
        arguments=arguments.another_batch,
        needs_data=True,
    ),
    "sam_batches": WHOLE(
        "SAM along several batches",
        options=options(
            rho=0.5,
            batches=(2, "Batches that lead the ascent: the step's, and others; at most all."),
        ),
        gradients=lambda data, batches, **_: 1 + min(data, batches),
        arguments=arguments.several_batches,
        needs_data=True,
    ),
    "sam_noise": WHOLE(
        "SAM orthogonal to the full gradient",
        build=build.before_sam(sam_optax.project_out),
        options=options(rho=0.5),
        gradients=lambda batches, **_: 2 + batches,
        arguments=arguments.full_gradient,
        needs_data=True,
    ),
    "esam": WHOLE(
        "ESAM",
        build=build.esam,
        options=options(
            rho=0.5,
            beta=(0.6, "Share β of the params that is perturbed."),
            fraction=(0.5, "Share γ of the examples in the second pass."),
        ),
        arguments=arguments.rising,
    ),
    "ss_sam": Method(
        "SS-SAM",
        build.sam_when(build.keyed(sam_optax.bernoulli)),
        options(rho=0.5, p=(0.5, "Probability that a step perturbs.")),
        lambda batches, p, **_: 1 + p,
    ),
    "every": Method(
        "SAM at every k-th step",
        build.sam_when(build.keyless(sam_optax.every)),
        options(rho=1.0, k=5),
        _periodic,
    ),
    "looksam": Method(
        "LookSAM",
        build.looksam,
        options(rho=0.3, k=5, alpha=(0.7, "Size α of the reused part.")),
        _periodic,
    ),
    "part": WHOLE(
        "SAM, ascent on part of the batch",
        options=options(rho=0.95, fraction=(0.02, "Share of the batch for the ascent gradient.")),
        gradients=lambda batches, fraction, **_: 1 + fraction,
        arguments=arguments.part,
    ),
    "momentum": _PAST(
        "ascent along past gradients", build.of_momentum(sam_optax.sam), options(rho=0.3)
    ),
    "msam": _PAST("Momentum-SAM", build.of_momentum(build.ahead(sam_optax.sam)), options(rho=2.0)),
    "m_asam": _PAST(
        "Momentum-SAM with ASAM's normalization",
        build.of_momentum(build.ahead(sam_optax.asam)),
        options(rho=5.0, eta=0.01),
    ),
    "low_pass": Method(
        "LPF-SGD: smoothing by noise",
        built(build.keyed(sam_optax.low_pass)),
        options(
            gamma=(0.02, "Scale γ of the noise."), samples=(1, "Number of noise draws per step.")
        ),
        1,
        radius=("gamma",),
    ),
    **CATALOGUE,
}
DEFAULT = ("sgd", "sam", "asam", "rsam", "fsam")
