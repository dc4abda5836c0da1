"""Every method and every option on meshes, with automatic and with explicit axes."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from methods import FOUR, KINDS, NAMES, WHOLE, make, often

import sam_optax

BASE = optax.sgd(0.05, momentum=0.9)
KEY = jax.random.key(0)
_rng = np.random.default_rng(0)
PARAMS = {
    "hidden": {"kernel": _rng.normal(size=(4, 6)), "bias": _rng.normal(size=6)},
    "out": {"kernel": _rng.normal(size=(6, 2))},
}
PARAMS = jax.tree.map(lambda x: np.asarray(x, np.float32), PARAMS)
X, Y = (_rng.normal(size=(8, n)).astype(np.float32) for n in (4, 2))
SPECS = {
    "columns": {"hidden": {"kernel": P(None, "m"), "bias": P("m")}, "out": {"kernel": P("m")}},
    "rows": {"hidden": {"kernel": P("m"), "bias": P()}, "out": {"kernel": P(None, "m")}},
    "batch": jax.tree.map(lambda _: P(), PARAMS),
}
OPTIONS = {
    "skip": {"skip_nonfinite": True},
    "info": {"info": True},
    "every": {"when": sam_optax.every(2)},
    "bernoulli": {"when": sam_optax.bernoulli(0.5, key=KEY)},
    "above_average": {"when": sam_optax.above_average(0.5)},
    "steps": {"ascent_steps": 3},
    "dtype": {"perturb_dtype": jnp.float32},
    "groups": {"groups": 2, "info": True, "skip_nonfinite": True},
}
DESCENTS = {
    "surrogate_gap": sam_optax.surrogate_gap,
    "reuse_orthogonal": sam_optax.reuse_orthogonal,
    "mix_gradients": lambda: sam_optax.mix_gradients(0.5),
    "decoupled_sharpness": lambda: sam_optax.decoupled_sharpness(BASE, 0.05, 1.0),
}

explicit_only = pytest.mark.skipif(
    not hasattr(jax, "set_mesh"), reason="this version has no meshes with explicit axes"
)


def loss(params, x, y, explicit):
    hidden = jnp.tanh(jnp.dot(x, params["hidden"]["kernel"]) + params["hidden"]["bias"])
    how = {"out_sharding": P(None, None)} if explicit else {}
    out = jnp.einsum("bh,ho->bo", hidden, params["out"]["kernel"], **how)
    return jnp.mean((out - y) ** 2)


def grad_fn(explicit, groups=None):
    if not groups:
        return lambda p: jax.grad(loss)(p, X, Y, explicit)

    def of_group(p, i):
        n = len(X) // groups
        x, y = (jax.lax.dynamic_slice_in_dim(jnp.asarray(a), i * n, n) for a in (X, Y))
        return jax.grad(loss)(p, x, y, explicit)

    return of_group


@functools.cache
def on_one_device(tx_of, groups=None, steps=3):
    return run(tx_of(), PARAMS, False, groups, steps)[1]


def run(tx, params, explicit, groups, steps):
    """The types before, the params after some steps, and the types after."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(None, state, params, grad_fn=grad_fn(explicit, groups))
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params)
    before = types(params, state)
    for _ in range(steps):
        params, state = step(params, state)
    return before, params, types(params, state)


def types(*trees):
    if hasattr(jax, "typeof"):
        return jax.tree.map(jax.typeof, trees)
    return jax.tree.map(lambda x: (x.shape, x.dtype), trees)


def check(tx_of, kind, specs, groups=None):
    """On a mesh as on one device; params and state keep their types, shardings included."""
    explicit = kind == "explicit"
    axis_types = (getattr(jax.sharding.AxisType, kind.capitalize()),)
    mesh = jax.make_mesh((2,), ("m",), axis_types=axis_types)
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        placed = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, SPECS[specs]
        )
        before, params, after = run(tx_of(), placed, explicit, groups, 3)
        assert before == after or not explicit
        for old, new in zip(jax.tree.leaves(placed), jax.tree.leaves(params), strict=True):
            assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
        moved = jax.tree.map(np.asarray, params)
    # (sparsify breaks ties by order, and a norm that is summed in another order may reorder them.)
    assert_close(moved, on_one_device(tx_of, groups), rtol=1e-4)


@functools.cache
def method(name, **options):
    return lambda: sam_optax.sharpness_aware(BASE, make(name), **options)


both = pytest.mark.parametrize("kind", ["explicit", "auto"])
every_name = often(NAMES, "sam")


@explicit_only
@both
@pytest.mark.parametrize("name", every_name)
@pytest.mark.sample("*-explicit", "sam-auto", "asam-auto", "fsam-auto", "rsam-auto")
@pytest.mark.fast("sam-explicit")
def test_every_method(name, kind):
    check(method(name), kind, "columns")


@explicit_only
@both
@pytest.mark.parametrize("specs", ["rows", "batch"])
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.slow
@pytest.mark.sample("*-rows-explicit", "sam-*")
def test_other_shardings(name, specs, kind):
    check(method(name), kind, specs)


