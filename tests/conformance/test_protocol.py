"""What optax's own transformations can do besides training, for every method."""

import copy
import functools
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, signature
from methods import KINDS, NAMES, OPTIONS, make, subject

import sam_optax

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2, 0.4], [-0.3, 2.0, 0.8]])}
SHAPES = jax.eval_shape(lambda: PARAMS)
BASE = optax.sgd(0.1, momentum=0.9)
ONE_GRADIENT = [name for name in KINDS if make(name).samples == 1]
every_method = pytest.mark.parametrize("name", NAMES)
one_of_a_kind = pytest.mark.parametrize("name", KINDS)


def gradient(params):
    return jax.tree.map(lambda x: x + 0.1 * x**3, params)


@functools.cache
def alternating(name):
    return sam_optax.alternating(
        BASE,
        make(name),
        descent=sam_optax.mix_gradients(0.9),
        skip_nonfinite=True,
        when=sam_optax.bernoulli(0.5, key=jax.random.key(0)),
    )


@functools.cache
def transformation(name, kind):
    """The method alone, or inside a combinator that keeps all that it can keep."""
    if kind == "alternating":
        return alternating(name)
    if kind is None:
        return make(name)
    when = sam_optax.bernoulli(0.5, key=jax.random.key(0))
    return sam_optax.sharpness_aware(BASE, make(name), skip_nonfinite=True, when=when, info=True)


every_transformation = pytest.mark.parametrize(
    ("name", "kind"),
    [(name, None) for name in NAMES]
    + [(name, "sharpness_aware") for name in KINDS]
    + [(name, "alternating") for name in ONE_GRADIENT],
)


def update(tx, kind, params, state, grads=None):
    extra = {"grad_fn": gradient} if kind == "sharpness_aware" else {}
    return tx.update(gradient(params) if grads is None else grads, state, params, **extra)


# ---------------------------------------------------------------- shapes in place of arrays


@every_transformation
def test_the_shapes_of_the_state(name, kind):
    init = transformation(name, kind).init
    expected = signature(init(PARAMS))
    assert signature(jax.eval_shape(init, PARAMS)) == expected
    assert signature(jax.eval_shape(init, SHAPES)) == expected


@every_transformation
def test_init_takes_shapes_as_the_optimizers_of_optax_do(name, kind):
    tx = transformation(name, kind)
    if kind == "alternating":
        with pytest.raises(TypeError, match=r"alternating keeps a copy.*jax.eval_shape"):
            tx.init(SHAPES)
    else:
        assert signature(tx.init(SHAPES)) == signature(tx.init(PARAMS))


# ---------------------------------------------------------------- copies and maps of the state


@every_transformation
def test_copies_of_the_state(name, kind):
    state = transformation(name, kind).init(PARAMS)
    assert_same(copy.deepcopy(state), state)
    assert_same(pickle.loads(pickle.dumps(state)), state)
    assert type(copy.copy(state)) is type(state)


@every_transformation
def test_tree_map_params(name, kind):
    """What has the form of the params is mapped; counts, keys and radii are not."""
    tx = transformation(name, kind)
    state = tx.init(PARAMS)
    mapped, others = [], []

    def with_params(leaf, p):
        if not isinstance(leaf, optax.MaskedNode):
            mapped.append((leaf.shape, p.shape))
        return leaf

    def without(leaf):
        others.append(leaf.shape)
        return leaf

    optax.tree_utils.tree_map_params(
        tx,
        with_params,
        state,
        PARAMS,
        transform_non_params=without,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),  # as for optax.masked
    )
    assert all(shape == of_param for shape, of_param in mapped)
    assert PARAMS["kernel"].shape not in others
    assert len(mapped) + len(others) == len(jax.tree.leaves(state))
    same = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf, state)
    assert_same(same, state)


# ---------------------------------------------------------------- trees and leaves of any kind

EMPTY = {
    "empty_dict": {},
    "empty_list": [],
    "empty_tuple": (),
    "none": {"a": None},
    "list_of_none": [None, None],
}
TREES = {**EMPTY, "bare_list": [PARAMS["bias"], PARAMS["kernel"]]}


