"""Sparse SAM: which elements are in the mask, how many, and when they change."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from helpers import assert_same, norm, vector

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


def test_the_largest_of_the_whole_tree():
    """Not leaf by leaf: the last leaf, ten times as large, has more than its share."""
    (mask,) = masks(sparse(0.9), [tree(0)])
    np.testing.assert_array_equal(mask, ref.top(np.abs(vector(tree(0))), 3))
    assert mask[-9:].sum() == 3


def test_sparsity_0_keeps_all_to_the_bit():
    init, update = sparse(0.0)
    assert_same(update(tree(0), init(tree(0)), {})[0], tree(0))


def test_at_least_one_element_is_kept():
    init, update = sparse(0.99)
    g = tree(0)
    eps, _ = update(g, init(g), {})
    assert norm(eps) == np.abs(vector(g)).max()


def test_given_fisher_information():
    """In the combinator, for the raw gradient and for part of the params."""
    g, fisher = tree(0), jax.tree.map(jnp.abs, tree(1))
    method = optax.chain(sam_optax.sam(1.0), sam_optax.sparsify(0.5, key=KEY))
    only = sam_optax.perturb_only(method, {"a": True, "b": True, "c": False})
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), only)
    step = jax.jit(lambda s: tx.update(None, s, g, grad_fn=lambda p: p, fisher=fisher))
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


@pytest.mark.parametrize(
    ("sparsity", "drop"), [(0.5, 0.5), pytest.param(0.2, 0.9, marks=pytest.mark.slow)]
)
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


# ---------------------------------------------------------------- leaves and devices


def test_masked_elements_that_are_not_finite_do_not_matter():
    """Where, not times."""
    method = sam_optax.sparsify(0.5, key=KEY)
    g = jnp.array([1.0, 2.0, jnp.nan, 0.0])
    eps, _ = method.update(g, method.init(g))
    np.testing.assert_array_equal(eps, [1, 2, 0, 0])


@pytest.mark.parametrize("choice", ["fisher", "dynamic"])
@pytest.mark.slow
def test_devices_have_one_mask(choice):
    """That of the mean of their |g|, though each perturbs by its own gradient."""
    ssam = optax.chain(sam_optax.sam(RHO), sam_optax.sparsify(0.5, key=KEY, every=1, choice=choice))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), ssam, axis_name="batch")
    w = jnp.zeros(6)
    state = tx.init(w)
    sam_state, ssam_state = state.perturbation_state
    late = (sam_state, ssam_state._replace(count=jnp.ones((), jnp.int32)))  # dynamic masks change
    state = state._replace(perturbation_state=late)
    centres = jnp.array([[9.0, 1, 2, 8, 0, 0], [-9.0, 0, 1, 0, 3, 2]])
    step = lambda centre: tx.update(None, state, w, grad_fn=lambda p: p - centre)
    result = jax.pmap(step, axis_name="batch", devices=jax.devices()[:2])(centres)
    for leaf in jax.tree.leaves(result):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    mask = result[1].perturbation_state[1].mask[0]
    assert mask.sum() == 3
    if choice == "fisher":  # the means of |g| are about 9, .5, 1.5, 4, 1.5, 1
        assert mask[0]
        assert mask[3]


def test_sharded_params_inside_shard_map_are_refused():
    method = sam_optax.sparsify(key=KEY)
    with pytest.raises(ValueError, match="norm_axis_name='model' cannot be used with sparsify"):
        method.update(jnp.ones(3), method.init(jnp.ones(3)), norm_axis_name="model")