@explicit_only
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "name", ["sam", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("fsam", "rsam"))]
)
@pytest.mark.slow
def test_every_option(name, option):
    groups = OPTIONS[option].get("groups")
    check(with_option(name, option), "explicit", "columns", groups)


@functools.cache
def with_option(name, option):
    return lambda: sam_optax.sharpness_aware(BASE, make(name), **OPTIONS[option])


@functools.cache
def with_descent(name):
    when = sam_optax.every(2)
    descent = DESCENTS[name]()
    base = optax.identity() if name == "decoupled_sharpness" else BASE
    return lambda: sam_optax.sharpness_aware(base, make("sam"), descent=descent, when=when)


@explicit_only
@pytest.mark.parametrize("name", DESCENTS)
@pytest.mark.slow
def test_descents(name):
    check(with_descent(name), "explicit", "columns")


@functools.cache
def whole(name):
    return lambda: WHOLE[name](BASE)


@explicit_only
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.slow
def test_methods_that_are_more_than_a_perturbation(name):
    check(whole(name), "explicit", "columns")


@explicit_only
@pytest.mark.parametrize("name", every_name)
@pytest.mark.parametrize(
    "options", [{}, {"skip_nonfinite": True, "descent": sam_optax.mix_gradients(0.9)}]
)
@pytest.mark.slow
@pytest.mark.sample("options1-*", "options0-sam", "options0-rsam")
def test_alternating(name, options):
    if make(name).samples > 1:
        pytest.skip("one gradient per call")
    if options and name not in KINDS:
        pytest.skip("one of a kind")
    mesh = jax.make_mesh((2,), ("m",))
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, SPECS["columns"]
        )
        tx = sam_optax.alternating(BASE, make(name), **options)
        state = tx.init(params)
        before, start = types(params, state), loss(params, X, Y, True)

        @jax.jit
        def call(params, state):
            updates, state = tx.update(grad_fn(True)(params), state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(7):
            params, state = call(params, state)
        assert before == types(params, state)
        assert loss(sam_optax.eval_params(params, state), X, Y, True) < start


@explicit_only
def test_accumulate():
    @functools.cache
    def tx_of():
        return sam_optax.sharpness_aware(BASE, make("sam"))

    mesh = jax.make_mesh((2,), ("m",))
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, SPECS["columns"]
        )
        whole = jax.jit(grad_fn(True))(params)
        parts = jax.jit(sam_optax.accumulate(grad_fn(True, 2), 2))(params)
        assert types(parts) == types(params)
        assert_close(parts, whole, rtol=1e-5)


@explicit_only
def test_random_masks_differ_where_shards_differ():
    """A mask or noise that each shard drew alike would repeat along the sharded axis."""
    mesh = jax.make_mesh((2,), ("m",))
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((4, 1000)), NamedSharding(mesh, P("m")))
        mask = sam_optax.random_mask(0.5, key=KEY)
        kept = np.asarray(jax.jit(mask.update)(w, mask.init(w))[0])
        noise = sam_optax.low_pass(0.1, key=KEY)
        drawn = np.asarray(jax.jit(noise.start_fn)(w, noise.init(w)))
    for shards in (kept, drawn):
        assert not np.array_equal(shards[:2], shards[2:])
        assert abs(np.corrcoef(shards[:2].ravel(), shards[2:].ravel())[0, 1]) < 0.1
    np.testing.assert_allclose(drawn, noise.start_fn(np.ones((4, 1000), np.float32), noise.init(w)))


@explicit_only
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.fast("True")
def test_devices_agree_to_skip(check_vma):
    """A gradient that is not finite on one of two devices that share the params."""
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1, momentum=0.9), make("sam", 0.1), norm_axis_name="m", skip_nonfinite=True
    )
    w = jnp.array([3.0, 4.0])
    state = tx.init(w)

    def step(w, state, broken):
        def gradient(p):
            moved = (jax.lax.axis_index("m") == 1) & (jnp.abs(p[0] - 4) > 1e-6)
            return jnp.where(moved & broken, jnp.inf, p)

        updates, state = tx.update(None, state, w, grad_fn=gradient)
        # Each device's own counts, as a stack: what is out of step would show.
        return optax.apply_updates(w, updates), state, jnp.stack([state.step, state.skipped])[None]

    specs = jax.tree.map(lambda x: P("m") if x.ndim else P(), state)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("m"), specs, P()),
            out_specs=(P("m"), specs, P("m") if not check_vma else P()),
            check_vma=check_vma,
        )
    )
    moved, new_state, counts = mapped(w, state, True)
    np.testing.assert_array_equal(moved, w)
    np.testing.assert_array_equal(np.reshape(counts, (-1, 2)), [[0, 1]] * (1 if check_vma else 2))
    moved, _, counts = mapped(w, new_state, False)
    np.testing.assert_allclose(moved, 0.9 * w - 0.1 * 0.1 * w / 5, rtol=1e-5)
    np.testing.assert_array_equal(np.reshape(counts, (-1, 2)), [[1, 1]] * (1 if check_vma else 2))
