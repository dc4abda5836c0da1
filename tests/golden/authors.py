"""Recorded steps of the authors' public code, in float64, and how far an expression is from them.

Each file in ``authors`` holds eight steps of one method on a tanh MLP 5-7-3 with biases, a batch of
16 per step, by base optimizer: ``sgd``, ``momentum`` (with coupled weight decay), ``nesterov`` and
``adamw``. The code was run as it is published, except for its data and devices; ``hyper`` names
repository, revision and file, and every hyperparameter. Leaves lie in one vector in the order of
``jax.tree``. A name before the base is a variant.
"""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from sam_optax._internal import noise

AUTHORS = Path(__file__).parent / "authors"
STEPS = 8


# ---- The problem and the recorded runs


def template(normalized):
    shapes = {"fc1": {"bias": 7, "kernel": (5, 7)}, "fc2": {"bias": 3, "kernel": (7, 3)}}
    shapes |= {"norm": {"bias": 7, "scale": 7}} if normalized else {}
    return jax.tree.map(np.zeros, shapes, is_leaf=lambda shape: not isinstance(shape, dict))


def unflatten(vector):
    return ravel_pytree(template(vector.shape[-1] > 66))[1](vector)


def network(p, x):
    h = x @ p["fc1"]["kernel"] + p["fc1"]["bias"]
    if "norm" in p:
        h = jax.nn.standardize(h, epsilon=1e-5) * p["norm"]["scale"] + p["norm"]["bias"]
    return jnp.tanh(h) @ p["fc2"]["kernel"] + p["fc2"]["bias"]


def losses_fn(p, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(network(p, x), y)


class Batch:
    """One step's batch, and the functions that a training loop makes of it."""

    def __init__(self, x, y, i):
        self.examples, self.i = (x[i], y[i].astype(jnp.int32)), i
        self.grad = jax.grad(self.loss)
        self.before = lambda: Batch(x, y, jnp.maximum(i - 1, 0))

    def loss(self, p):
        return losses_fn(p, self.examples).mean()

    def part(self, i, parts):
        """The gradient on one of several contiguous parts."""
        x, y = (a.reshape(parts, -1, *a.shape[1:])[i] for a in self.examples)
        return jax.grad(lambda p: losses_fn(p, (x, y)).mean())

    def weighted(self, weights):
        """The gradient of Σ wᵢ ℓᵢ / n, with a weight for each class."""
        return jax.grad(lambda p: (weights[self.examples[1]] * losses_fn(p, self.examples)).mean())

    def at(self, recorded):
        """The recorded array of this step."""
        return jnp.asarray(recorded)[self.i]


def parsed(value):
    try:
        return float(value)
    except ValueError:
        return {"True": True, "False": False}.get(value, value)


@functools.cache
def file(name):
    with np.load(AUTHORS / f"{name}.npz") as arrays:
        return dict(arrays)


def read(method, run):
    """Hyperparameters and recorded arrays, the params after each step, and the problem."""
    arrays = file(method)
    (index,) = np.flatnonzero(arrays["names"] == run)
    pairs = (line.split("=", 1) for line in str(arrays["hyper"][index]).splitlines())
    hyper = {name.removeprefix("base_"): parsed(value) for name, value in pairs}
    own = {key.split("/")[-1]: a for key, a in arrays.items() if key.startswith(f"{run}/")}
    problem = file(f"problem_{int(hyper['problem'])}")
    return SimpleNamespace(**{**arrays, **hyper, **own}), arrays["params"][index], problem


def torch_base(h, **changed):
    """``torch.optim``'s, with weight decay in the gradient for SGD."""
    h = SimpleNamespace(**{**vars(h), **changed})
    if h.base == "adamw":
        return optax.adamw(h.lr, weight_decay=h.weight_decay)
    sgd = optax.sgd(h.lr, getattr(h, "momentum", None), getattr(h, "nesterov", False))
    return optax.chain(optax.add_decayed_weights(getattr(h, "weight_decay", 0.0)), sgd)


def add(a, b, factor=1.0):
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def scaled(tree, factor):
    return jax.tree.map(lambda x: factor * x, tree)


def norm(tree):
    return jnp.linalg.norm(ravel_pytree(tree)[0])


LEAVES = {"fc1": {"bias": "a", "kernel": "b"}, "fc2": {"bias": "c", "kernel": "d"}}


def inject(monkeypatch, h):
    """Recorded draws in place of the generator's: a key counts steps, and parts of a step."""
    monkeypatch.setattr(noise, "first_key", lambda key: jnp.zeros(2, jnp.uint32))
    monkeypatch.setattr(noise, "next_key", lambda key: key + jnp.array([1, 0], jnp.uint32))

    def fold_in(key, index):
        return key if index is None else jnp.stack([key[0], jnp.asarray(index, jnp.uint32)])

    def normal(key, params, scale, draw=None):
        at = (key[0], key[1])[: h.z.ndim - 1]
        return scaled(unflatten(jnp.asarray(h.z)[at]), scale)

    def bits(key, tree, one_per_leaf):
        kept = jnp.asarray(h.leaf_mask)[key[0]]
        words = [jnp.where(keep, 0, 2**32 - 1).astype(jnp.uint32) for keep in kept]
        return jax.tree.unflatten(jax.tree.structure(tree), words)

    monkeypatch.setattr(noise, "fold_in", fold_in)
    monkeypatch.setattr(noise, "normal_tree", normal)
    monkeypatch.setattr(noise, "bits_tree", bits)


def distance(monkeypatch, method, run, expression, **changed):
    """The largest distance of the params from the recorded ones, over all steps.

    ``expression(h, base)`` is an optimizer, or one and the arguments of its update, a function of
    the batch and the params. Without these, ``grad_fn`` is the only one.
    """
    h, points, problem = read(method, run)
    h = SimpleNamespace(**{**vars(h), **changed})
    made = expression(h, torch_base(h))
    default = lambda b, params: {"grad_fn": b.grad}
    tx, given = (made, default) if hasattr(made, "init") else made
    if hasattr(h, "z") or hasattr(h, "leaf_mask"):
        inject(monkeypatch, h)
    x, y = jnp.asarray(problem["x"]), jnp.asarray(problem["y"])

    @jax.jit
    def step(params, state, i):
        arguments = dict(given(Batch(x, y, i), params))
        updates, state = tx.update(arguments.pop("grads", None), state, params, **arguments)
        return optax.apply_updates(params, updates), state

    params = unflatten(jnp.asarray(problem["init"]))
    state, found = tx.init(params), []
    for i in range(STEPS):
        params, state = step(params, state, i)
        found.append(np.max(np.abs(ravel_pytree(params)[0] - points[i])))
    return np.max(found)


# Most codes add 1e-12 or less to a norm: that moves the params by less than 1e-11 here. Others:
TOLERANCE = {
    "vasso": 1e-7,  # 1e-7 is added to ‖d‖
    "esam": 3e-7,  # 1e-7 to ‖g‖
    "sparsesam": 1e-7,  # 1e-7 to ‖g‖
    "looksam": 1e-6,  # 1e-8 to the ‖g_v‖ of each leaf, the smallest of which is about 1e-2
    # Here γ is a float32 number, which is off by up to 6e-8 of its size.
    "lpfsgd_m4": 2e-9,
    "rwp": 2e-9,
    "tsam": 1e-9,  # the length of a uniform draw is r U^1e-8 in the code
}
