"""Trajectories of the public reference implementations, to 1e-9 in float64.

SGD with momentum and coupled weight decay on one seeded problem (a tanh MLP 5-7-7-3, softmax
cross-entropy), one batch a step. Each file holds the batches, the initial params and, for every
step, the displacement and the params after it.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import x64
from methods import make

import sam_optax

GOLDEN = Path(__file__).parent
LAYERS = ("fc1", "fc2", "fc3")
STEPS = 6


def read(name):
    """The file's arrays by key, and its hyperparameters as numbers by name."""
    with np.load(GOLDEN / f"{name}_mlp_0.npz") as file:
        data = dict(file)
    pairs = (entry.split("=") for entry in data.pop("hyper"))
    return data, {k: float(v) for k, v in pairs if k not in ("arch", "method")}


def tree(data, prefix, step=None):
    """One tree of the file, at one step."""
    pick = jnp.asarray if step is None else (lambda x: jnp.asarray(x[step]))
    return {
        layer: {leaf: pick(data[f"{prefix}/{layer}/{leaf}"]) for leaf in ("kernel", "bias")}
        for layer in LAYERS
    }


def network(params, x):
    for layer in LAYERS:
        x = x @ params[layer]["kernel"] + params[layer]["bias"]
        x = x if layer == LAYERS[-1] else jnp.tanh(x)
    return x


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(network(params, x), y).mean()


def sgd(hyper):
    return optax.chain(
        optax.add_decayed_weights(hyper["weight_decay"]),
        optax.sgd(hyper["lr"], momentum=hyper["momentum"]),
    )


def assert_within(actual, expected, tolerance=1e-9):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


# The method of each file, and which of the file's numbers are its options.
FILES = {
    "sgd": ("sam", []),
    "sam": ("sam", []),
    "asam": ("asam", ["eta"]),
    "fsam": ("fsam", ["sigma", "lmbda"]),
    "gsam": ("sam", []),
}


def method_of(name, hyper):
    method, options = FILES[name]
    rho = 0.0 if name == "sgd" else hyper["rho"]
    return make(method, rho, **{option: hyper[option] for option in options})


def descent_of(name, hyper):
    return sam_optax.surrogate_gap(hyper["alpha"]) if name == "gsam" else None


@pytest.mark.parametrize("name", FILES)
def test_trajectory(name):
    with x64():
        data, hyper = read(name)
        tx = sam_optax.sharpness_aware(
            sgd(hyper), method_of(name, hyper), descent=descent_of(name, hyper)
        )
        params = tree(data, "init")
        state = tx.init(params)

        @jax.jit
        def step(params, state, x, y):
            points = []

            def grad_fn(p):
                points.append(p)
                return jax.grad(loss)(p, x, y)

            # The clean gradient is evaluated here, so grad_fn sees the perturbed point alone.
            grads = jax.grad(loss)(params, x, y)
            updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
            (point,) = points
            eps = jax.tree.map(jnp.subtract, point, params)
            return optax.apply_updates(params, updates), state, eps

        for i in range(STEPS):
            params, state, eps = step(params, state, data["x"][i], data["y"][i])
            assert_within(params, tree(data, "params", i))
            if name == "sgd":
                assert_within(eps, jax.tree.map(jnp.zeros_like, params), 0.0)
            else:
                assert_within(eps, tree(data, "eps", i))
