"""Directions and slices through the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, norm
from nets import dataset, relu_net, rescale

import sam_optax
from sam_optax import analysis


@pytest.mark.slow
def test_random_directions_have_the_size_of_the_weights():
    params = relu_net()
    direction = analysis.random_direction(params, 0)
    for layer in ("first", "second"):
        found, expected = (np.linalg.norm(t[layer]["kernel"], axis=0) for t in (direction, params))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert norm(direction["second"]["bias"]) == 0
    kept = analysis.random_direction(params, 0, vectors="keep")["second"]["bias"]
    assert norm(kept) == pytest.approx(norm(params["second"]["bias"]), rel=1e-5)
    assert norm(analysis.between(direction, analysis.random_direction(params, 1))) > 1


def test_layouts_with_the_output_first():
    w = {"weight": jnp.arange(1.0, 7.0).reshape(2, 3)}
    direction = analysis.filter_normalized({"weight": jnp.ones((2, 3))}, w, kernel_axis=0)["weight"]
    rows = np.linalg.norm(np.asarray(direction), axis=1)
    np.testing.assert_allclose(rows, np.linalg.norm(np.asarray(w["weight"]), axis=1), rtol=1e-6)


def test_slices_do_not_change_when_weights_are_rescaled():
    """What filter normalization is for, kernel by kernel; without it they do change."""
    params, loss, alphas = relu_net(), dataset(), jnp.linspace(-1, 1, 5)
    scaled = functools.reduce(lambda w, unit: rescale(w, unit, 4.0), range(5), params)
    draw = relu_net(2)
    normalized, raw = (
        [analysis.loss_line(loss, w, direction(w), alphas).values for w in (params, scaled)]
        for direction in (lambda w: analysis.filter_normalized(draw, w), lambda w: draw)
    )
    np.testing.assert_allclose(*normalized, rtol=1e-4)
    assert np.abs(np.subtract(*raw)).max() > 0.1


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
    d1, d2 = (analysis.random_direction(params, i) for i in (0, 1))
    plane = analysis.loss_plane(loss, params, d1, d2, [0.0, 0.5], [0.0, -0.5, 1.0])
    assert plane.values.shape == (2, 3)
    for i, alpha in enumerate(plane.first):
        for j, beta in enumerate(plane.second):
            point = jax.tree.map(lambda w, x, y, a=alpha, b=beta: w + a * x + b * y, params, d1, d2)
            assert float(plane.values[i, j]) == pytest.approx(float(loss(point)), rel=1e-5)


def test_leaves_that_are_no_weights_and_dtypes():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16), "n": jnp.array(2), "none": None}
    seen = []

    def loss(p):
        seen.append((p["w"].dtype, p["n"].dtype))
        return p["n"] * jnp.sum(p["w"].astype(jnp.float32))

    direction = analysis.random_direction(params, 0)
    assert direction["n"] is None
    line = analysis.loss_line(loss, params, direction, [0.0])
    assert float(line.values[0]) == 8
    assert seen == [(jnp.bfloat16, jnp.int32)] * len(seen)


def test_errors():
    with pytest.raises(ValueError, match="vectors must be 'zero' or 'keep'"):
        analysis.filter_normalized(jnp.ones((2, 2)), jnp.ones((2, 2)), vectors="drop")
