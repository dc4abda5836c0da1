"""Fisher SAM: its limits and its numerics. (Whole runs: ``test_catalogue``.)"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
import references_family as ref
from helpers import assert_same, vector

import sam_optax

RHO, ETA = 0.3, 2.0


def step(method, g, **extra):
    return jax.jit(lambda g: method.update(g, method.init(g), g, **extra)[0])(g)


def tree(scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(scale * rng.normal(size=n), dtype) for k, n in (("a", 5), ("b", 2))}


def test_given_fisher_information():
    """In the combinator, and with part of the leaves."""
    g, f = tree(), jax.tree.map(jnp.abs, tree(3.0))
    method = sam_optax.fisher_sam(RHO, ETA)
    seen = []
    only_a = sam_optax.perturb_only(method, {"a": True, "b": False})
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), only_a)
    tx.update(g, tx.init(g), g, grad_fn=lambda p: seen.append(p) or p, fisher=f)
    moved = np.asarray(seen[0]["a"], np.float64) - np.asarray(g["a"], np.float64)
    ga, fa = np.asarray(g["a"], np.float64), np.asarray(f["a"], np.float64)
    np.testing.assert_allclose(moved, ref.fisher_step(ga, fa, RHO, ETA), atol=1e-6)
    assert_same(seen[0]["b"], g["b"])


def test_eta_0_is_sam_and_large_eta_is_relative():
    g = tree()
    np.testing.assert_allclose(
        vector(step(sam_optax.fisher_sam(RHO, 0.0), g)),
        vector(step(sam_optax.sam(RHO), g)),
        rtol=1e-6,
    )
    # F⁻¹g → 1/(η g): ε is the inverse of the gradient, of length ρ in the Fisher metric.
    eps = vector(step(sam_optax.fisher_sam(RHO, 1e8), g))
    np.testing.assert_allclose(eps, RHO / vector(g) / np.sqrt(1e8 * 7), rtol=1e-3)


def test_f_fisher_sam_takes_f_of_the_whole_gradient():
    """F-SAM's equation 51: ε from d, but f from g."""
    gs = [tree(1.0), tree(-0.5), jax.tree.map(jnp.flip, tree(2.0))]
    method = sam_optax.as_perturbation(
        optax.chain(sam_optax.remove_full_gradient(0.5, 0.6), sam_optax.fisher_sam(RHO, ETA))
    )
    state = method.init(gs[0])
    residuals = references.fsam_residuals([[vector(g)] for g in gs], 0.5, 0.6)
    for g, (d,) in zip(gs, residuals, strict=True):
        before = state
        point, state = method.perturb_fn(jax.tree.map(jnp.zeros_like, g), g, before)
        np.testing.assert_allclose(
            vector(point), ref.fisher_step(d, vector(g) ** 2, RHO, ETA), rtol=1e-4, atol=1e-6
        )
    assert np.abs(vector(point) - ref.fisher_step(d, d**2, RHO, ETA)).max() > 1e-3


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_float16(scale):
    g = tree(scale, jnp.float16)
    eps, inverse = vector(step(sam_optax.fisher_sam(RHO), g)), 1 + vector(g) ** 2
    assert np.sqrt(np.sum(inverse * eps**2)) == pytest.approx(RHO, rel=0.01)


def test_gradients_whose_squares_overflow():
    """T = 1/√(1 + g²) is 1/|g| where g² is beyond float32."""
    g = jnp.array([1e25, 2e25, -4e25])
    eps = vector(step(sam_optax.fisher_sam(RHO), g))
    np.testing.assert_allclose(eps * vector(g), RHO / np.sqrt(3) * np.ones(3), rtol=0.02)


def test_complex_and_other_leaves():
    g = {"z": jnp.array([3 + 4j, 0]), "n": None, "i": jnp.arange(2)}
    eps = step(sam_optax.fisher_sam(1.0), g)
    np.testing.assert_allclose(eps["z"], [(3 + 4j) / 26 / np.sqrt(25 / 26), 0], rtol=1e-5)
    assert_same(eps["i"], g["i"])
