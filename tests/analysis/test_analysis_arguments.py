"""What every measure takes: trees, seeds as keys, and the byte orders that files have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same, same

import sam_optax
from sam_optax import analysis

W = {"a": np.array([[1.0, 2.0], [3.0, 4.0]])}
RHOS = np.array([0.0, 0.5])


def swapped(array):
    return array.astype(array.dtype.newbyteorder())


def losses(w, x):
    return x * w.get("n", 2) * jnp.sum(w["a"] ** 3)


def loss(w):
    return losses(w, 1.0)


DATA = analysis.DatasetLoss.from_examples(losses, jnp.arange(4.0), 2)
MEASURES = {
    "value": lambda w, rhos: DATA(w),
    "gradient": lambda w, rhos: DATA.value_and_grad(w),
    "product": lambda w, rhos: DATA.hvp(w, w),
    "hessian_eigenvalues": lambda w, rhos: analysis.hessian_eigenvalues(loss, w, 1)[:3],
    "lanczos": lambda w, rhos: analysis.hessian_eigenvalues(loss, w, 1, steps=1)[:2],
    "spectral_density": lambda w, rhos: analysis.spectral_density(loss, w)[:4],
    "sharpness": lambda w, rhos: analysis.sharpness(loss, w, steps=2)[:5],
    "adaptive_sharpness": lambda w, rhos: analysis.adaptive_sharpness(loss, w, steps=2)[:5],
    "loss_rise": lambda w, rhos: analysis.loss_rise(loss, w, sam_optax.sam()),
    "loss_line": lambda w, rhos: analysis.loss_line(loss, w, w, rhos),
    "loss_plane": lambda w, rhos: analysis.loss_plane(loss, w, w, w, rhos, rhos),
    "gradient_stability": lambda w, rhos: analysis.gradient_stability(loss, w, rhos, rhos, draws=1),
    "alignment": lambda w, rhos: analysis.alignment(DATA, w, estimate=w),
    "random_direction": lambda w, rhos: analysis.random_direction(w, 0),
    "filter_normalized": lambda w, rhos: analysis.filter_normalized(w, w),
    "between": lambda w, rhos: analysis.between(w, jax.tree.map(lambda a: a[::-1], w)),
}


@pytest.mark.parametrize("name", MEASURES)
def test_byte_order_of_params(name):
    measure = MEASURES[name]
    other = jax.tree.map(swapped, W)
    assert_close(measure(other, swapped(RHOS)), measure(W, RHOS), rtol=0, atol=0)


# A vector of a product, and a difference, have no such leaves.
@pytest.mark.parametrize("name", [n for n in MEASURES if n not in ("product", "between")])
def test_leaves_that_are_no_weights_are_constants(name):
    """Their place in a direction is ``None``."""
    mixed = {**W, "n": jnp.array(2), "none": None}
    assert_close(MEASURES[name](mixed, RHOS), MEASURES[name](W, RHOS), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f8", "i4"])
def test_byte_order_of_data(dtype):
    """Also the shorter last batch, under jit, and in batches of another size."""
    examples, weights = np.arange(10).astype(dtype), np.array([1, 2, 3], dtype)

    def values(examples, weights):
        found = analysis.DatasetLoss.from_examples(losses, examples[::2], 2)
        batches = examples[:8].reshape(2, 4)
        weighted = analysis.DatasetLoss(losses, batches, weights=weights, remainder=examples[8:])
        every = found, found.rebatch(3), weighted
        return [jax.jit(lambda f: f({"a": jnp.ones(2)}))(f) for f in every]

    assert values(swapped(examples), swapped(weights)) == values(examples, weights)


def mixing(w):
    """With a Hessian that is not diagonal."""
    return jnp.sum(jnp.sin(w["a"] @ w["a"]))


@pytest.mark.parametrize(
    "measure",
    [
        lambda key: analysis.sharpness(loss, W, 0.1, restarts=2, steps=2, key=key),
        lambda key: analysis.gradient_stability(loss, W, [0.1], [0.1], draws=2, key=key),
        lambda key: analysis.random_direction(W, key=key),
        lambda key: analysis.spectral_density(mixing, W, steps=1, probes=2, key=key).nodes,
    ],
)
def test_a_seed_is_the_key_of_that_seed(measure):
    assert_same(measure(5), measure(jax.random.key(5)))
    assert not same(measure(5), measure(6))
    for wrong in (True, 3.5):
        with pytest.raises(TypeError, match=rf"key must be an integer seed or one PRNG.*{wrong}"):
            measure(wrong)
