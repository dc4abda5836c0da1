"""Every public method, for the conformance suite: a new method joins by one line here."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import optax
import optax.contrib

import sam_optax

KEY = jax.random.key(0)


def _mask(params: optax.Params) -> object:
    """Chooses every leaf but the first."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, [i > 0 for i in range(len(leaves))])


METHODS: list[tuple[str, Callable[[], optax.GradientTransformation]]] = [
    ("sam", lambda: sam_optax.sam(0.3)),
    ("sam_1", lambda: sam_optax.sam(0.3, p=1)),
    ("sam_1.5", lambda: sam_optax.sam(0.3, p=1.5)),
    ("sam_3", lambda: sam_optax.sam(0.3, p=3)),
    ("sam_inf", lambda: sam_optax.sam(0.3, p=np.inf)),
    ("sam_scheduled", lambda: sam_optax.sam(optax.linear_schedule(0.1, 0.5, 5))),
    ("asam", lambda: sam_optax.asam(0.3)),
    ("asam_3", lambda: sam_optax.asam(0.3, p=3)),
    ("asam_filterwise", lambda: sam_optax.asam(0.3, normalization="filterwise")),
    ("asam_scheduled", lambda: sam_optax.asam(0.3, eta=optax.linear_schedule(0.0, 0.1, 5))),
    ("fsam", lambda: sam_optax.fsam(0.3)),
    ("fsam_zero_new", lambda: sam_optax.fsam(0.3, 0.5, ema_start="zero", subtract="new")),
    ("fsam_corrected", lambda: sam_optax.fsam(0.3, ema_start="bias_corrected")),
    ("fsam_scheduled", lambda: sam_optax.fsam(0.3, lmbda=optax.linear_schedule(0.5, 0.9, 5))),
    ("remove_full_gradient", lambda: sam_optax.remove_full_gradient()),
    ("fsam_asam", lambda: optax.chain(sam_optax.remove_full_gradient(), sam_optax.asam(0.3))),
    ("rsam", lambda: sam_optax.rsam(0.3, key=KEY)),
    ("rsam_raw", lambda: sam_optax.rsam(0.3, 0.2, 0.5, key=0, weighting="raw")),
    (
        "rsam_normalized_gradient",
        lambda: sam_optax.rsam(0.3, 0.2, 0.5, key=KEY, weighting="normalized_gradient"),
    ),
    ("rsam_sqrt_norm", lambda: sam_optax.rsam(0.3, key=KEY, noise_scale="sqrt_norm")),
    ("rsam_norm", lambda: sam_optax.rsam(0.3, key=KEY, noise_scale="norm")),
    ("rsam_isotropic", lambda: sam_optax.rsam(0.3, key=KEY, noise_scale="isotropic")),
    ("rsam_draw", lambda: sam_optax.rsam(0.3, key=KEY, draw=jax.random.normal)),
    ("rsam_scheduled", lambda: sam_optax.rsam(0.3, optax.linear_schedule(0.0, 0.2, 5), key=KEY)),
    ("random_asam", lambda: sam_optax.random_start(sam_optax.asam(0.3), key=KEY)),
    ("fisher", lambda: sam_optax.fisher_sam(0.3)),
    ("fisher_scheduled", lambda: sam_optax.fisher_sam(0.3, optax.linear_schedule(0.0, 1.0, 5))),
    ("f_fisher", lambda: optax.chain(sam_optax.remove_full_gradient(), sam_optax.fisher_sam(0.3))),
    ("smooth_gradient", lambda: sam_optax.smooth_gradient(0.4)),
    ("vasso", lambda: optax.chain(sam_optax.smooth_gradient(0.4), sam_optax.sam(0.3))),
    ("random_mask", lambda: sam_optax.random_mask(0.5, key=KEY)),
    ("esam", lambda: optax.chain(sam_optax.sam(0.3), sam_optax.random_mask(0.5, key=KEY))),
    ("ssam", lambda: optax.chain(sam_optax.sam(0.3), sam_optax.sparsify(0.5, key=KEY, every=2))),
    (
        "ssam_dynamic",
        lambda: optax.chain(
            sam_optax.sam(0.3), sam_optax.sparsify(0.5, key=KEY, choice="dynamic", every=2)
        ),
    ),
    ("momentum", lambda: sam_optax.momentum_start(sam_optax.sam(0.3))),
    ("momentum_fsam", lambda: sam_optax.momentum_start(sam_optax.fsam(0.3), 0.0)),
    ("low_pass", lambda: sam_optax.low_pass(0.1, key=KEY)),
    ("low_pass_samples", lambda: sam_optax.low_pass(0.1, 3, key=KEY)),
    (
        "only_momentum",
        lambda: sam_optax.perturb_only(sam_optax.momentum_start(sam_optax.asam(0.3)), _mask),
    ),
    ("only_sam", lambda: sam_optax.perturb_only(sam_optax.sam(0.3), _mask)),
    ("only_rsam", lambda: sam_optax.perturb_only(sam_optax.rsam(0.3, key=KEY), _mask)),
    ("by_hand", lambda: optax.chain(optax.contrib.normalize(), optax.scale(0.3))),
]
NAMES = [name for name, _ in METHODS]
# Of the hand-made one, optax decides what it can do.
OURS = [name for name in NAMES if name != "by_hand"]
# One of each kind, for what costs much to compile and depends little on the formula.
KINDS = ["sam", "sam_scheduled", "asam", "fsam", "rsam", "only_rsam", "ssam", "momentum"]
KINDS += ["low_pass_samples", "by_hand"]
# One of each formula, for what does not depend on options.
FORMULAS = ["sam", "sam_1", "sam_3", "asam", "asam_filterwise", "fsam", "fsam_corrected", "rsam"]
FORMULAS += ["rsam_raw", "rsam_normalized_gradient", "only_rsam"]


@functools.cache
def make(name: str) -> sam_optax.Perturbation:
    """The method, one instance for all tests, so that what it compiles is shared."""
    return sam_optax.as_perturbation(dict(METHODS)[name]())


@functools.cache
def subject(name: str, base: str | None) -> optax.GradientTransformationExtraArgs:
    """The method, alone or inside ``sharpness_aware`` with a base optimizer."""
    if base is None:
        return make(name)
    bases = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(0.1)}
    return sam_optax.sharpness_aware(bases[base], make(name))
