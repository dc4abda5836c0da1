"""Directions and slices through the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, norm
from nets import dataset, relu_net, rescale

import sam_optax
from sam_optax import analysis


def column_norms(kernel):
    return np.linalg.norm(np.asarray(kernel), axis=0)


@pytest.mark.slow
def test_random_directions_have_the_size_of_the_weights():
    params = relu_net()
    direction = analysis.random_direction(params, jax.random.key(0))
    for layer in ("first", "second"):
        expected = column_norms(params[layer]["kernel"])
        np.testing.assert_allclose(column_norms(direction[layer]["kernel"]), expected, rtol=1e-5)
    assert norm(direction["second"]["bias"]) == 0
    kept = analysis.random_direction(params, jax.random.key(0), vectors="keep")
    bias = params["second"]["bias"]
    assert norm(kept["second"]["bias"]) == pytest.approx(norm(bias), rel=1e-5)
    other = analysis.random_direction(params, jax.random.key(1))
    assert norm(jax.tree.map(jnp.subtract, direction, other)) > 1


def test_layouts_with_the_output_first():
    w = {"weight": jnp.arange(1.0, 7.0).reshape(2, 3)}
    direction = analysis.filter_normalized({"weight": jnp.ones((2, 3))}, w, kernel_axis=0)["weight"]
    rows = np.linalg.norm(np.asarray(direction), axis=1)
    np.testing.assert_allclose(rows, np.linalg.norm(np.asarray(w["weight"]), axis=1), rtol=1e-6)


@pytest.mark.slow
def test_slices_do_not_change_when_weights_are_rescaled():
    """What filter normalization is for, kernel by kernel; without it they do change."""
    params, loss = relu_net(), dataset()
    alphas = jnp.linspace(-1, 1, 5)
    scaled = params
    for unit in range(5):
        scaled = rescale(scaled, unit, 4.0)
    # A rescaling of one layer as a whole: the normalized direction scales with it.
    draw = {
        "first": {"kernel": jax.random.normal(jax.random.key(0), (4, 5))},
        "second": jax.tree.map(jnp.ones_like, params["second"]),
    }
    slices = [
        analysis.loss_line(loss, w, analysis.filter_normalized(draw, w), alphas).values
        for w in (params, scaled)
    ]
    np.testing.assert_allclose(slices[0], slices[1], rtol=1e-4)
    raw = [analysis.loss_line(loss, w, draw, alphas).values for w in (params, scaled)]
    assert float(jnp.max(jnp.abs(raw[0] - raw[1]))) > 0.1


def test_a_line_along_the_gradient_is_the_path_of_sam():
    params, loss = relu_net(), dataset()
    direction = analysis.gradient_direction(loss, params)
    assert norm(direction) == pytest.approx(1, rel=1e-5)
    line = analysis.loss_line(loss, params, direction, [0.0, 0.3])
    rise = analysis.loss_rise(loss, params, sam_optax.sam(0.3))
    assert float(line.values[1] - line.values[0]) == pytest.approx(float(rise), rel=1e-4)


def test_a_line_between_checkpoints_ends_at_both():
    first, second, loss = relu_net(0), relu_net(1), dataset()
    line = analysis.loss_line(loss, first, analysis.between(first, second), [0.0, 0.5, 1.0])
    middle = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    assert_close(line.values, jnp.stack([loss(w) for w in (first, middle, second)]), rtol=1e-5)


@pytest.mark.slow
def test_a_plane():
    params, loss = relu_net(), dataset()
    d1, d2 = (analysis.random_direction(params, jax.random.key(i)) for i in (0, 1))
    plane = analysis.loss_plane(loss, params, d1, d2, [0.0, 0.5], [0.0, -0.5, 1.0])
    assert plane.values.shape == (2, 3)
    for i, alpha in enumerate(plane.first):
        for j, beta in enumerate(plane.second):
            point = jax.tree.map(lambda w, x, y, a=alpha, b=beta: w + a * x + b * y, params, d1, d2)
            assert float(plane.values[i, j]) == pytest.approx(float(loss(point)), rel=1e-5)


def test_along_an_eigenvector_the_loss_bends_by_its_eigenvalue():
    loss = lambda w: jnp.sum(jnp.array([3.0, 1.0]) * w["a"] ** 2) / 2
    params = {"a": jnp.zeros(2)}
    found = analysis.hessian_eigenvalues(loss, params, 1)
    vector = jax.tree.map(lambda leaf: leaf[0], found.vectors)
    line = analysis.loss_line(loss, params, vector, [0.2])
    assert float(line.values[0]) == pytest.approx(3 * 0.2**2 / 2, rel=1e-4)


def test_leaves_that_are_no_weights_and_dtypes():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16), "n": jnp.array(2), "none": None}
    seen = []

    def loss(p):
        seen.append((p["w"].dtype, p["n"].dtype))
        return p["n"] * jnp.sum(p["w"].astype(jnp.float32))

    direction = analysis.random_direction(params, jax.random.key(0))
    assert direction["n"] is None
    line = analysis.loss_line(loss, params, direction, [0.0])
    assert float(line.values[0]) == 8
    assert seen == [(jnp.bfloat16, jnp.int32)] * len(seen)


def test_errors():
    with pytest.raises(ValueError, match="vectors must be 'zero' or 'keep'"):
        analysis.filter_normalized(jnp.ones((2, 2)), jnp.ones((2, 2)), vectors="drop")
    with pytest.raises(TypeError, match="key must be an integer seed or one PRNG key"):
        analysis.random_direction(jnp.ones((2, 2)), 0.5)
