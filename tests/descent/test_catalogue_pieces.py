"""Stable SAM's, X-SAM's and XSAM's descents: limits and arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RuntimeCounted, assert_same, vector

import sam_optax

W = {"a": jnp.array([1.0, 0.1]), "b": jnp.array([0.5])}
SCALES = {"a": jnp.array([1.0, 20.0]), "b": jnp.array([3.0])}
SAM = sam_optax.sam(1.0)


def loss(w):
    return 0.5 * sum(jnp.sum(SCALES[name] * w[name] ** 2) for name in w)


gradient = jax.grad(loss)
PIECES = {
    "match_ascent_norm": (sam_optax.match_ascent_norm, {}),
    "away_from_eigenvector": (
        lambda: sam_optax.away_from_eigenvector(0.3),
        {"eigenvector": {"a": jnp.array([0.0, 1.0]), "b": jnp.zeros(1)}},
    ),
    "toward_maximum": (lambda: sam_optax.toward_maximum(1.0, 2), {"value_fn": loss}),
}


def sharp(descent, perturbation=SAM):
    return sam_optax.sharpness_aware(optax.identity(), perturbation, descent=descent)


def update(name, perturbation=SAM, **changed):
    make, arguments = PIECES[name]
    tx = sharp(make(), perturbation)
    return tx.update(None, tx.init(W), W, grad_fn=gradient, **{**arguments, **changed})


@pytest.mark.parametrize("name", ["match_ascent_norm", "toward_maximum"])
def test_at_radius_0_nothing_changes(name):
    np.testing.assert_allclose(
        vector(update(name, sam_optax.sam(0.0))[0]), vector(gradient(W)), rtol=1e-6
    )


def test_the_search_is_made_every_so_many_steps():
    counted = RuntimeCounted(loss)
    tx = sharp(sam_optax.toward_maximum(1.0, 2, candidates=5))
    step = jax.jit(lambda s: tx.update(None, s, W, grad_fn=gradient, value_fn=counted)[1])
    state, evaluations = tx.init(W), []
    for _ in range(4):
        state = step(state)
        jax.effects_barrier()
        evaluations.append(counted.evaluations)
    assert evaluations == [5, 5, 10, 10]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sam_optax.away_from_eigenvector(-1.0), "alpha must be"),
        (lambda: sam_optax.toward_maximum(0.0), "rho must be"),
        (lambda: sam_optax.toward_maximum(1.0, 0), "every must be"),
        (lambda: sam_optax.toward_maximum(1.0, largest=0.0), "largest must be"),
        (lambda: sam_optax.toward_maximum(1.0, candidates=1), "candidates must be"),
        (lambda: update("toward_maximum", value_fn=None), "toward_maximum needs the loss"),
        (lambda: update("away_from_eigenvector", eigenvector=None), "needs a unit eigenvector"),
        (
            lambda: update("away_from_eigenvector", eigenvector={"a": jnp.ones(2)}),
            "eigenvector must have the structure",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_scale_by_precision_finds_the_precision_of_a_scheduled_bsam():
    """Its state lies inside a ``ScheduleState`` then."""
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    make = lambda rho: sam_optax.bsam(rho, data_size=100, weight_decay=1e-3, key=0)

    def updates(perturbation):
        tx = sam_optax.sharpness_aware(
            optax.sgd(0.1), perturbation, descent=sam_optax.scale_by_precision()
        )
        return tx.update(None, tx.init(params), params, grad_fn=lambda p: p)[0]

    assert_same(updates(make(optax.constant_schedule(0.1))), updates(make(0.1)))
    with pytest.raises(ValueError, match="learns the precision of some"):
        updates(sam_optax.perturb_only(make(0.1), {"a": True, "b": False}))
