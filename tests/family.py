"""One small problem, as JAX and as NumPy sees it, for the methods of the wider family."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import precision, vector
from jax.flatten_util import ravel_pytree

LR, MOMENTUM = 0.05, 0.9
STEPS = 7
SIZE = 9
_rng = np.random.default_rng(0)
_root = _rng.normal(size=(SIZE, SIZE))
MATRIX = _root @ _root.T / SIZE + 0.2 * np.eye(SIZE)  # couples the leaves
CENTRES = _rng.normal(size=(STEPS, SIZE))
START = _rng.normal(size=SIZE)
BASE = optax.sgd(LR, momentum=MOMENTUM)


def numpy_gradients():
    """The gradient of each step's batch, as functions of one vector."""
    return [lambda w, c=c: MATRIX @ w + 0.3 * w**3 - c for c in CENTRES]


def as_tree(flat, dtype=jnp.float64):
    """The vector cut into two leaves."""
    flat = np.asarray(flat)
    return {"a": jnp.asarray(flat[:6].reshape(2, 3), dtype), "b": jnp.asarray(flat[6:], dtype)}


def gradient(params, t):
    """The same as a function of the tree and of the step."""
    flat, unravel = ravel_pytree(params)
    centre = jnp.asarray(CENTRES, flat.dtype)[t]
    return unravel(jnp.asarray(MATRIX, flat.dtype) @ flat + 0.3 * flat**3 - centre)


def run(tx, steps=STEPS, dtype=jnp.float64, extra=lambda params, t: {}, given=False):
    """Params (as one vector) and optimizer state after each step, in one compiled step."""
    with precision(dtype):

        @jax.jit
        def step(params, state, t):
            grad_fn = lambda p: gradient(p, t)
            grads = grad_fn(params) if given else None
            updates, state = tx.update(grads, state, params, grad_fn=grad_fn, **extra(params, t))
            return optax.apply_updates(params, updates), state

        params = as_tree(START, dtype)
        state, points, states = tx.init(params), [], []
        for t in range(steps):
            params, state = step(params, state, jnp.asarray(t, jnp.int32))
            points.append(vector(params))
            states.append(state)
        return points, states


def plain(base=BASE, steps=STEPS, dtype=jnp.float64):
    """The base optimizer's own params after each step."""
    with precision(dtype):

        @jax.jit
        def step(params, state, t):
            updates, state = base.update(gradient(params, t), state, params)
            return optax.apply_updates(params, updates), state

        params, points = as_tree(START, dtype), []
        state = base.init(params)
        for t in range(steps):
            params, state = step(params, state, jnp.asarray(t, jnp.int32))
            points.append(vector(params))
        return points


def gap(points, expected):
    """The largest distance between two trajectories."""
    pairs = zip(points, expected, strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)
