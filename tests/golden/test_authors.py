"""Options of the library that no row of ``docs`` has, on recorded steps of the authors' code.

The rows themselves follow it in ``combinators/test_catalogue.py``. Where the default of this
library deviates from a code, there is the composition that follows the code.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from authors import TOLERANCE, distance, torch_base
from helpers import x64

import sam_optax
from sam_optax import sam, sharpness_aware

centralize = optax.stateless(
    lambda g, _: jax.tree.map(
        lambda x: x - x.mean(range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x, g
    )
)


def of(method):
    return lambda h, base: sharpness_aware(base, method(h))


def gsam_scheduled(h, base):
    lr = lambda step: jnp.asarray(h.lr_t)[step]
    rho = sam_optax.rho_from_learning_rate(lr, h.rho_min, h.rho_max, h.lr_min, h.lr_max)
    descent = sam_optax.surrogate_gap(h.alpha)
    return sharpness_aware(torch_base(h, lr=lr), sam(rho), descent=descent)


def sampa_adamw(h, base):
    """For y the code takes a step of SGD, without Adam's moments."""

    def update(g, state, params, *, perturbed, **extra):
        look = optax.scale(-h.lr).update(g, optax.EmptyState())[0], state
        return base.update(g, state, params) if perturbed else look

    steps = optax.GradientTransformationExtraArgs(base.init, update)
    tx = sam_optax.simultaneous(optax.identity(), sam(h.rho), h.og, descent=steps)
    return tx, lambda b, params: {"grad_fn": b.grad, "previous_grad_fn": b.before().grad}


def backwards(h):
    return optax.chain(sam(h.rho), optax.scale(-1.0))


FOLLOWED = {
    ("gsamjax", "sched_momentum"): gsam_scheduled,
    ("msam", "sgd"): lambda h, base: sharpness_aware(  # whose buffer is the last gradient
        base, sam_optax.momentum_start(backwards(h), decay=0.0)
    ),
    ("sampa", "adamw"): sampa_adamw,
    ("ssam", "unnormalized_adamw"): lambda h, base: sharpness_aware(
        base, optax.scale(h.rho), descent=sam_optax.match_ascent_norm()
    ),
}


@pytest.mark.parametrize(("method", "run"), FOLLOWED)
def test_trajectory(monkeypatch, method, run):
    with x64():
        gap = distance(monkeypatch, method, run, FOLLOWED[method, run])
    assert gap < TOLERANCE.get(method, 1e-11)


# What the codes deviate from: the paper's form, or what a reader might write first.
OTHERS = {
    ("fsam", "sgd"): of(lambda h: sam_optax.fsam(h.rho, h.sigma, h.lmbda, subtract="new")),
    ("gcsam", "sgd"): lambda h, base: sharpness_aware(
        base, optax.chain(centralize, sam(h.rho)), descent=centralize
    ),
    ("looksam", "momentum"): lambda h, base: sharpness_aware(  # norms over the whole tree
        base,
        sam(h.rho),
        descent=sam_optax.reuse_orthogonal(h.alpha),
        when=sam_optax.every(int(h.k)),
    ),
    ("msam", "momentum"): lambda h, base: sharpness_aware(
        base, sam_optax.momentum_start(backwards(h))
    ),
    ("sampa", "momentum"): lambda h, base: (  # both gradients on this step's batch
        sam_optax.simultaneous(base, sam(h.rho), h.og),
        lambda b, params: {"grad_fn": b.grad, "previous_grad_fn": b.grad},
    ),
    ("wsam", "momentum"): lambda h, base: sharpness_aware(  # coupled
        base, sam(h.rho), descent=sam_optax.mix_gradients(h.gamma / (1 - h.gamma))
    ),
    ("zsharp", "sgd"): of(lambda h: optax.chain(sam_optax.zscore_filter(h.alpha), sam(h.rho))),
}


@pytest.mark.parametrize(("method", "run"), OTHERS)
def test_other_compositions_do_not_follow_it(monkeypatch, method, run):
    with x64():
        assert distance(monkeypatch, method, run, OTHERS[method, run]) > 1e-5
