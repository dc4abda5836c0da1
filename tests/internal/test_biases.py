"""Which leaves ASAM takes for biases, in the trees of the libraries that people use (case 40)."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sam_optax


def paths(params, mask):
    """The paths that a mask holds true."""
    found = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(mask), strict=True)
    return {jax.tree_util.keystr(path) for (path, _), chosen in found if chosen}


def biases(params):
    return paths(params, sam_optax.bias_leaves(params))


def unnormalized(params, **arguments):
    """Where T = 1: with p = ∞ and ρ = 1, ε = T sign(g)."""
    params = jax.tree.map(lambda w: jnp.full_like(w, 2.0), params)
    method = sam_optax.asam(1.0, 0.0, p=np.inf, **arguments)
    ones = jax.tree.map(jnp.ones_like, params)
    eps, _ = method.update(ones, method.init(params), params)
    return paths(params, jax.tree.map(lambda e: bool(jnp.all(e == 1)), eps))


def v(*shape):
    return jnp.full(shape or (2,), 2.0)


BIASES = [
    *("bias", "b", "b1", "b_1", "offset", "beta", "biases"),  # whole names
    *("bias_n", "hn_bias", "in_proj_bias", "bias_ih_l0", "bias_hh_l0_reverse", "bias_2"),
    *("dense/bias", "batch_normalization/beta", "rnn.bias_ih_l0", "layers.0.bias"),
]
WEIGHTS = [
    *("kernel", "w", "weight", "scale", "gamma", "embedding", "weight_ih_l0", "lora_b", "B"),
    *("mybias", "debias", "unbiased", "alpha", "beta_1", "bx", "offset_net", "bias/kernel"),
]


def test_names_of_biases_and_of_weights():
    params = {name: v() for name in BIASES + WEIGHTS}
    assert biases(params) == unnormalized(params) == {f"['{name}']" for name in BIASES}


class Named:
    """An array with named axes, flattened as haliax does it: the array has an index, no name."""

    def __init__(self, array):
        self.array = array


jax.tree_util.register_pytree_node(Named, lambda x: ((x.array,), None), lambda _, c: Named(*c))


class Boxed(eqx.Module):
    array: jax.Array


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"l": {"bias": Named(v()), "weight": Named(v(2, 2))}}, {"['l']['bias'][<flat index 0>]"}),
        ({"bias": Boxed(v()), "weight": Boxed(v(2, 2))}, {"['bias'].array"}),
        ({"bias": [v(), v()], "w": [v(2, 2)]}, {"['bias'][0]", "['bias'][1]"}),
        ({"bias": {"0": v()}, "w": v(2, 2)}, {"['bias']['0']"}),
        ({"bias": {"kernel": v(2, 2)}, "dense": {"bias": v()}}, {"['dense']['bias']"}),
    ],
)
def test_indices_and_boxes_behind_a_name_are_skipped(params, expected):
    assert biases(params) == unnormalized(params) == expected


def test_the_mask_has_the_structure_of_the_params_and_can_be_edited():
    params = {"a": {"bias": v(), "frozen": None}, "n": 3, "k": v(2, 2)}
    mask = sam_optax.bias_leaves(params)
    assert mask == {"a": {"bias": True, "frozen": None}, "n": False, "k": False}
    params = {"bias": v(), "shift": v(), "kernel": v(2, 2)}
    mask = sam_optax.bias_leaves(params) | {"shift": True}
    assert unnormalized(params, bias_mask=mask) == {"['bias']", "['shift']"}


# ---------------------------------------------------------------- the warning


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([v(2, 2), v(), v(2, 2), v()], ["have no names", "[1], [3]", "bias_mask"]),  # Keras
        ({"w": v(2, 2), "c": v()}, ["is called a bias", "['c']", "bias_mask=False"]),
        ([v(), v(), v(2, 2), v(), v()], ["[0], [1], [3], …"]),
    ],
)
def test_no_bias_found_warns(params, words):
    with pytest.warns(UserWarning, match="asam found no biases") as caught:
        sam_optax.asam().init(params)
    (warning,) = caught
    for word in words:
        assert word in str(warning.message)


@pytest.mark.parametrize(
    ("params", "arguments"),
    [
        ({"w": v(2, 2), "bias": v()}, {}),
        ({"w": v(2, 2), "n": jnp.arange(3), "frozen": None}, {}),  # no shape of a bias
        ([v(2, 2), v()], {"bias_mask": False}),
        ([v(2, 2), v()], {"bias_mask": [False, True]}),
        ({"a": v(3), "c": v(), "d": jnp.ones(())}, {}),  # vectors are not a network
        ({}, {}),
    ],
)
def test_no_warning(params, arguments):
    sam_optax.asam(**arguments).init(params)  # warnings are errors in these tests


def test_axes_that_stack_layers_do_not_hide_what_may_be_a_bias():
    with pytest.warns(UserWarning, match="found no biases"):
        sam_optax.asam(stack_axes=1).init([v(3, 2, 2), v(3, 2)])
    sam_optax.asam().init([v(3, 2, 2), v(3, 2)])  # two axes, for all that is known


@pytest.mark.skipif(not hasattr(jax, "typeof"), reason="an older jax repeats the warning")
def test_training_warns_once():
    """Under Python's own filter, for several models and steps that are not compiled."""
    params = [v(2, 2), v()]
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.asam())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            state = tx.init(params)
            for _ in range(2):
                _, state = tx.update(None, state, params, grad_fn=lambda w: w)
    assert [str(w.message)[:20] for w in caught] == ["asam found no biases"]
