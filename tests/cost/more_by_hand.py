"""Further hand-written methods, with the hyperparameters that their library steps get here."""

import jax
import jax.numpy as jnp

from sam_optax.experiments.cost.handwritten import along, guarded_norm

FRACTION = 0.125


def fisher_sam(at, rho=0.05, eta=1.0):
    value, grads = at.ascent(at.params)
    scales = jax.tree.map(lambda g: jax.lax.rsqrt(1 + eta * g**2), grads)
    products = jax.tree.map(jnp.multiply, scales, grads)
    scale = rho / guarded_norm(products)
    perturbed = jax.tree.map(lambda w, t, tg: w + scale * t * tg, at.params, scales, products)
    return value, at.sharp(perturbed), ()


def gsam(at, rho=0.05, alpha=0.4):
    """g_s − α g_⊥ with g_⊥ = g − ⟨g, g_s⟩/‖g_s‖² g_s."""
    value, grads = at.ascent(at.params)
    sharp = at.sharp(along(at.params, grads, rho))
    products = jax.tree.map(lambda g, s: jnp.sum(g * s), grads, sharp)
    share = jax.tree.reduce(jnp.add, products) / guarded_norm(sharp) ** 2
    return value, jax.tree.map(lambda g, s: s - alpha * (g - share * s), grads, sharp), ()


def part(at, rho=0.05, fraction=FRACTION):
    _, grads = at.ascent(at.params, round(1 / fraction))
    return None, at.sharp(along(at.params, grads, rho)), ()


def every(at, rho=0.05, k=2):
    value, grads = at.ascent(at.params)
    sharp = lambda: at.sharp(along(at.params, grads, rho))
    return value, jax.lax.cond(at.state % k == 0, sharp, lambda: grads), at.state + 1


def info(at, rho=0.5):
    """SAM, with the norms and the cosine that its state keeps."""
    value, grads = at.ascent(at.params)
    perturbed = along(at.params, grads, rho)
    distance = guarded_norm(jax.tree.map(jnp.subtract, perturbed, at.params))
    sharp = at.sharp(perturbed)
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


def rsam(at, rho=0.05, gamma=0.1, lmbda=2.0):
    """With the noise drawn by ``jax.random.normal``: R-SAM as it is usually written."""

    def draw(w, key):
        axes = tuple(range(w.ndim - 1)) if w.ndim > 1 else None
        rms = jnp.sqrt(jnp.mean(jnp.square(w), axis=axes, keepdims=True))
        return gamma * rms * jax.random.normal(key, w.shape, w.dtype)

    key, noise_key = jax.random.split(at.state)
    leaves, structure = jax.tree.flatten(at.params)
    keys = jax.tree.unflatten(structure, list(jax.random.split(noise_key, len(leaves))))
    delta = jax.tree.map(draw, at.params, keys)
    _, grads = at.ascent(jax.tree.map(jnp.add, at.params, delta))
    by_delta, by_grads = 1 / guarded_norm(delta), lmbda / guarded_norm(grads)
    direction = jax.tree.map(lambda d, g: by_delta * d + by_grads * g, delta, grads)
    return None, at.sharp(along(at.params, direction, rho)), key


MORE = {of.__name__: of for of in (fisher_sam, gsam, part, every, info, rsam)}
STARTS = {
    "every": lambda params: jnp.zeros((), jnp.int32),
    "info": lambda params: (jnp.zeros(()),) * 4,
    "rsam": lambda params: jax.random.key(0),
}
LIBRARY = {  # what the library's steps get, so that both take the same step
    "fisher_sam": {"rho": 0.05, "eta": 1.0},
    "gsam": {"rho_max": 0.05, "rho_min": 0.05, "alpha": 0.4},
    "part": {"rho": 0.05, "fraction": FRACTION},
    "every": {"rho": 0.05, "k": 2},
    "rsam": {"rho": 0.05, "gamma": 0.1, "lmbda": 2.0},
}
