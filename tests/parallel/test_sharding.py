"""Arrays sharded over devices under jit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from methods import FOUR, make, often

import sam_optax

if not hasattr(jax, "shard_map"):
    pytest.skip("jax.shard_map is newer than this jax", allow_module_level=True)

AUTO = jax.sharding.AxisType.Auto
KEY = jax.random.key(0)
# One kernel large enough for a draw of its own in R-SAM, one that shares its draw.
PARAMS = {
    "in": {"kernel": jax.random.normal(KEY, (64, 512)) / 8, "bias": jnp.zeros(512)},
    "out": {"kernel": jax.random.normal(KEY, (512, 256)) / 22, "bias": jnp.zeros(256)},
}
SPECS = {
    "in": {"kernel": P("data", "model"), "bias": P("model")},
    "out": {"kernel": P("model", "data"), "bias": P()},
}
X = jax.random.normal(KEY, (32, 64))


def loss(params, x):
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"]) ** 2)


def placed():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO))
    put = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))
    return mesh, jax.tree.map(put, PARAMS, SPECS)


every_name = pytest.mark.parametrize("name", often([*FOUR, "asam_filterwise"], "rsam"))


@every_name
def test_sharded_equals_one_device(name):
    """Under automatic axes, as the compiler places what it computes."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), make(name, 0.1))

    @jax.jit
    def step(params, state, x):
        updates, state = tx.update(None, state, params, grad_fn=jax.grad(lambda p: loss(p, x)))
        return optax.apply_updates(params, updates), state

    def two_steps(params, x):
        return step(*step(params, tx.init(params), x), x)

    expected, _ = two_steps(PARAMS, X)
    mesh, params = placed()
    new, _ = two_steps(params, jax.device_put(X, NamedSharding(mesh, P("data"))))
    assert_close(new, expected, rtol=0, atol=1e-6)


@every_name
def test_perturbing_moves_no_array(name):
    """ε and the perturbed point are sharded as the params are; only scalars and norms travel."""
    method, (_, params) = make(name, 0.1), placed()
    compiled = method.perturb_fn.lower(params, params, method.init(params)).compile()
    text = compiled.as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    reduced = [int(n) for n in re.findall(r"= f32\[(\d+)\]\S* all-reduce\(", text)]
    assert max(reduced, default=0) <= 1024  # scalars, and norms of filters and kernels
    perturbed, _ = compiled(params, params, method.init(params))
    for leaf, param in zip(jax.tree.leaves(perturbed), jax.tree.leaves(params), strict=True):
        assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)


def test_a_norm_spans_all_shards():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AUTO,))
    grads = jax.device_put(jnp.array([3.0, 4.0]), NamedSharding(mesh, P("data")))
    method = sam_optax.sam(0.5)
    eps, _ = jax.jit(method.update)(grads, method.init(grads))
    np.testing.assert_allclose(eps, [0.3, 0.4], rtol=1e-6)
    assert eps.sharding.is_equivalent_to(grads.sharding, 1)
