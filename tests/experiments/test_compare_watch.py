"""What ``compare --out`` follows of a step: numbers of a step that is not taken."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sam_optax
from sam_optax.experiments.family import METHODS
from sam_optax.experiments.methods import Base, Step

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (20, 3))
Y = jax.random.randint(jax.random.key(2), (20,), 0, 2)
PARAMS = {"kernel": jnp.array([[0.5, -1.0], [1.0, 0.3], [-0.2, 0.1]]), "bias": jnp.zeros(2)}
BASE = Base(optax.sgd(0.5, momentum=0.9), optax.constant_schedule(0.5))


def losses_fn(params, batch):
    logits = batch[0] @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])


STEP = Step(losses_fn, PARAMS, (X[:10], Y[:10]), KEY, (X, Y))


def look(name, **hyperparameters):
    variant = METHODS[name].variant(**hyperparameters)
    state = variant.transformation(BASE, KEY).init(PARAMS)
    return variant.look(BASE, KEY, state, STEP)


def test_sam_in_numbers():
    seen = look("sam", rho=0.3)
    grad = jax.grad(lambda p: losses_fn(p, STEP.batch).mean())
    sam = sam_optax.sam(0.3)
    point, _ = sam.perturb_fn(PARAMS, grad(PARAMS), sam.init(PARAMS))
    g, sharp = (jax.flatten_util.ravel_pytree(grad(p))[0] for p in (PARAMS, point))
    assert float(seen.eps_norm) == pytest.approx(0.3, rel=1e-5)
    norm = jnp.linalg.norm
    np.testing.assert_allclose(seen.cosine, g @ sharp / norm(g) / norm(sharp), rtol=1e-5)
    rise = losses_fn(point, STEP.batch).mean() - losses_fn(PARAMS, STEP.batch).mean()
    np.testing.assert_allclose(seen.loss_rise, rise, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sgd"])
def test_every_method_can_be_watched(name):
    seen = jax.eval_shape(lambda: look(name))
    assert {leaf.shape for leaf in seen} == {()}


def test_the_base_optimizer_has_nothing_to_show():
    variant = METHODS["sgd"].variant()
    assert variant.look(BASE, KEY, variant.transformation(BASE, KEY).init(PARAMS), STEP) is None
