"""Options of the library that no row of ``docs`` has, on recorded steps of the authors' code.

The rows themselves follow it in ``combinators/test_catalogue.py``. Where the default of this
library deviates from a code, there is the composition that follows the code.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from authors import TOLERANCE, add, distance, scaled, torch_base
from helpers import x64

import sam_optax
from sam_optax import sam, sharpness_aware

LINF = functools.partial(sam_optax.asam, p=jnp.inf)
centralize = optax.stateless(
    lambda g, _: jax.tree.map(
        lambda x: x - x.mean(range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x, g
    )
)


def of(method):
    return lambda h, base: sharpness_aware(base, method(h))


def only_norm(method):
    return sam_optax.perturb_only(
        method, lambda params: {layer: layer == "norm" for layer in params}
    )


def gsam_scheduled(h, base):
    lr = lambda step: jnp.asarray(h.lr_t)[step]
    rho = sam_optax.rho_from_learning_rate(lr, h.rho_min, h.rho_max, h.lr_min, h.lr_max)
    descent = sam_optax.surrogate_gap(h.alpha)
    return sharpness_aware(torch_base(h, lr=lr), sam(rho), descent=descent)


def gsam_of_workers(h, base):
    """Each worker decomposes its own gradient; with groups=2 the means would be decomposed."""
    gap, method = sam_optax.surrogate_gap(h.alpha), sam(h.rho_max)

    def given(b, params):
        def worker(grad):
            g = grad(params)
            g_s = grad(method.perturb_fn(params, g, method.init(params))[0])
            return gap.update(g_s, optax.EmptyState(), ascent_grads=g)[0]

        return {"grads": scaled(add(worker(b.part(0, 2)), worker(b.part(1, 2))), 0.5)}

    return base, given


def sampa_adamw(h, base):
    """For y the code takes a step of SGD, without Adam's moments."""

    def update(g, state, params, *, perturbed, **extra):
        look = optax.scale(-h.lr).update(g, optax.EmptyState())[0], state
        return base.update(g, state, params) if perturbed else look

    steps = optax.GradientTransformationExtraArgs(base.init, update)
    tx = sam_optax.simultaneous(optax.identity(), sam(h.rho), h.og, descent=steps)
    return tx, lambda b, params: {"grad_fn": b.grad, "previous_grad_fn": b.before().grad}


def low_pass(h, base):
    method = sam_optax.low_pass(h.std, key=0, noise_scale="norm")
    return sharpness_aware(base, method), lambda b, params: {"grad_fn": b.grad}


def xsam_after_two_ascents(h, base):
    """v₀ is the direction of ε: the ascent gradient is ε itself."""
    descent = sam_optax.toward_maximum(h.rho_max, every=4, largest=h.alpha_max, candidates=21)
    up = sam(h.rho_total / h.steps)

    def given(b, params):
        def ascents(w):
            point = w
            for _ in range(int(h.steps)):
                point, _ = up.perturb_fn(point, b.grad(point), up.init(w))
            return add(point, w, -1.0)

        return {"grad_fn": b.grad, "value_fn": b.loss, "ascent_grad_fn": ascents}

    return sharpness_aware(base, optax.identity(), descent=descent), given


def backwards(h):
    return optax.chain(sam(h.rho), optax.scale(-1.0))


FOLLOWED = {
    ("fsam", "sigma1_momentum"): of(lambda h: sam_optax.fsam(h.rho, h.sigma, h.lmbda)),
    ("fsam", "adaptive_momentum"): of(
        lambda h: optax.chain(
            sam_optax.remove_full_gradient(h.sigma, h.lmbda),
            sam_optax.asam(h.rho, 0.0, bias_mask=False),
        )
    ),
    ("gsam", "linearrho_sgd"): lambda h, base: sharpness_aware(
        base,
        sam(optax.linear_schedule(h.rho_max, h.rho_min, 10)),
        descent=sam_optax.surrogate_gap(h.alpha),
    ),
    ("gsamjax", "sched_momentum"): gsam_scheduled,
    ("gsamjax", "2workers_sgd"): gsam_of_workers,
    ("lookbehind", "asam_momentum"): lambda h, base: sam_optax.lookbehind(
        base, sam_optax.asam(h.rho, h.eta), int(h.k_steps), h.alpha
    ),
    ("lpfsgd_m1", "momentum"): low_pass,
    ("msam", "sgd"): lambda h, base: sharpness_aware(  # whose buffer is the last gradient
        base, sam_optax.momentum_start(backwards(h), decay=0.0)
    ),
    ("sampa", "adamw"): sampa_adamw,
    ("samon", "elementwise_l2_bias_momentum"): of(
        lambda h: sam_optax.asam(h.rho, h.eta, bias_mask=False)
    ),
    ("samon", "elementwise_linf_momentum"): of(lambda h: LINF(h.rho, h.eta)),
    ("samon_ln", "asam_only_norm_adamw"): of(lambda h: only_norm(sam_optax.asam(h.rho, h.eta))),
    ("samon_ln", "asam_linf_only_norm_momentum"): of(
        lambda h: only_norm(LINF(h.rho, h.eta, bias_mask=False))
    ),
    ("ssam", "unnormalized_adamw"): lambda h, base: sharpness_aware(
        base, optax.scale(h.rho), descent=sam_optax.match_ascent_norm()
    ),
    ("xsam", "dyn2_momentum"): xsam_after_two_ascents,
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
    ("gsamjax", "2workers_sgd"): lambda h, base: (
        sharpness_aware(base, sam(h.rho_max), descent=sam_optax.surrogate_gap(h.alpha), groups=2),
        lambda b, params: {"grad_fn": lambda p, i: b.part(i, 2)(p)},
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
