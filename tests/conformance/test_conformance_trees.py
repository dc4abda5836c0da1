"""What every method does with pytrees of every kind."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import flax.struct
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same, norm, signature, vector
from methods import FORMULAS, make

import sam_optax


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@flax.struct.dataclass
class Layer:
    kernel: Any
    bias: Any
    name: str = flax.struct.field(pytree_node=False, default="layer")


@dataclasses.dataclass
class Plain:
    kernel: Any
    bias: Any


jax.tree_util.register_dataclass(Plain, ["kernel", "bias"], [])


def one():
    return jnp.array([1.0, -2.0])


def haiku_params():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
    return network.init(jax.random.key(0), jnp.ones((1, 2)))


def nnx_params():
    return nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)


TREES = {
    "array": one,
    "scalar": lambda: jnp.asarray(2.0, jnp.float32),
    "empty_dict": dict,
    "empty_tuple": tuple,
    "only_empty_leaves": lambda: {"a": jnp.zeros((0, 2)), "b": jnp.zeros(0)},
    "some_empty_leaves": lambda: {"a": jnp.zeros((0, 2)), "b": one()},
    "scalar_leaves": lambda: {"a": jnp.asarray(2.0, jnp.float32), "b": one()},
    "only_none": lambda: {"a": None},
    "none_leaves": lambda: {"a": None, "b": one(), "c": {"d": None}},
    "list": lambda: [one(), [one(), one()]],
    "tuple": lambda: (one(), (one(),), ()),
    "named_tuple": lambda: Pair(one(), one()),
    "dataclass": lambda: Plain(one(), one()),
    "struct": lambda: {"first": Layer(one(), one()), "second": [Layer(one(), None)]},
    "frozen_dict": lambda: flax.core.freeze({"params": {"kernel": one(), "bias": one()}}),
    "integer_keys": lambda: {0: one(), 1: {2: one()}},
    "masked": lambda: {"a": one(), "b": optax.MaskedNode()},
    "equinox": lambda: eqx.filter(eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.is_inexact_array),
    "equinox_without_bias": lambda: eqx.filter(
        eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0)), eqx.is_inexact_array
    ),
    "haiku": haiku_params,
    "nnx": nnx_params,
    "integers": lambda: {"w": one(), "n": jnp.array([1, 2]), "flag": jnp.array(True)},
    "only_integers": lambda: {"n": jnp.array([1, 2])},
    "unit_axes": lambda: {"a": jnp.ones((1, 1, 1, 1)), "b": jnp.ones((1, 1))},
}


def moved(params):
    """Gradients of the same structure, floating-point leaves only touched."""
    return jax.tree.map(lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.inexact) else x, params)


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.fast("sam-*", "rsam-*")
def test_structure_is_preserved(name, kind):
    """By tracing alone, which is where it is decided."""
    params = TREES[kind]()
    method = make(name)
    state = method.init(params)

    def everything(params, grads, state):
        eps, new_state = method.update(grads, state, params)
        point, _ = method.perturb_fn(params, grads, state)
        return eps, point, method.start_fn(params, state), new_state

    eps, point, start, new_state = jax.eval_shape(everything, params, moved(params), state)
    assert signature(eps) == signature(moved(params))
    assert signature(point) == signature(start) == signature(params)
    assert signature(new_state) == signature(state)


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", ["sam_3", "asam"])
def test_values_are_finite(name, kind):
    params = TREES[kind]()
    method = make(name)
    with jax.disable_jit():  # op by op, to compile less
        state = method.init(params)
        eps, new_state = method.update(moved(params), state, params)
        point, _ = method.perturb_fn(params, moved(params), state)
        assert_same(method.start_fn(params, state), params)
    assert np.all(np.isfinite(vector((eps, point, new_state))))
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(point), strict=True):
        assert jnp.issubdtype(before.dtype, jnp.inexact) or jnp.array_equal(before, after)


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", ["rsam"])
@pytest.mark.fast("*-array", "*-scalar", "*-empty_dict")
def test_sharpness_aware_under_jit(name, kind):
    params = TREES[kind]()
    base = optax.stateless(lambda grads, _: grads)  # optax's own updates need float leaves
    tx = sam_optax.sharpness_aware(base, make(name))
    state = tx.init(params)
    step = jax.jit(lambda s, p: tx.update(None, s, p, grad_fn=moved))
    updates, new_state = step(state, params)
    assert signature(updates)[0] == jax.tree.structure(params)
    assert signature(new_state) == signature(state)
    assert np.all(np.isfinite(vector(updates)))


@pytest.mark.parametrize("name", ["sam", "sam_3", "asam", "fsam", "rsam", "only_sam", "only_rsam"])
def test_gradients_with_holes(name):
    """Integer leaves whose gradient is float0 or absent; frozen ones without any."""
    params = {"w": one(), "n": jnp.array([1, 2]), "frozen": {"a": one(), "b": one()}}
    method = make(name)
    for n in (np.zeros(2, jax.dtypes.float0), None):
        grads = {"w": one(), "n": n, "frozen": None}
        state = method.init(params)
        with jax.disable_jit():
            eps, new_state = method.update(grads, state, params)
            point, _ = method.perturb_fn(params, grads, state)
        assert eps["frozen"] is None
        assert signature(new_state) == signature(state)
        assert_same(point["frozen"], params["frozen"])
        assert_same(point["n"], params["n"])
        assert norm(point["w"] - params["w"]) > 0
        if name in ("sam", "fsam"):
            assert norm(point["w"] - params["w"]) == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize(
    "mask",
    [
        {"a": True, "b": {"c": False, "d": True}},
        {"a": True, "b": False},
        True,
        False,
        lambda params: {"a": False, "b": True},
    ],
)
def test_masks_of_perturb_only(mask):
    params = {"a": one(), "b": {"c": one(), "d": one()}}
    method = sam_optax.perturb_only(sam_optax.sam(0.3), mask)
    with jax.disable_jit():
        eps, _ = method.update(params, method.init(params), params)
    chosen = mask(params) if callable(mask) else mask
    flags = jax.tree.leaves(
        jax.tree.map(lambda m, sub: jax.tree.map(lambda _: m, sub), chosen, params)
    )
    for flag, leaf in zip(flags, jax.tree.leaves(eps), strict=True):
        assert (norm(leaf) > 0) == flag
    assert norm(eps) == pytest.approx(0.3 if any(flags) else 0, rel=1e-6)
