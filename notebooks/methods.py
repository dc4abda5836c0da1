"""Methods of your own for the command: those of papers that the package leaves out.

A method is named on the command line with its file, and so are its hyperparameters:

    python -m sam_optax compare --methods sgd sam notebooks/methods.py:gam --gam.rho 0.1 0.5
    python -m sam_optax compare --help notebooks/methods.py:gam
    python -m sam_optax cost --methods sam notebooks/methods.py:gam

It is a function under ``@method``: from the base optimizer and its hyperparameters, each with a
default, it makes the optimizer, usually ``base.sharp(perturbation, descent)``. ``low_pass`` below
shows the least that is needed, ``gam`` a step with gradients of its own. ``@method`` takes a title
and the traits of a method; those in use here are

* ``gradients``: how many a step takes on a batch, a number or a function of the batches in the
  training set and of the hyperparameters; 2 if it is left out.
* ``radius``: the hyperparameters that scale the radius, together, for ``--tune``; ("rho",).
* ``arguments``: a function of the step and the hyperparameters, what ``update`` is called with.
* ``needs_data``, ``needs_previous``: whether ``step.data``, all training examples, and
  ``step.previous``, the batch of the step before, are used.
* ``decays``: False of a method that has no use for the weight decay of the base optimizer.
* ``weight_decay``: a default of its own.

The values here were chosen on digits with 40 % wrong training labels by ``compare --tune``; of the
methods with their own base optimizer, the learning rates are the best of four.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments import Base, Step, method

BLOCK = 500  # examples of a gradient over the training set at a time, for its memory
START_OF_SUM = 1e-8

Rho = Annotated[float, "Radius ρ of the perturbation."]
Eta = Annotated[float, "η, added to |w| in the normalization operator."]
FisherWeight = Annotated[float, "Weight η of the Fisher information."]
Removed = Annotated[float, "Share σ of the full gradient that is removed."]
EmaDecay = Annotated[float, "Decay λ of the average that estimates the full gradient."]
SharpnessWeight = Annotated[float, "The weight of the sharpness is γ/(1 − γ)."]
Sparsity = Annotated[float, "Share of the params that is not perturbed."]
Choices = Annotated[int, "Number of perturbations between choices of the mask."]
Rate = Annotated[float, "Learning rate of its base optimizer, relative to --lr."]


# Friendly, random and sparse relatives.


def friendly(base: Base, perturbation, sigma, lmbda):
    """The gradient without its full-gradient component, then a perturbation along it."""
    rest = sam_optax.remove_full_gradient(sigma, lmbda)
    return base.sharp(optax.chain(rest, perturbation))


@method("F-ASAM")
def f_asam(
    base: Base,
    rho: Rho = 2.0,
    eta: Eta = 0.01,
    sigma: Removed = 1.0,
    lmbda: EmaDecay = 0.9,
):
    return friendly(base, sam_optax.asam(rho, eta), sigma, lmbda)


@method("F-FisherSAM")
def f_fisher_sam(
    base: Base,
    rho: Rho = 0.5,
    eta: FisherWeight = 1.0,
    sigma: Removed = 1.0,
    lmbda: EmaDecay = 0.9,
):
    return friendly(base, sam_optax.fisher_sam(rho, eta), sigma, lmbda)


@method("R-GSAM")
def rgsam(
    base: Base,
    rho: Rho = 0.5,
    gamma: Annotated[float, "Scale γ of the random start's noise."] = 0.1,
    lmbda: Annotated[float, "Weight λ of the gradient relative to the noise."] = 2.0,
    alpha: Annotated[float, "Weight α of the surrogate gap's gradient."] = 0.1,
):
    rsam = sam_optax.rsam(rho, gamma, lmbda, key=base.key)
    return base.sharp(rsam, sam_optax.surrogate_gap(alpha))


@method("SSAM with a Fisher mask")
def ssam_f(base: Base, rho: Rho = 0.5, sparsity: Sparsity = 0.5, every: Choices = 100):
    mask = sam_optax.sparsify(sparsity, every=every, choice="fisher", key=base.key)
    return base.sharp(optax.chain(sam_optax.sam(rho), mask))


@method("SSAM with a dynamic mask")
def ssam_d(
    base: Base,
    rho: Rho = 0.5,
    sparsity: Sparsity = 0.5,
    every: Choices = 100,
    drop: Annotated[float, "Share of the mask that a choice replaces."] = 0.5,
):
    mask = sam_optax.sparsify(
        sparsity, every=every, choice="dynamic", drop=drop, key=base.key
    )
    return base.sharp(optax.chain(sam_optax.sam(rho), mask))


def reweighted(step: Step, **_):
    ascent = sam_optax.reweighted_ascent(step.losses_fn, step.batch, key=step.key)
    return {"grad_fn": step.grad_fn(step.batch), "ascent_grad_fn": ascent}


@method("δ-SAM", gradients=3, arguments=reweighted)
def delta_sam(base: Base, rho: Rho = 0.5):
    return base.sharp(sam_optax.sam(rho))


@method("LPF-SGD: smoothing by noise", gradients=1, radius=("gamma",))
def low_pass(
    base: Base,
    gamma: Annotated[float, "Scale γ of the noise."] = 0.02,
    samples: Annotated[int, "Number of noise draws per step."] = 1,
):
    return base.sharp(sam_optax.low_pass(gamma, samples=samples, key=base.key))


# Those of F-SAM's experiments on what the ascent gradient is good for.


def full_grad(step: Step, params):
    """The gradient of the mean loss of all training examples."""
    n = len(step.data[1])
    if n <= 8 * BLOCK:
        return step.grad_fn(step.data)(params)
    count = -(-n // BLOCK)

    def block(params, i):
        index = BLOCK * i + jnp.arange(BLOCK)
        batch = jax.tree.map(lambda leaf: leaf[jnp.minimum(index, n - 1)], step.data)
        return count / n * jnp.sum((index < n) * step.losses_fn(params, batch))

    return sam_optax.accumulate(jax.grad(block), count)(params)


def along_all(step: Step, **_):
    return {
        "grad_fn": step.grad_fn(step.batch),
        "ascent_grad_fn": lambda params: full_grad(step, params),
    }


@method(
    "SAM along the full gradient",
    gradients=lambda batches, **_: 1 + batches,
    arguments=along_all,
    needs_data=True,
)
def sam_full(base: Base, rho: Rho = 0.5):
    return base.sharp(sam_optax.sam(rho))


def others(step: Step, count):
    """The i-th of some batches of other examples, which are not augmented."""
    shape = count, len(step.batch[1])
    index = jax.random.choice(step.key, len(step.data[1]), shape, replace=False)
    return lambda i: jax.tree.map(lambda leaf: jnp.asarray(leaf)[index[i]], step.data)


def along_another(step: Step, **_):
    another = step.grad_fn(others(step, 1)(0))
    return {"grad_fn": step.grad_fn(step.batch), "ascent_grad_fn": another}


@method("SAM along another batch", arguments=along_another, needs_data=True)
def sam_db(base: Base, rho: Rho = 0.5):
    return base.sharp(sam_optax.sam(rho))


def along_several(step: Step, batches, **_):
    """The ascent gradient on the batch and on others, at most on all data."""
    grad_fn = step.grad_fn(step.batch)
    if batches == 1:
        return {"value_and_grad_fn": step.value_and_grad_fn}
    if batches * len(step.batch[1]) >= len(step.data[1]):
        return along_all(step)
    another = others(step, batches - 1)
    rest = sam_optax.accumulate(lambda w, i: step.grad_fn(another(i))(w), batches - 1)

    def mean(params):
        grads = grad_fn(params), rest(params)
        return jax.tree.map(lambda g, r: (g + (batches - 1) * r) / batches, *grads)

    return {"grad_fn": grad_fn, "ascent_grad_fn": mean}


@method(
    "SAM along several batches",
    gradients=lambda data, batches, **_: 1 + min(data, batches),
    arguments=along_several,
    needs_data=True,
)
def sam_batches(
    base: Base,
    rho: Rho = 0.5,
    batches: Annotated[
        int, "Batches that lead the ascent: the step's, and others; at most all."
    ] = 2,
):
    if batches < 1:
        raise ValueError(f"batches must be at least 1, got {batches!r}.")
    return base.sharp(sam_optax.sam(rho))


def with_full_gradient(step: Step, **_):
    full_grads = full_grad(step, step.params)
    return {"value_and_grad_fn": step.value_and_grad_fn, "full_grads": full_grads}


@method(
    "SAM orthogonal to the full gradient",
    gradients=lambda batches, **_: 2 + batches,
    arguments=with_full_gradient,
    needs_data=True,
)
def sam_noise(base: Base, rho: Rho = 0.5):
    return base.sharp(optax.chain(sam_optax.project_out(), sam_optax.sam(rho)))


# Of the catalogue in docs/methods.md.


def odds(gamma):
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be in [0, 1), got {gamma!r}.")
    return gamma / (1 - gamma)


@method("WSAM, coupled: a weighted sum of both gradients")
def wsam(base: Base, rho: Rho = 0.5, gamma: SharpnessWeight = 0.5):
    return base.sharp(sam_optax.sam(rho), sam_optax.mix_gradients(odds(gamma)))


@method("WSAM, decoupled", weight_decay=0.000167)
def wsam_decoupled(base: Base, rho: Rho = 0.5, gamma: SharpnessWeight = 0.9):
    around = sam_optax.decoupled_sharpness(base.tx, base.learning_rate, odds(gamma))
    identity = base._replace(make=lambda _: optax.identity())
    return identity.sharp(sam_optax.sam(rho), around)


@method("VaSSO", weight_decay=1.85e-05)
def vasso(
    base: Base,
    rho: Rho = 0.5,
    theta: Annotated[float, "Weight θ of the new gradient in the average."] = 0.4,
):
    if not 0 < theta <= 1:
        raise ValueError(f"theta must be in (0, 1], got {theta!r}.")
    smooth = sam_optax.smooth_gradient(1 - theta)
    return base.sharp(optax.chain(smooth, sam_optax.sam(rho)))


@method("LE-SAM", radius=("rho", "tau"))
def le_sam(
    base: Base,
    rho: Rho = 1.0,
    tau: Annotated[float, "Budget τ for the rise of the loss."] = 0.2,
):
    return base.sharp(sam_optax.limit_rise(sam_optax.sam(rho), tau))


@method("Stable SAM")
def stable_sam(base: Base, rho: Rho = 0.5):
    return base.sharp(sam_optax.sam(rho), sam_optax.match_ascent_norm())


@method("GC-SAM", weight_decay=0.0015)
def gc_sam(base: Base, rho: Rho = 0.5):
    """Both gradients without their means over the inputs of each output (Flax's layout)."""

    def centred(x):
        return x - x.mean(range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x

    centralize = optax.stateless(lambda g, _: jax.tree.map(centred, g))
    return base.sharp(optax.chain(centralize, sam_optax.sam(rho)), centralize)


@method("ZSharp", weight_decay=0.0015)
def zsharp(
    base: Base,
    rho: Rho = 0.5,
    quantile: Annotated[
        float, "Share of a layer that does not lead the ascent."
    ] = 0.95,
):
    return base.sharp(
        optax.chain(sam_optax.zscore_filter(quantile), sam_optax.sam(rho))
    )


@method(
    "Lookbehind-SAM",
    gradients=lambda _, k, **__: 1 + k,
    arguments=lambda step, **_: {"grad_fn": step.grad_fn(step.batch)},
)
def lookbehind(
    base: Base,
    rho: Rho = 0.25,
    k: Annotated[int, "Number of ascents, and of steps of the base optimizer."] = 2,
    alpha: Annotated[float, "Share α of the way of these steps."] = 0.5,
):
    """The learning rate follows the training steps, each with k of the base."""
    tx = base.make(lambda count: base.learning_rate(count // k))
    return sam_optax.lookbehind(tx, sam_optax.sam(rho), k, alpha)


def with_loss(step: Step, **_):
    loss_fn = step.loss_fn(step.batch)
    return {"value_and_grad_fn": step.value_and_grad_fn, "value_fn": loss_fn}


@method("XSAM", arguments=with_loss)
def xsam(
    base: Base,
    rho: Rho = 0.5,
    every: Annotated[int, "Steps between two searches of the maximum."] = 100,
):
    """Its search has the radius of the perturbation."""
    return base.sharp(sam_optax.sam(rho), sam_optax.toward_maximum(rho, every))


def with_eigenvector(step: Step, iterations, **_):
    """The Hessian's leading eigenvector on the batch, by power iteration.

    It starts at the gradient, so that the vector's sign is the gradient's.
    """
    grad_fn = step.grad_fn(step.batch)

    def iteration(_, v):
        product = jax.jvp(grad_fn, (step.params,), (v,))[1]
        norm = optax.tree.norm(product)
        return jax.tree.map(lambda leaf: leaf / jnp.where(norm == 0, 1, norm), product)

    v = jax.lax.fori_loop(0, iterations, iteration, grad_fn(step.params))
    return {"grad_fn": grad_fn, "eigenvector": v}


@method(
    "X-SAM",
    gradients=lambda _, iterations, **__: 2 + 2 * iterations,
    arguments=with_eigenvector,
)
def x_sam(
    base: Base,
    rho: Rho = 0.25,
    alpha: Annotated[
        float, "Share α of the sharp gradient that is removed along the eigenvector."
    ] = 0.5,
    iterations: Annotated[
        int, "Power iterations for the eigenvector, at every step."
    ] = 5,
):
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations!r}.")
    return base.sharp(sam_optax.sam(rho), sam_optax.away_from_eigenvector(alpha))


def steepness(step: Step, rho, alpha):
    """GAM's gradients of the gradient's norm, and of the loss."""
    grad_fn = step.grad_fn(step.batch)
    ascent = jax.grad(lambda params: optax.tree.norm(grad_fn(params)))

    def sharp(params):
        parts = grad_fn(step.params), ascent(params)
        return jax.tree.map(lambda g, f: g + alpha * rho * f, *parts)

    return {"grad_fn": sharp, "ascent_grad_fn": ascent}


# Two of its gradients are products with the Hessian.
@method("GAM", gradients=5, arguments=steepness, weight_decay=5.56e-05)
def gam(
    base: Base,
    rho: Rho = 0.5,
    alpha: Annotated[float, "Weight α of the gradient norm's gradient."] = 1.0,
):
    return base.sharp(sam_optax.sam(rho))


def two_batches(step: Step, **_):
    return {
        "grad_fn": step.grad_fn(step.batch),
        "previous_grad_fn": step.grad_fn(step.previous),
    }


@method("SAMPa", arguments=two_batches, needs_previous=True, weight_decay=0.0015)
def sampa(
    base: Base,
    rho: Rho = 0.5,
    lmbda: Annotated[float, "Share λ of the gradient at the step ahead."] = 0.2,
):
    """On one device."""
    return sam_optax.simultaneous(base.tx, sam_optax.sam(rho), lmbda)


# With a base optimizer that the method prescribes.


def replaced(base: Base, make, lr):
    """The base with ``make`` of a learning rate as the optimizer, behind its weight decay."""
    decay = optax.add_decayed_weights(base.weight_decay)
    return base._replace(
        make=lambda rate: optax.chain(decay, make(rate)),
        learning_rate=lambda step: lr * base.learning_rate(step),
    )


@method("AdaSAM", weight_decay=0.0015)
def ada_sam(base: Base, rho: Rho = 0.5, lr: Rate = 0.03):
    """AMSGrad as the base optimizer."""
    return replaced(base, optax.amsgrad, lr).sharp(sam_optax.sam(rho))


@method("LightSAM")
def light_sam(base: Base, rho: Rho = 0.005, lr: Rate = 0.1):
    """AdaGrad, and ε divided by AdaGrad's accumulator of the ascent gradients."""

    def adagrad(rate):
        return optax.adagrad(rate, START_OF_SUM, eps=0.0)

    divided = optax.scale_by_rss(START_OF_SUM, 0.0)
    return replaced(base, adagrad, lr).sharp(optax.chain(divided, optax.scale(rho)))


def linearized_back(step: Step, **_):
    """The loss at w, from loss and gradient at w + ε."""

    def value_and_grad_fn(params):
        (value, aux), grads = step.value_and_grad_fn(params)
        eps = jax.tree.map(jnp.subtract, params, step.params)
        return (jnp.maximum(value - optax.tree.vdot(grads, eps), 0), aux), grads

    ascent = step.grad_fn(step.batch)
    return {"value_and_grad_fn": value_and_grad_fn, "ascent_grad_fn": ascent}


@method("SAM-Polyak", arguments=linearized_back, decays=False)
def sam_polyak(
    base: Base,
    rho: Rho = 0.25,
    largest: Annotated[float, "Largest learning rate γ_b."] = 0.3,
):
    """Polyak's step size, in place of the base optimizer."""
    polyak = base._replace(make=lambda _: optax.polyak_sgd(largest))
    return polyak.sharp(sam_optax.sam(rho))


# The weight decay is the prior's precision, and has to be a number.
@method("bSAM", decays=False)
def bsam(
    base: Base,
    rho: Rho = 0.08,
    lr: Rate = 1.0,
    beta1: Annotated[float, "Decay β₁ of the average of gradients."] = 0.9,
    beta2: Annotated[float, "Decay β₂ of the precision."] = 0.999,
):
    """Its descent divides by the precision of its perturbation."""
    prior = {"data_size": base.examples, "weight_decay": base.weight_decay}
    descent = optax.chain(
        optax.add_decayed_weights(base.weight_decay),
        optax.ema(beta1, debias=False),
        sam_optax.scale_by_precision(),
    )
    scale = optax.scale_by_learning_rate(lambda step: lr * base.learning_rate(step))
    perturbation = sam_optax.bsam(rho, **prior, decay=beta2, key=base.key)
    return base._replace(make=lambda _: scale).sharp(perturbation, descent)
