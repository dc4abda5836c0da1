"""Small networks with data, for the tests of the measures."""

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax import analysis


def relu_net(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {
        "first": {"kernel": jnp.asarray(rng.normal(size=(4, 5)), dtype)},
        "second": {
            "kernel": jnp.asarray(rng.normal(size=(5, 3)), dtype),
            "bias": jnp.asarray(rng.normal(size=3), dtype),
        },
    }


def rescale(params, unit, a):
    """What comes into a hidden unit times a, what goes out of it divided by a: same function."""
    first, second = params["first"]["kernel"], params["second"]["kernel"]
    return {
        "first": {"kernel": first.at[:, unit].multiply(a)},
        "second": params["second"] | {"kernel": second.at[unit].divide(a)},
    }


def examples(n=20, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(n, 4)), dtype), jnp.asarray(rng.integers(3, size=n))


def cross_entropy(logits, y):
    """Of each example."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)[:, 0]


def example_losses(params, batch, activation=jax.nn.relu):
    x, y = batch
    hidden = activation(x @ params["first"]["kernel"])
    return cross_entropy(hidden @ params["second"]["kernel"] + params["second"]["bias"], y)


def tanh_losses(params, batch):
    """As above, of a smooth network."""
    return example_losses(params, batch, jnp.tanh)


def dataset(n=20, batch_size=5, losses=example_losses, dtype=jnp.float32):
    return analysis.DatasetLoss.from_examples(losses, examples(n, dtype), batch_size)


def quadratic(eigenvalues):
    """½ Σ λ_i w_i², as a function of one vector."""
    return lambda w: _half_square(w, jnp.asarray(eigenvalues))


def _half_square(w, eigenvalues):
    return 0.5 * jnp.sum(eigenvalues.astype(w.dtype) * w**2, axis=-1)


def with_spectrum(eigenvalues):
    """The same as a data set, so that programs for one spectrum serve all of its length."""
    eigenvalues = jnp.asarray(np.asarray(eigenvalues, np.float32))
    return analysis.DatasetLoss(_half_square, None, remainder=eigenvalues[None])