# A list has no names, so that asam warns that it has found no biases.
@pytest.mark.filterwarnings("ignore:asam found no biases")
@every_transformation
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.fast("none-*")
@pytest.mark.sample("none-*", "bare_list-*", "*-fsam-*")
def test_trees(name, kind, tree):
    tx, params = transformation(name, kind), TREES[tree]
    state = tx.init(params)
    with jax.disable_jit():  # op by op, to compile less
        updates, new_state = update(tx, kind, params, state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert signature(new_state) == signature(state)


KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
LAYOUTS = {
    "fortran": np.asfortranarray(KERNEL),
    "negative_strides": KERNEL[::-1, ::-1][::-1, ::-1],
    "strided": np.repeat(KERNEL, 2, axis=1)[:, ::2],
    "broadcast": np.broadcast_to(np.float32(2), (2, 3)),
    "read_only": KERNEL.copy(),
}
LAYOUTS["negative_strides"] = np.ascontiguousarray(KERNEL[::-1, ::-1])[::-1, ::-1]
LAYOUTS["read_only"].flags.writeable = False


@every_transformation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.fast("fortran-*")
@pytest.mark.sample("fortran-*", "*-fsam-*", "*-rsam-*")
def test_numpy_leaves_of_any_layout(name, kind, layout):
    tx = transformation(name, kind)
    leaf = LAYOUTS[layout]
    results = []
    with jax.disable_jit():
        for kernel in (leaf, jnp.asarray(np.array(leaf))):
            params = {"bias": PARAMS["bias"], "kernel": kernel}
            updates, _ = update(tx, kind, params, tx.init(params))
            results.append(jax.tree.map(jnp.asarray, updates))
    assert_close(*results, rtol=1e-6)


@pytest.mark.parametrize("kind", ["sharpness_aware", "alternating"])
@pytest.mark.parametrize("dtype", [">f4", ">f2"])
def test_another_byte_order(kind, dtype):
    """JAX refuses it wherever it meets it; the combinators say which leaf, and what to do."""
    params = {"bias": PARAMS["bias"], "kernel": KERNEL.astype(dtype)}
    with pytest.raises(TypeError, match=r"\['kernel'\] of dtype '>f.*newbyteorder"):
        transformation("sam", kind).init(params)


@every_transformation
@pytest.mark.parametrize(("low", "high"), [("bfloat16", "float32"), ("float16", "float32")])
@pytest.mark.fast("bfloat16-*")
def test_mixed_dtypes_of_params_and_gradients(name, kind, low, high):
    """Gradients wider or narrower than their params: the params' dtypes stay, twice."""
    tx = transformation(name, kind)
    params = {"bias": PARAMS["bias"].astype(low), "kernel": PARAMS["kernel"].astype(high)}

    def crossed(p):
        swap = {"bias": high, "kernel": low}
        return {key: (0.5 * leaf).astype(swap[key]) for key, leaf in p.items()}

    def step(params, state):
        extra = {"grad_fn": crossed} if kind == "sharpness_aware" else {}
        updates, state = tx.update(crossed(params), state, params, **extra)
        return optax.apply_updates(params, updates), state

    first = jax.eval_shape(step, params, tx.init(params))
    second = jax.eval_shape(step, *first)
    assert signature(second) == signature(first)
    assert [x.dtype for x in first[0].values()] == [jnp.dtype(low), jnp.dtype(high)]


@pytest.mark.parametrize("grads", ["bfloat16", "float32"])
def test_one_dtype_of_updates_for_all_options(grads):
    """That of the base optimizer for the gradient, whatever surrounds it."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    grad_fn = lambda p: jax.tree.map(lambda x: (0.5 * x).astype(grads), p)
    expected, _ = BASE.update(grad_fn(params), BASE.init(params), params)
    for name, options in OPTIONS.items():
        tx = sam_optax.sharpness_aware(BASE, sam_optax.sam(0.1), **options)
        given = (lambda p, i: grad_fn(p)) if name == "groups" else grad_fn
        step = lambda s, g: tx.update(g, s, params, grad_fn=given)  # noqa: B023
        for run in (step, jax.jit(step)):
            for g in (None, grad_fn(params)):
                updates, _ = run(tx.init(params), g)
                assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(
                    jnp.result_type, expected
                ), name


def test_counts_saturate():
    """The largest training step stays it, as ``optax.safe_increment`` has it."""
    seen = []
    largest = jnp.iinfo(jnp.int32).max
    for combine in (sam_optax.sharpness_aware, sam_optax.alternating):
        when = lambda step: (seen.append(int(step)), True)[1]
        tx = combine(BASE, sam_optax.sam(0.1), when=when)
        state = tx.init(PARAMS)._replace(
            step=jnp.asarray(largest - 5, jnp.int32), skipped=jnp.asarray(10, jnp.int32)
        )
        seen.clear()
        for _ in range(2):
            _, state = tx.update(gradient(PARAMS), state, PARAMS, grad_fn=gradient)
        assert set(seen) == {largest}


def test_tree_map_params_of_a_mask_of_the_params():
    mask = {"bias": False, "kernel": True}
    for method in (
        sam_optax.perturb_only(sam_optax.fsam(0.1), mask),
        sam_optax.random_start(sam_optax.perturb_only(sam_optax.asam(0.1), mask), key=0),
        sam_optax.asam(0.1, bias_mask={"bias": True, "kernel": False}),
    ):
        tx = sam_optax.sharpness_aware(BASE, method)
        state = tx.init(PARAMS)
        ones = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf + 1, state)
        assert_same(ones.base_state[0].trace, jax.tree.map(jnp.ones_like, PARAMS))
        assert jax.tree.structure(ones) == jax.tree.structure(state)


# ---------------------------------------------------------------- restored without a target


@one_of_a_kind
@pytest.mark.parametrize("kind", ["sharpness_aware", "alternating"])
def test_a_state_restored_without_a_target(name, kind):
    if kind == "alternating" and name not in ONE_GRADIENT:
        pytest.skip("alternating takes one gradient a call")
    tx = transformation(name, kind)
    state = tx.init(PARAMS)
    plain = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    assert isinstance(plain, dict)
    for restored in (plain, list(plain.values()), tuple(plain.values())):
        with pytest.raises(TypeError, match=r"restored without a target.*that init returns"):
            update(tx, kind, PARAMS, restored)
    inner = state._replace(perturbation_state=plain["perturbation_state"])
    if isinstance(state.perturbation_state, tuple) and name != "by_hand":
        with pytest.raises(TypeError, match="restored without a target"):
            update(tx, kind, PARAMS, inner)


@one_of_a_kind
def test_a_base_optimizer_restored_without_a_target(name):
    tx = subject(name, "sgd")
    state = tx.init(PARAMS)
    plain = flax.serialization.to_state_dict(state.base_state)
    with pytest.raises((TypeError, ValueError, AttributeError, KeyError)):
        update(tx, "sharpness_aware", PARAMS, state._replace(base_state=plain))


@pytest.mark.parametrize("given", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("evaluated", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["sam", "rsam"])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"perturb_dtype": jnp.float32}])
@pytest.mark.fast("options0-*", "options1-*-bfloat16-float32")
def test_steps_that_perturb_and_others_agree_on_dtypes(name, options, evaluated, given):
    """Gradients in the params' dtype or wider, from the caller or from the function."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    cast = lambda dtype: jax.tree.map(lambda x: x.astype(dtype), params)
    for groups in {None, options.get("groups")}:
        tx = sam_optax.sharpness_aware(
            BASE, make(name), when=sam_optax.every(2), **{**options, "groups": groups}
        )

        def step(params, state, tx=tx):
            grads = cast(given) if given else None
            grad_fn = lambda p, *group: cast(evaluated)
            updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state

        first = jax.eval_shape(step, params, tx.init(params))
        assert signature(jax.eval_shape(step, *first)) == signature(first)
