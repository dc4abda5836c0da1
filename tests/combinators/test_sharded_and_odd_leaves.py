"""Sharded arrays, and leaves that are not floating-point arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, norm
from jax.sharding import NamedSharding, PartitionSpec
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)

# A norm over shards.


@pytest.mark.parametrize("name", ["sam", "fsam"])
def test_sharded_gradient(name):
    mesh = jax.make_mesh((2,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    g = jax.device_put(jnp.array([3.0, 4.0]), sharding)
    method = make(name, 0.1)
    eps = jax.jit(lambda g: method.update(g, method.init(g))[0])(g)
    np.testing.assert_allclose(eps, [0.06, 0.08], rtol=1e-6)
    assert eps.sharding.is_equivalent_to(sharding, 1)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("sam")
def test_sharding_changes_nothing(name):
    mesh = jax.make_mesh((2,), ("data",))
    rng = np.random.default_rng(0)
    w, g = (
        {
            "kernel": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32),
            "conv": jnp.asarray(rng.normal(size=(2, 2, 2)), jnp.float32),
        }
        for _ in range(2)
    )
    method = make(name, 0.1)
    step = jax.jit(lambda w, g: method.perturb_fn(w, g, method.init(w))[0])
    expected = step(w, g)
    for spec in (PartitionSpec("data"), PartitionSpec(None, "data")):
        sharded = jax.device_put((w, g), NamedSharding(mesh, spec))
        assert_close(step(*sharded), expected, 1e-6)


# Leaves that are no floating-point arrays.


@pytest.mark.parametrize("name", ["asam", "rsam"])
@pytest.mark.slow
def test_equinox_module(name):
    model = eqx.nn.MLP(2, 1, 3, 1, key=KEY)  # holds activation functions
    x = jnp.array([[0.3, -1.0], [1.0, 2.0]])

    @eqx.filter_grad
    def grad_fn(model):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = sam_optax.sharpness_aware(optax.adam(0.1), make(name, 0.1))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(
            None, state, params, grad_fn=lambda p: grad_fn(eqx.combine(p, static))
        )
        return optax.apply_updates(params, updates), state

    before = params
    for _ in range(2):
        params, state = step(params, state)
    assert jax.tree.structure(params) == jax.tree.structure(before)
    assert np.isfinite(norm(params))
    assert norm(jax.tree.map(jnp.subtract, params, before)) > 0


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("gradient_of_n", ["float0", "none", "zeros"])
@pytest.mark.slow
def test_integer_leaf(name, gradient_of_n):
    params = {"w": jnp.array([3.0, 4.0]), "n": jnp.array([1, 2], jnp.int32)}

    def grad_fn(p):
        assert p["n"].dtype == jnp.int32
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2) * p["n"][0], allow_int=True)(p)
        if gradient_of_n == "none":
            grads["n"] = None
        if gradient_of_n == "zeros":
            grads["n"] = jnp.zeros_like(p["n"])
        return grads

    method = make(name, 0.1)
    state = method.init(params)
    perturbed, _ = method.perturb_fn(params, grad_fn(params), state)
    assert_same(perturbed["n"], params["n"])
    assert norm(perturbed["w"] - params["w"]) > 0
    frozen = optax.multi_transform(
        {"w": optax.sgd(0.1), "n": optax.set_to_zero()}, {"w": "w", "n": "n"}
    )
    base = (
        frozen
        if gradient_of_n == "zeros"
        else optax.masked(optax.sgd(0.1), {"w": True, "n": False})
    )
    tx = sam_optax.sharpness_aware(base, method)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=grad_fn)
    assert norm(updates["w"]) > 0


@pytest.mark.parametrize("name", FOUR)
def test_frozen_subtree(name):
    """A frozen backbone: no displacement and no update, but grad_fn sees it."""
    params = {"backbone": {"k": jnp.full((2, 2), 2.0)}, "head": {"k": jnp.full((2, 2), 3.0)}}
    points = []

    def grad_fn(p):
        points.append(p)
        return jax.grad(lambda p: jnp.sum((p["backbone"]["k"] @ p["head"]["k"]) ** 2))(p)

    method = sam_optax.perturb_only(make(name, 0.1), {"backbone": False, "head": True})
    base = optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        {"backbone": "freeze", "head": "train"},
    )
    tx = sam_optax.sharpness_aware(base, method)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=grad_fn)
    np.testing.assert_array_equal(updates["backbone"]["k"], 0)
    assert norm(updates["head"]) > 0
    assert_same(points[-1]["backbone"], params["backbone"])
    moved = points[-1]["head"]["k"] - params["head"]["k"]
    assert norm(moved) > 0
    if name in ("sam", "fsam", "rsam"):
        assert norm(moved) == pytest.approx(0.1, rel=1e-5)
