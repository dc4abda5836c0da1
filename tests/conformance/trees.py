"""Pytrees of every kind, as users have their params in."""

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
from flax import nnx


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


def scalar():
    return jnp.asarray(2.0, jnp.float32)


def haiku_params():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
    return network.init(jax.random.key(0), jnp.ones((1, 2)))


def equinox(use_bias=True):
    layer = eqx.nn.Linear(2, 2, use_bias=use_bias, key=jax.random.key(0))
    return eqx.filter(layer, eqx.is_inexact_array)


def read_only():
    leaf = np.ones((2, 3), np.float32)
    leaf.flags.writeable = False
    return leaf


TREES = {
    "array": one,
    "scalar": scalar,
    "empty_dict": dict,
    "empty_list": list,
    "empty_tuple": tuple,
    "only_empty_leaves": lambda: {"a": jnp.zeros((0, 2)), "b": jnp.zeros(0)},
    "some_empty_leaves": lambda: {"a": jnp.zeros((0, 2)), "b": one()},
    "scalar_leaves": lambda: {"a": scalar(), "b": one()},
    "only_none": lambda: {"a": None, "b": [None, None]},
    "none_leaves": lambda: {"a": None, "b": one(), "c": {"d": None}},
    "list": lambda: [one(), [one(), one()]],
    "tuple": lambda: (one(), (one(),), ()),
    "named_tuple": lambda: Pair(one(), one()),
    "dataclass": lambda: Plain(one(), one()),
    "struct": lambda: {"first": Layer(one(), one()), "second": [Layer(one(), None)]},
    "frozen_dict": lambda: flax.core.freeze({"params": {"kernel": one(), "bias": one()}}),
    "integer_keys": lambda: {0: one(), 1: {2: one()}},
    "masked": lambda: {"a": one(), "b": optax.MaskedNode()},
    "equinox": equinox,
    "equinox_without_bias": lambda: equinox(use_bias=False),
    "haiku": haiku_params,
    "nnx": lambda: nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param),
    "integers": lambda: {"w": one(), "n": jnp.array([1, 2]), "flag": jnp.array(True)},
    "only_integers": lambda: {"n": jnp.array([1, 2])},
    "unit_axes": lambda: {"a": jnp.ones((1, 1, 1, 1)), "b": jnp.ones((1, 1))},
    "numpy_fortran": lambda: {"kernel": np.asfortranarray(np.ones((2, 3), np.float32))},
    "numpy_strides": lambda: {"kernel": np.ones((4, 6), np.float32)[::-2, ::-2]},
    "numpy_broadcast": lambda: {"kernel": np.broadcast_to(np.float32(2), (2, 3))},
    "numpy_read_only": lambda: {"kernel": read_only()},
}
