"""The base optimizer of a run, and the method around it."""

import jax
import optax

from sam_optax.experiments.methods import Base, Variant
from sam_optax.experiments.papers.options import SUPPORTED
from sam_optax.experiments.papers.plan import Plan
from sam_optax.experiments.papers.settings import Settings


def schedule(settings: Settings, plan: Plan) -> optax.Schedule:
    """The learning rate: a linear rise from 0, then a cosine to 0 or a constant."""
    lr, warmup = settings["lr"], plan.warmup_steps
    rest: optax.Schedule = optax.constant_schedule(lr)
    if settings["schedule"] == "cosine":
        rest = optax.cosine_decay_schedule(lr, max(1, plan.steps - warmup))
    if not warmup:
        return rest
    return optax.join_schedules([optax.linear_schedule(0.0, lr, warmup), rest], [warmup])


def base(settings: Settings, plan: Plan) -> Base:
    """The base optimizer: SGD with coupled weight decay, or AdamW; clipping before either.

    What is clipped is the gradient that the update is made of, the sharp one.
    """
    rate = schedule(settings, plan)
    pieces = []
    if settings["clip"]:
        pieces.append(optax.clip_by_global_norm(settings["clip"]))
    if settings["optimizer"] == "adamw":
        decay = settings["weight_decay"]
        pieces.append(optax.adamw(rate, b1=settings["momentum"], weight_decay=decay))
    else:
        pieces.append(optax.add_decayed_weights(settings["weight_decay"]))
        momentum, nesterov = settings["momentum"], settings["nesterov"]
        pieces.append(optax.sgd(rate, momentum=momentum or None, nesterov=nesterov))
    return Base(optax.chain(*pieces), rate, groups=plan.groups if plan.groups > 1 else None)


def make(settings: Settings, plan: Plan, key: jax.Array) -> optax.GradientTransformation:
    """The whole optimizer."""
    inner = base(settings, plan)
    if settings["method"] == "sgd":  # the base optimizer itself, whichever it is
        return inner.tx
    variant = Variant(SUPPORTED[settings["method"]], settings.hyperparameters)
    return variant.transformation(inner, key)
