"""SAM-noise against its formula, its limits and its numerics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from family import BASE, CENTRES, LR, MOMENTUM, START, as_tree, gap, numpy_gradients, run
from helpers import assert_same, norm, vector

import sam_optax

RHO = 0.3
FULL = CENTRES[::-1].copy()  # a direction for each step


def noise():
    return optax.chain(sam_optax.project_out(), sam_optax.sam(RHO))


def reference(gradient_of):
    return ref.train(START, numpy_gradients(), gradient_of, LR, MOMENTUM)


@jax.jit
def apply(g, full):
    return sam_optax.project_out().update(g, (), full_grads=full)[0]


def test_is_the_formula():
    full_grads = lambda p, t: {
        "full_grads": jax.tree.map(lambda *x: jnp.stack(x)[t], *map(as_tree, FULL))
    }
    points, _ = run(sam_optax.sharpness_aware(BASE, noise()), extra=full_grads)
    assert gap(points, reference(ref.sam_noise(RHO, FULL))) < 1e-12

    def leaf_by_leaf(t, w, grad):
        g = grad(w)
        parts = [a - ref.project(a, b) for a, b in ((g[:6], FULL[t][:6]), (g[6:], FULL[t][6:]))]
        return grad(w + RHO * ref.unit(np.concatenate(parts)))

    for wrong in (leaf_by_leaf, ref.sam(RHO)):
        assert gap(points, reference(wrong)) > 1e-3


@pytest.mark.parametrize(("dtype", "factor"), [(jnp.float32, -0.7), (jnp.float16, 1e3)])
def test_rounding_of_parallel_gradients_is_not_blown_up(dtype, factor):
    full = as_tree(START, jnp.float32)
    g = jax.tree.map(lambda x: (factor * x).astype(dtype), full)
    full = jax.tree.map(lambda x: x.astype(dtype), full)
    rest = apply(g, full)
    assert all(x.dtype == dtype for x in jax.tree.leaves(rest))
    assert norm(rest) == 0


def test_zero_gradients():
    zero, g = as_tree(np.zeros(9), jnp.float32), as_tree(START, jnp.float32)
    assert_same(apply(g, zero), g)
    assert norm(apply(zero, g)) == 0
    assert norm(apply(zero, zero)) == 0


@pytest.mark.parametrize("scale", [1e-37, 1e37])
def test_whole_range_of_bfloat16(scale):
    g = scale * np.array([2.0, 1.0])
    rest = vector(apply(jnp.asarray(g, jnp.bfloat16), jnp.asarray([scale, 0], jnp.bfloat16)))
    np.testing.assert_allclose(rest / scale, [0, 1], atol=0.02)


def test_other_leaves():
    g = {"z": jnp.array([1 + 1j]), "w": jnp.array([1.0]), "n": None, "i": jnp.arange(2)}
    full = {**g, "z": jnp.array([2 + 0j]), "w": jnp.array([0.0])}
    rest = apply(g, full)
    # As real vectors: (1, 1) without its projection on (2, 0).
    np.testing.assert_allclose(rest["z"], [1j], atol=1e-6)
    np.testing.assert_allclose(rest["w"], [1.0])
    assert_same(rest["i"], g["i"])


def test_along_the_momentum_of_part_of_the_network():
    """Also inside a momentum start, the full gradient is that of the chosen leaves."""
    along = sam_optax.perturb_only(sam_optax.momentum_start(noise(), 0.0), {"a": True, "b": False})
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), along)
    w = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    full, seen = {"a": jnp.array([1.0, 0.0]), "b": jnp.ones(1)}, []
    state = tx.init(w)

    def grad_fn(p):
        seen.append(p)
        return {"a": jnp.array([3.0, 4.0]), "b": jnp.ones(1)}

    for _ in range(2):
        _, state = tx.update(None, state, w, grad_fn=grad_fn, full_grads=full)
    np.testing.assert_allclose(seen[1]["a"], [0, RHO], atol=1e-6)
    assert_same(seen[1]["b"], w["b"])


def test_it_needs_the_full_gradient():
    with pytest.raises(ValueError, match=r"project_out needs the full gradient.*full_grads="):
        sam_optax.project_out().update(jnp.ones(2), ())
