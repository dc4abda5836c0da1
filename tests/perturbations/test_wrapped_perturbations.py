"""Any optax transformation is a perturbation, and optax's wrappers around ours work."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import assert_close, same
from methods import make, often

import sam_optax

PARAMS = {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.1, -0.2])}


def train(perturbation):
    """Params after three steps."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), perturbation)
    params, state = PARAMS, tx.init(PARAMS)
    for i in range(3):
        grad_fn = lambda p: jax.tree.map(lambda x: x + 0.1 * x**3 + 0.1 * i, p)  # noqa: B023
        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda m: optax.chain(optax.scale(7.0), m),
        lambda m: optax.apply_if_finite(m, 2),
        lambda m: optax.inject_hyperparams(lambda x: optax.chain(m, optax.scale(x)))(x=1.0),
        lambda m: optax.masked(m, True),
        lambda m: optax.multi_transform({"a": m}, "a"),
    ],
    ids=["chain", "if_finite", "inject", "masked", "multi_transform"],
)
@pytest.mark.parametrize("name", often(["asam", "fsam"], "asam"))
def test_wrapped_perturbations(name, wrapper):
    assert_close(train(wrapper(make(name))), train(make(name)), 1e-5)


def test_any_transformation_is_a_perturbation():
    """The hand-made one is SAM; it is added with its sign, so sgd descends."""
    by_hand = optax.chain(optax.contrib.normalize(), optax.scale(0.3))
    assert_close(train(by_hand), train(make("sam")), 1e-5)
    downhill = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))
    assert not same(train(downhill), train(make("sam")))


@pytest.mark.parametrize(
    "method", [sam_optax.sam, sam_optax.asam, pytest.param(sam_optax.fsam, marks=pytest.mark.slow)]
)
def test_inject_hyperparams_of_a_method_itself(method):
    """Without naming static arguments: numbers with a default, such as p, stay what they are."""
    assert_close(train(optax.inject_hyperparams(method)(rho=0.3)), train(method(rho=0.3)), 1e-6)
