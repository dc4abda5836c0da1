"""Further hand-written methods, with the hyperparameters that their library steps get here."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from sam_optax.experiments.cost import steps
from sam_optax.experiments.cost.steps import Step, along, guarded_norm

FRACTION = 0.125


def fisher_sam(at, rho=0.05, eta=1.0):
    value, grads = at.value_and_grad(at.params)
    scales = jax.tree.map(lambda g: jax.lax.rsqrt(1 + eta * g**2), grads)
    products = jax.tree.map(jnp.multiply, scales, grads)
    scale = rho / guarded_norm(products)
    perturbed = jax.tree.map(lambda w, t, tg: w + scale * t * tg, at.params, scales, products)
    return value, at.value_and_grad(perturbed)[1], ()


def gsam(at, rho=0.05, alpha=0.4):
    """g_s − α g_⊥ with g_⊥ = g − ⟨g, g_s⟩/‖g_s‖² g_s."""
    value, grads = at.value_and_grad(at.params)
    sharp = at.value_and_grad(along(at.params, grads, rho))[1]
    products = jax.tree.map(lambda g, s: jnp.sum(g * s), grads, sharp)
    share = jax.tree.reduce(jnp.add, products) / guarded_norm(sharp) ** 2
    return value, jax.tree.map(lambda g, s: s - alpha * (g - share * s), grads, sharp), ()


def part(at, rho=0.05, fraction=FRACTION):
    few = jax.tree.map(lambda leaf: leaf[:: round(1 / fraction)], at.batch)
    _, grads = at.value_and_grad(at.params, few)
    return None, at.value_and_grad(along(at.params, grads, rho))[1], ()


def every(at, rho=0.05, k=2):
    value, grads = at.value_and_grad(at.params)
    sharp = lambda: at.value_and_grad(along(at.params, grads, rho))[1]
    return value, jax.lax.cond(at.state % k == 0, sharp, lambda: grads), at.state + 1


def info(at, rho=0.5):
    """SAM, with the norms and the cosine that its state keeps."""
    value, grads = at.value_and_grad(at.params)
    perturbed = along(at.params, grads, rho)
    distance = guarded_norm(jax.tree.map(jnp.subtract, perturbed, at.params))
    sharp = at.value_and_grad(perturbed)[1]
    mean_grads, mean_sharp = at.mean(grads), at.mean(sharp)
    products = jax.tree.map(lambda g, s: jnp.sum(g * s), mean_grads, mean_sharp)
    norms = guarded_norm(mean_grads), guarded_norm(mean_sharp), distance
    return value, sharp, (*norms, jax.tree.reduce(jnp.add, products) / (norms[0] * norms[1]))


def skipping(step):
    """A step that leaves everything as it was if an updated param is not finite."""

    def skips(params, state, batch):
        new_params, new_state, value = step.step(params, state, batch)
        ok = jnp.isfinite(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(new_params)))
        keep = lambda new, old: jnp.where(ok, new, old)
        kept = jax.tree.map(keep, (new_params, new_state), (params, state))
        return *kept, value

    return step._replace(step=skips)


def momentum(at, rho=0.05):
    """The gradient at w + ρ m/‖m‖, with SGD's momentum m."""
    kept = optax.tree.get(at.base_state, "trace")
    return *at.value_and_grad(along(at.params, kept, rho)), ()


def contrib(losses):
    """The step of ``optax.contrib.sam``, as its documentation has it."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
    base = optax.sgd(1e-3, momentum=0.9)
    tx = optax.contrib.sam(base, adversary, sync_period=2, opaque_mode=True)

    def step(params, state, batch):
        loss = lambda w: jnp.mean(losses(w, batch))
        value, grads = jax.value_and_grad(loss)(params)
        grad_fn = lambda w, _: jax.grad(loss)(w)
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)


NO_STATE = lambda params: ()
METHODS = steps.BY_HAND | {
    "fisher_sam": (fisher_sam, NO_STATE),
    "gsam": (gsam, NO_STATE),
    "part": (part, NO_STATE),
    "momentum": (momentum, NO_STATE),
    "every": (every, lambda params: jnp.zeros((), jnp.int32)),
    "info": (info, lambda params: (jnp.zeros(()),) * 4),
}
LIBRARY = {  # what the library's steps get, so that both take the same step
    "fisher_sam": {"rho": 0.05, "eta": 1.0},
    "gsam": {"rho_max": 0.05, "rho_min": 0.05, "alpha": 0.4},
    "part": {"rho": 0.05, "fraction": FRACTION},
    "momentum": {"rho": 0.05},
    "every": {"rho": 0.05, "k": 2},
}


def by_hand(name, losses, base, axis=None, **changes):
    """The hand-written step of a method, with the hyperparameters of the library's."""
    if name in steps.BY_HAND:
        changes = steps.variant(name, **changes).hyperparameters
    return steps.by_hand(METHODS[name], losses, base, axis, **changes)
