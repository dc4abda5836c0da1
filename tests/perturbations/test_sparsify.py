"""Sparse SAM: which elements are in the mask, how many, and when they change."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from family import BASE, LR, MOMENTUM, START, gap, numpy_gradients, run
from helpers import assert_same, norm, vector
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sam_optax

KEY = jax.random.key(4)
RHO = 0.3
SIZES = {"a": (4, 5), "b": (), "c": (9,)}  # 30 elements
N = 30


def tree(seed):
    rng = np.random.default_rng(seed)
    return {
        k: jnp.asarray(rng.normal(size=n) * (10 if k == "c" else 1), jnp.float32)
        for k, n in SIZES.items()
    }


@functools.cache
def sparse(sparsity=0.5, every=1, **options):
    """One instance for all tests, so that what it compiles is shared; init and update jitted."""
    method = sam_optax.sparsify(sparsity, key=KEY, every=every, **options)
    return jax.jit(method.init), jax.jit(lambda g, s, extra: method.update(g, s, **extra))


def masks(method, gs, **extra):
    """The mask of each of several perturbations, as one vector."""
    init, update = method
    state, found = init(gs[0]), []
    for g in gs:
        eps, state = update(g, state, extra)
        mask = vector(optax.tree_utils.tree_get(state, "mask")) == 1
        np.testing.assert_array_equal(vector(eps), np.where(mask, vector(g), 0))
        found.append(mask)
    return found


def test_trajectory():
    ssam = optax.chain(sam_optax.sam(RHO), sam_optax.sparsify(0.6, key=KEY, every=2))
    points, _ = run(sam_optax.sharpness_aware(BASE, ssam))
    log = []
    expected = ref.train(START, numpy_gradients(), ref.ssam_fisher(RHO, 0.6, 2, log), LR, MOMENTUM)
    assert gap(points, expected) < 1e-12
    assert any(np.any(a != b) for a, b in itertools.pairwise(log))

    def other(change):
        def gradient_of(t, w, grad):
            g = grad(w)
            return grad(w + change(g, log[t // 2]))

        return ref.train(START, numpy_gradients(), gradient_of, LR, MOMENTUM)

    assert gap(points, other(lambda g, m: RHO * ref.unit(g) * m)) < 1e-12
    for wrong in (
        lambda g, m: RHO * ref.unit(g * m),  # renormalized
        lambda g, m: RHO * ref.unit(g) * ~m,
        lambda g, m: RHO * ref.unit(g) * ref.top(g**2, 4),  # anew at every step
        lambda g, m: RHO * ref.unit(g) * ref.top(-(g**2), 4),
    ):
        assert gap(points, other(wrong)) > 1e-4


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
@pytest.mark.fast("0.9")
def test_the_largest_of_the_whole_tree(sparsity):
    gs = [tree(i) for i in range(3)]
    found = masks(sparse(sparsity), gs)
    count = round((1 - sparsity) * N)
    for mask, g in zip(found, gs, strict=True):
        np.testing.assert_array_equal(mask, ref.top(np.abs(vector(g)), count))
    # Not leaf by leaf: the last leaf, ten times as large, has more than its share.
    if sparsity == 0.9:
        assert found[0][-9:].sum() == count


def test_sparsity_0_keeps_all_to_the_bit():
    init, update = sparse(0.0)
    assert_same(update(tree(0), init(tree(0)), {})[0], tree(0))


def test_at_least_one_element_is_kept():
    init, update = sparse(0.99)
    g = tree(0)
    eps, _ = update(g, init(g), {})
    assert norm(eps) == np.abs(vector(g)).max()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.fast("3")
def test_refreshed_every_so_many_perturbations(every):
    found = masks(sparse(0.5, every), [tree(i) for i in range(7)])
    for t in range(1, 7):
        assert np.array_equal(found[t], found[t - 1]) is (t % every != 0)


def test_steps_that_do_not_perturb_do_not_count():
    ssam = optax.chain(sam_optax.sam(RHO), sam_optax.sparsify(0.5, key=KEY, every=2))
    tx = sam_optax.sharpness_aware(BASE, ssam, when=sam_optax.every(2))
    _, states = run(tx, 6, jnp.float32)
    seen = [vector(s.perturbation_state[1].mask) for s in states]
    assert [int(s.perturbation_state[1].count) for s in states] == [1, 1, 2, 2, 3, 3]
    assert all(np.array_equal(a, seen[0]) for a in seen[:4])
    assert not np.array_equal(seen[4], seen[0])


@pytest.mark.slow
def test_given_fisher_information():
    g, fisher = tree(0), jax.tree.map(jnp.abs, tree(1))
    (mask,) = masks(sparse(0.5), [g], fisher=fisher)
    np.testing.assert_array_equal(mask, ref.top(vector(fisher), 15))
    # In the combinator, for the raw gradient and for part of the params.
    method = optax.chain(sam_optax.sam(1.0), sam_optax.sparsify(0.5, key=KEY))
    only = sam_optax.perturb_only(method, {"a": True, "b": True, "c": False})
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), only)
    step = jax.jit(lambda s: tx.update(g, s, g, grad_fn=lambda p: p, fisher=fisher))
    _, state = step(tx.init(g))
    found = vector(state.perturbation_state[1].mask) == 1
    np.testing.assert_array_equal(found, ref.top(vector(fisher)[:21], round(10.5)))


def test_behind_asam_it_goes_by_the_gradient():
    w, g = jax.tree.map(lambda x: 10.0 ** (3 * x), tree(1)), tree(0)
    method = sam_optax.as_perturbation(
        optax.chain(sam_optax.asam(1.0), sam_optax.sparsify(0.5, key=KEY))
    )
    _, state = method.perturb_fn(w, g, method.init(w))
    np.testing.assert_array_equal(vector(state[1].mask) == 1, ref.top(np.abs(vector(g)), 15))


# ---------------------------------------------------------------- dynamic masks


@pytest.mark.parametrize(("sparsity", "drop"), [(0.5, 0.5), (0.2, 0.9)])
@pytest.mark.slow
def test_dynamic_exchange(sparsity, drop):
    gs = [tree(i) for i in range(5)]
    method = sparse(sparsity, 2, choice="dynamic", drop=drop)
    found = masks(method, gs)
    kept = round((1 - sparsity) * N)
    exchanged = min(round(drop * kept), N - kept)
    start = vector(method[0](gs[0]).mask) == 1
    np.testing.assert_array_equal(found[0], start)  # the first mask is random
    for t in range(1, 5):
        assert found[t].sum() == kept
        gone = found[t - 1] & ~found[t]
        if t % 2:
            assert not gone.any()
            continue
        assert gone.sum() == exchanged
        # Of the old mask the smallest gradients have left.
        scores = np.where(found[t - 1], np.abs(vector(gs[t])), np.inf)
        np.testing.assert_array_equal(gone, ref.top(-scores, exchanged))


def test_dynamic_masks_depend_on_the_key():
    make = lambda seed: sam_optax.sparsify(0.5, key=jax.random.key(seed), choice="dynamic")
    masks = jax.jit(lambda seed: make(seed).init(tree(0)).mask)
    first, second = masks(0), masks(1)
    assert not np.array_equal(vector(first), vector(second))
    assert vector(first).sum() == vector(second).sum() == 15


@pytest.mark.slow
def test_schedule_of_the_drop():
    method = sparse(choice="dynamic", drop=lambda t: jnp.where(t < 2, 0.6, 0.0))
    found = masks(method, [tree(i) for i in range(4)])
    gone = [int((a & ~b).sum()) for a, b in itertools.pairwise(found)]
    assert gone == [9, 0, 0]


# ---------------------------------------------------------------- kinds of leaves


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
@pytest.mark.slow
def test_dtypes_and_other_leaves(dtype):
    float0 = np.zeros(2, jax.dtypes.float0)
    params = {"w": jnp.arange(6, dtype=dtype), "n": None, "i": jnp.arange(2)}
    g = {**params, "w": jnp.array([1, -9, 3, 0, 5, -6], dtype), "i": float0}
    method = sam_optax.sparsify(0.5, key=KEY)
    state = method.init(params)
    assert state.mask["i"] is None
    eps, state = method.update(g, state, params)
    assert eps["w"].dtype == dtype
    assert eps["i"] is float0
    np.testing.assert_array_equal(np.asarray(state.mask["w"]), [0, 1, 0, 0, 1, 1])
    eps, _ = method.update({"w": None, "n": None, "i": None}, state, params)
    assert eps["w"] is None


def test_masked_elements_that_are_not_finite_do_not_matter():
    """Where, not times."""
    method = sam_optax.sparsify(0.5, key=KEY)
    g = jnp.array([1.0, 2.0, jnp.nan, 0.0])
    eps, _ = method.update(g, method.init(g))
    np.testing.assert_array_equal(eps, [1, 2, 0, 0])


# ---------------------------------------------------------------- devices and loops


@pytest.mark.slow
def test_sharded_equals_unsharded():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    g = {"a": jax.random.normal(KEY, (64, 8)), "b": jnp.round(jax.random.normal(KEY, (32,)))}
    init, update = sparse(choice="dynamic")
    placed = jax.device_put(g, NamedSharding(mesh, P("data")))
    expected, state = init(g), init(placed)
    for _ in range(2):
        _, expected = update(g, expected, {})
        eps, state = update(placed, state, {})
    assert_same(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, expected))
    assert eps["a"].sharding.is_equivalent_to(placed["a"].sharding, 2)


@pytest.mark.parametrize(
    ("runner", "choice"),
    [
        ("pmap", "fisher"),
        ("shard_map", "dynamic"),
        ("shard_map", "fisher"),
        ("shard_map without check_vma", "dynamic"),
    ],
)
@pytest.mark.slow
def test_devices_have_one_mask(runner, choice):
    """That of the mean of their |g|, though each perturbs by its own gradient."""
    ssam = optax.chain(sam_optax.sam(RHO), sam_optax.sparsify(0.5, key=KEY, every=1, choice=choice))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), ssam, axis_name="batch")
    w = jnp.zeros(6)
    state = tx.init(w)
    sam_state, ssam_state = state.perturbation_state
    late = (sam_state, ssam_state._replace(count=jnp.ones((), jnp.int32)))  # dynamic masks change
    state = state._replace(perturbation_state=late)
    centres = jnp.array([[9.0, 1, 2, 8, 0, 0], [-9.0, 0, 1, 0, 3, 2]])

    def step(centre):
        grad_fn = lambda p: p - centre.reshape(6)
        return jax.tree.map(lambda x: x[None], tx.update(None, state, w, grad_fn=grad_fn))

    if runner == "pmap":
        mapped = jax.pmap(step, axis_name="batch", devices=jax.devices()[:2])
    elif not hasattr(jax, "shard_map"):
        pytest.skip("jax.shard_map is newer than this jax")
    else:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
        options = {"check_vma": runner == "shard_map"}
        mapped = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), **options)
        )
    result = jax.tree.map(lambda x: np.asarray(x).reshape(2, -1), mapped(centres))
    for leaf in jax.tree.leaves(result):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    mask = result[1].perturbation_state[1].mask[0]
    assert mask.sum() == 3
    if choice == "fisher":  # the means of |g| are about 9, .5, 1.5, 4, 1.5, 1
        assert mask[0]
        assert mask[3]


@pytest.mark.slow
def test_scan_equals_the_loop():
    ssam = optax.chain(
        sam_optax.sam(RHO), sam_optax.sparsify(0.5, key=KEY, every=2, choice="dynamic")
    )
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), ssam)

    def one(carry, _):
        params, state = carry
        updates, state = tx.update(None, state, params, grad_fn=lambda p: p**3)
        return (optax.apply_updates(params, updates), state), None

    carry = first = (jnp.linspace(-1, 1, 10), tx.init(jnp.linspace(-1, 1, 10)))
    jitted = jax.jit(one)
    for _ in range(4):
        carry, _ = jitted(carry, None)
    scanned, _ = jax.jit(lambda c: jax.lax.scan(one, c, None, 4))(first)
    assert_same(scanned[1].perturbation_state, carry[1].perturbation_state)
    np.testing.assert_allclose(scanned[0], carry[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"sparsity": 1.0}, ValueError, ["sparsity", "1.0", "[0, 1)"]),
        ({"sparsity": -0.1}, ValueError, ["sparsity", "-0.1"]),
        ({"sparsity": lambda t: 0.5}, TypeError, ["sparsity"]),
        ({"choice": "random"}, ValueError, ["choice", "'random'", "'fisher'", "'dynamic'"]),
        ({"every": 0}, ValueError, ["every", "0", "1"]),
        ({"every": 2.5}, TypeError, ["every", "2.5", "integer"]),
        ({"drop": 1.0}, ValueError, ["drop", "1.0", "[0, 1)"]),
        ({"key": 0.5}, TypeError, ["key", "PRNG"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        sam_optax.sparsify(**{"key": KEY, **arguments})
    for word in words:
        assert word in str(caught.value)


def test_sharded_params_inside_shard_map_are_refused():
    method = sam_optax.sparsify(key=KEY)
    with pytest.raises(ValueError, match="norm_axis_name='model' cannot be used with sparsify"):
        method.update(jnp.ones(3), method.init(jnp.ones(3)), norm_axis_name="model")
