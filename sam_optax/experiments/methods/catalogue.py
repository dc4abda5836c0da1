# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""Methods of the registry that are known by their paper's name alone.

Their radii are those of ``compare --tune`` on digits with 40 % wrong labels. The learning rates of
those with their own base optimizer had the highest accuracy on held-out examples among four.
"""

import sam_optax
from sam_optax.experiments.methods import arguments
from sam_optax.experiments.methods import builders as build
from sam_optax.experiments.methods.builders import built
from sam_optax.experiments.methods.method import Method
from sam_optax.experiments.methods.options import WHOLE, options

CATALOGUE: dict[str, Method] = {
    "le_sam": Method(
        "LE-SAM",
        built(lambda key, rho, tau: sam_optax.limit_rise(sam_optax.sam(rho), tau)),
        options(rho=1.0, tau=(0.2, "Budget τ for the rise of the loss.")),
        radius=("rho", "tau"),
    ),
    "stable_sam": Method(
        "Stable SAM", build.after_sam(sam_optax.match_ascent_norm), options(rho=0.5)
    ),
    "gc_sam": Method("GC-SAM", build.gc_sam, options(rho=0.5)),
    "zsharp": Method(
        "ZSharp",
        build.before_sam(sam_optax.zscore_filter),
        options(rho=0.5, quantile=(0.95, "Share of a layer that does not lead the ascent.")),
    ),
    "ae_sam": Method(  # at most 2 gradients
        "AE-SAM",
        build.sam_when(build.keyless(sam_optax.above_average)),
        options(
            rho=0.5,
            c=(0.0, "Threshold in standard deviations of the squared gradient norm."),
            decay=(0.9, "Decay δ of its statistics."),
        ),
        groups=False,
    ),
    "lookbehind": WHOLE(
        "Lookbehind-SAM",
        build=build.lookbehind,
        options=options(
            rho=0.25,
            k=(2, "Number of ascents, and of steps of the base optimizer."),
            alpha=(0.5, "Share α of the way of these steps."),
        ),
        gradients=lambda batches, k, **_: 1 + k,
        arguments=arguments.gradient,
    ),
    "xsam": WHOLE(
        "XSAM",
        build=build.xsam,
        options=options(rho=0.5, every=(100, "Steps between two searches of the maximum.")),
        arguments=arguments.value,
    ),
    "x_sam": WHOLE(
        "X-SAM",
        build=build.after_sam(lambda alpha, **_: sam_optax.away_from_eigenvector(alpha)),
        options=options(
            rho=0.25,
            alpha=(0.5, "Share α of the sharp gradient that is removed along the eigenvector."),
            iterations=(5, "Power iterations for the eigenvector, at every step."),
        ),
        gradients=lambda batches, iterations, **_: 2 + 2 * iterations,
        arguments=arguments.eigenvector,
    ),
    "gam": WHOLE(
        "GAM",
        options=options(rho=0.5, alpha=(1.0, "Weight α of the gradient norm's gradient.")),
        gradients=5,  # two are products with the Hessian
        arguments=arguments.steepness,
    ),
    "sampa": WHOLE(
        "SAMPa",
        build=build.sampa,
        options=options(rho=1.0, lmbda=(0.2, "Share λ of the gradient at the step ahead.")),
        arguments=arguments.two_batches,
        needs_previous=True,
    ),
    "ada_sam": Method("AdaSAM", build.ada_sam, options(rho=0.5, lr=0.03)),
    "light_sam": Method("LightSAM", build.light_sam, options(rho=0.005, lr=0.1)),
    "sam_polyak": WHOLE(
        "SAM-Polyak",
        build=build.polyak,
        options=options(rho=0.25, largest=(0.3, "Largest learning rate γ_b.")),
        arguments=arguments.linearized_back,
        decays=False,
    ),
    "bsam": Method(
        "bSAM",
        build.b_sam,
        options(
            rho=0.08,
            lr=1.0,
            beta1=(0.9, "Decay β₁ of the average of gradients."),
            beta2=(0.999, "Decay β₂ of the precision."),
        ),
    ),
}
