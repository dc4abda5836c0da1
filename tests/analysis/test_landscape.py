"""Directions and slices through the loss."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import norm
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


def test_the_loss_is_evaluated_at_params_of_their_dtype():
    seen = []
    loss = lambda w: (seen.append(w.dtype), jnp.sum(w.astype(jnp.float32)))[1]
    line = analysis.loss_line(loss, jnp.ones(4, jnp.bfloat16), jnp.ones(4), [0.5])
    assert float(line.values[0]) == 6
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}


def test_errors():
    with pytest.raises(ValueError, match="vectors must be 'zero' or 'keep'"):
        analysis.filter_normalized(jnp.ones((2, 2)), jnp.ones((2, 2)), vectors="drop")
