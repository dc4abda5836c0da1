"""Every method and every option on a mesh with explicit axes: as on one device, and in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from methods import KINDS, NAMES, OPTIONS, WHOLE, make, often

import sam_optax

if not hasattr(jax, "set_mesh"):
    pytest.skip("this version has no meshes with explicit axes", allow_module_level=True)

BASE = optax.sgd(0.05, momentum=0.9)
KEY = jax.random.key(0)
_rng = np.random.default_rng(0)
PARAMS = {
    "hidden": {"kernel": _rng.normal(size=(4, 6)), "bias": _rng.normal(size=6)},
    "out": {"kernel": _rng.normal(size=(6, 2))},
}
PARAMS = jax.tree.map(lambda x: np.asarray(x, np.float32), PARAMS)
X, Y = (_rng.normal(size=(8, n)).astype(np.float32) for n in (4, 2))
SPECS = {"hidden": {"kernel": P(None, "m"), "bias": P("m")}, "out": {"kernel": P("m")}}
EVERY_2 = {"when": sam_optax.every(2)}
ALL_OPTIONS = {
    **{name: options for name, options in OPTIONS.items() if options},
    "all": {"groups": 2, "info": True, "skip_nonfinite": True, "perturb_dtype": jnp.float32},
    "surrogate_gap": {"descent": sam_optax.surrogate_gap(), **EVERY_2},
    "reuse_orthogonal": {"descent": sam_optax.reuse_orthogonal(), **EVERY_2},
    "mix_gradients": {"descent": sam_optax.mix_gradients(0.5), **EVERY_2},
    "decoupled": {"descent": sam_optax.decoupled_sharpness(BASE, 0.05, 1.0), **EVERY_2},
}


def loss(params, x, y, explicit):
    hidden = jnp.tanh(jnp.dot(x, params["hidden"]["kernel"]) + params["hidden"]["bias"])
    how = {"out_sharding": P(None, None)} if explicit else {}
    out = jnp.einsum("bh,ho->bo", hidden, params["out"]["kernel"], **how)
    return jnp.mean((out - y) ** 2)


def gradient(explicit, groups=1):
    """Of the whole batch, or of one of its groups."""

    def grad_fn(params, group=0):
        n = len(X) // groups
        x, y = (jax.lax.dynamic_slice_in_dim(jnp.asarray(a), group * n, n) for a in (X, Y))
        return jax.grad(loss)(params, x, y, explicit)

    return grad_fn


def placed():
    """The mesh, and the params sharded over it."""
    mesh = jax.make_mesh((2,), ("m",))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return mesh, jax.tree.map(put, PARAMS, SPECS)


def run(tx, params, explicit, groups):
    """The types before some updates, what they lead to, and the types after them."""
    grad_fn = gradient(explicit, groups)

    @jax.jit
    def step(params, state):
        grads = grad_fn(params) if groups == 1 else None
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    before = jax.tree.map(jax.typeof, (params, state))
    for _ in range(3):
        params, state = step(params, state)
    return before, (params, state), jax.tree.map(jax.typeof, (params, state))


def check(tx_of, groups=1):
    """On a mesh as on one device; params and state keep their types, shardings included."""
    _, (expected, _), _ = run(tx_of(), jax.tree.map(jnp.asarray, PARAMS), False, groups)
    mesh, params = placed()
    with jax.set_mesh(mesh):
        before, (found, state), after = run(tx_of(), params, True, groups)
        assert before == after
    # (sparsify breaks ties by order, and a norm that is summed in another order may reorder them.)
    assert_close(found, expected, rtol=1e-4)
    return mesh, found, state


@pytest.mark.parametrize("name", often(NAMES, "sam"))
def test_every_method(name):
    check(lambda: sam_optax.sharpness_aware(BASE, make(name)))


@pytest.mark.parametrize("option", ALL_OPTIONS)
@pytest.mark.slow
def test_every_option(option):
    options = ALL_OPTIONS[option]
    tx_of = lambda: sam_optax.sharpness_aware(BASE, make("sam"), **options)
    check(tx_of, options.get("groups", 1))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.slow
def test_methods_that_are_more_than_a_perturbation(name):
    check(lambda: WHOLE[name](BASE))


@pytest.mark.parametrize("name", [name for name in KINDS if make(name).samples == 1])
@pytest.mark.slow
def test_alternating(name):
    options = {"skip_nonfinite": True, "descent": sam_optax.mix_gradients(0.9)}
    mesh, *result = check(lambda: sam_optax.alternating(BASE, make(name), **options))
    with jax.set_mesh(mesh):
        trained = sam_optax.eval_params(*result)
    assert jax.tree.map(jax.typeof, trained) == jax.tree.map(jax.typeof, result[0])


def test_accumulate():
    mesh, params = placed()
    with jax.set_mesh(mesh):
        whole = jax.jit(gradient(True))(params)
        parts = jax.jit(sam_optax.accumulate(gradient(True, 2), 2))(params)
        assert jax.tree.map(jax.typeof, parts) == jax.tree.map(jax.typeof, params)
    assert_close(parts, whole, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_devices_agree_to_skip(check_vma):
    """A gradient that is not finite on one of two devices that share the params."""
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1, momentum=0.9), make("sam", 0.1), norm_axis_name="m", skip_nonfinite=True
    )
    w = jnp.array([3.0, 4.0])
    state = tx.init(w)

    def step(w, state):
        def gradient(p):
            moved = (jax.lax.axis_index("m") == 1) & (jnp.abs(p[0] - 4) > 1e-6)
            return jnp.where(moved, jnp.inf, p)

        updates, state = tx.update(None, state, w, grad_fn=gradient)
        # Each device's own counts, as a stack: what is out of step would show.
        return optax.apply_updates(w, updates), state, jnp.stack([state.step, state.skipped])[None]

    specs = jax.tree.map(lambda x: P("m") if x.ndim else P(), state)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("m"), specs),
            out_specs=(P("m"), specs, P() if check_vma else P("m")),
            check_vma=check_vma,
        )
    )
    moved, _, counts = mapped(w, state)
    np.testing.assert_array_equal(moved, w)
    assert np.unique(np.reshape(counts, (-1, 2)), axis=0).tolist() == [[0, 1]]
