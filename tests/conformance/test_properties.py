"""Properties that hold for any tree, shape and dtype, searched for counterexamples."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from helpers import leaves, norm, signature, vector

import sam_optax

# Deterministic, so that a run says the same every time; few examples, since each tree compiles.
settings = hypothesis.settings(
    derandomize=True,
    deadline=None,
    max_examples=10,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
ORDERS = st.sampled_from([1, 1.5, 2, 3, np.inf])
DTYPES = st.sampled_from([np.float16, jnp.bfloat16, np.float32])
# Few sizes, so that compiled operations are found again.
SHAPES = st.sampled_from([(), (3,), (2, 3), (2, 1, 3), (1,), (0,), (2, 1, 1, 3)])
NAMES = st.sampled_from(["kernel", "bias", "w", "b"])


@st.composite
def arrays(draw, shape, dtype):
    """Values over some orders of magnitude, zeros among them."""
    elements = st.sampled_from([0.0, 1.0, -1.0, 0.5, -2.0, 3.0, 2.0**-7, -100.0, 0.125, 7.5])
    values = draw(hnp.arrays(np.float32, shape, elements=elements))
    return jnp.asarray(values, dtype)


@st.composite
def trees(draw):
    """(params, gradient): nested dicts and lists of arrays, structure and dtypes in common."""
    leaf = st.tuples(SHAPES, DTYPES)
    skeleton = draw(
        st.recursive(
            leaf,
            lambda children: (
                st.dictionaries(NAMES, children, max_size=3) | st.lists(children, max_size=3)
            ),
            max_leaves=5,
        )
    )
    is_leaf = lambda node: isinstance(node, tuple)
    build = lambda: jax.tree.map(lambda spec: draw(arrays(*spec)), skeleton, is_leaf=is_leaf)
    return build(), build()


def op_by_op(function):
    """Runs a test without compiling a function for every tree."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.disable_jit():
            return function(*args, **kwargs)

    return wrapped


def epsilon(tree):
    """Relative error that the narrowest dtype of a tree's leaves may cause."""
    return 4 * max([float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(tree)], default=0) + 1e-5


@pytest.mark.slow
@settings
@hypothesis.given(trees(), ORDERS, st.floats(0.01, 5))
@op_by_op
def test_sam_has_its_radius_and_structure(tree, p, rho):
    _, g = tree
    method = sam_optax.sam(rho, p=p)
    eps, _ = method.update(g, method.init(g))
    assert signature(eps) == signature(g)
    if not np.any(vector(g)):
        assert norm(eps) == 0
        return
    expected = references.sam(leaves(g), rho, p)
    np.testing.assert_allclose(vector(eps), references.flatten(expected), atol=rho * epsilon(g))
    if p != np.inf:
        assert abs(norm(eps, p) - rho) <= rho * epsilon(g)


@pytest.mark.slow
@settings
@hypothesis.given(trees(), ORDERS, st.sampled_from([0.0, 0.01, 1.0]), st.booleans())
@op_by_op
def test_asam_has_its_radius_in_units_of_the_weights(tree, p, eta, filterwise):
    w, g = tree
    normalization = "filterwise" if filterwise else "elementwise"
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(w)]
    names = [[entry.key for entry in path if hasattr(entry, "key")] for path in paths]
    biases = [of_leaf[-1:] in (["bias"], ["b"]) for of_leaf in names]
    # The default finds the same ones, but warns of trees that have none.
    assert jax.tree.leaves(sam_optax.bias_leaves(w)) == biases
    mask = jax.tree.unflatten(jax.tree.structure(w), biases)
    method = sam_optax.asam(0.5, eta, p=p, normalization=normalization, bias_mask=mask)
    eps, _ = method.update(g, method.init(w), w)
    assert signature(eps) == signature(g)
    filters = [-1 if filterwise and x.ndim >= 4 else None for x in leaves(w)]
    operator = references.normalization(leaves(w), eta, biases, filters)
    t, v = references.flatten([np.zeros(0), *operator]), vector(g)
    if not np.any(t * v):
        assert norm(eps) == 0
        return
    assert not np.any(vector(eps)[t == 0])
    scaled = np.divide(vector(eps), t, out=np.zeros_like(t), where=t > 0)
    # Where T is large and |T^-1 eps| small, eps is rounded relative to its own size.
    if p == np.inf:
        np.testing.assert_allclose(np.abs(scaled[(t > 0) & (v != 0)]), 0.5, rtol=2 * epsilon(g))
    else:
        assert abs(np.linalg.norm(scaled, p) - 0.5) <= epsilon(g)
