"""Theorem 1 of the ASAM paper, checked on the library, and where it ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import x64
from nets import cross_entropy, dataset, relu_net, rescale

import sam_optax
from sam_optax import analysis

SCALES = np.array([0.1, 1.0, 3.0, 20.0, 0.5])


def normal(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


def loss_of(network):
    """Its cross entropy on the data of the other networks."""
    losses = lambda params, batch: cross_entropy(network(params, batch[0]), batch[1])
    return dataset(losses=losses, dtype=jnp.float64)


def measures(loss, params, eta=0.0, rho=0.3, **options):
    """The rise at ASAM's ε, and adaptive sharpness by several steps of ascent."""
    rise = analysis.loss_rise(loss, params, sam_optax.asam(rho, eta, **options))
    options |= {"steps": 5, "restarts": 0}
    return np.array([rise, analysis.adaptive_sharpness(loss, params, rho, eta, **options).value])


def change(loss, params, rescaled, measure=measures, **options):
    """The relative change of the measures by a rescaling that keeps the loss."""
    assert float(loss(rescaled)) == pytest.approx(float(loss(params)), rel=1e-12)
    before = measure(loss, params, **options)
    assert np.all(before > 1e-3)
    return np.abs(measure(loss, rescaled, **options) / before - 1)


def sam(loss, params, **options):
    return np.array([analysis.loss_rise(loss, params, sam_optax.sam(0.3, **options))])


@pytest.mark.parametrize("p", [1.5, 2, np.inf])
@pytest.mark.slow
def test_asam_is_invariant_to_rescaling(p):
    with x64():
        loss, params = dataset(dtype=jnp.float64), relu_net(dtype=jnp.float64)
        of = loss, params, rescale(rescale(params, 1, 7.0), 3, 0.2)
        changes = [change(*of, eta=eta, p=p)[0] for eta in (1e-2, 1e-4, 1e-6)]
        assert changes == sorted(changes, reverse=True)
        assert changes[0] > 1e-5  # η is what breaks it
        assert np.all(change(*of, p=p) < 1e-9)
        assert change(*of, sam, p=p) > 1e-3


def test_asam_is_invariant_to_translations_of_biases():
    """Softmax does not see a common shift of the output biases; neither does the sharpness."""
    with x64():
        loss, params = dataset(dtype=jnp.float64), relu_net(dtype=jnp.float64)
        second = params["second"]
        of = loss, params, params | {"second": second | {"bias": second["bias"] + 100.0}}
        assert np.all(change(*of) < 1e-9)
        assert np.all(change(*of, bias_mask=False) > 1e-3)


@pytest.mark.slow
def test_a_hidden_bias_is_rescaled_and_its_normalization_is_not():
    """By default biases have T = 1: their layer's scale is seen. bias_mask=False, and it is not."""

    def network(params, x):
        hidden = jax.nn.relu(x @ params["kernel"] + params["bias"])
        return hidden @ params["out"]

    with x64():
        params = normal(3, kernel=(4, 5), bias=5, out=(5, 3))
        rescaled = {k: w / 10 if k == "out" else 10 * w for k, w in params.items()}
        of = loss_of(network), params, rescaled
        assert np.all(change(*of, bias_mask=False) < 1e-9)
        assert np.all(change(*of) > 5e-3)
        assert np.all(change(*of, bias_mask=False, eta=0.01) > 1e-4)


@pytest.mark.slow
def test_filterwise_asam_is_invariant_to_the_scale_of_filters():
    """Which does not matter where each channel is standardized."""

    def network(params, x):
        images, kernel = x.reshape(-1, 1, 2, 2), params["conv"].transpose(3, 2, 0, 1)
        y = jax.lax.conv(images, kernel, (1, 1), "SAME")
        y = (y - y.mean((0, 2, 3), keepdims=True)) / y.std((0, 2, 3), keepdims=True)
        return jax.nn.relu(y).mean((2, 3)) @ params["out"]

    with x64():
        params = normal(2, conv=(2, 2, 1, 5), out=(5, 3))
        of = loss_of(network), params, params | {"conv": params["conv"] * SCALES}
        assert np.all(change(*of, normalization="filterwise") < 1e-9)
        # Filters on another axis are not what was rescaled; SAM knows of no scale at all.
        assert change(*of, normalization="filterwise", filter_axis=0)[0] > 1e-3
        assert change(*of, sam) > 1e-3


@pytest.mark.slow
def test_filterwise_ends_where_the_next_convolution_undoes_the_scale():
    """conv → ReLU → conv: adaptive sharpness is several times as large, element-wise the same."""

    def convolve(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    def network(params, x):
        hidden = jax.nn.relu(convolve(x.reshape(-1, 2, 2, 1), params["first"]))
        return convolve(hidden, params["second"]).mean((1, 2))

    with x64():
        params = normal(4, first=(2, 2, 1, 5), second=(2, 2, 5, 3))
        inverse = params["second"] / SCALES[:, None]
        of = loss_of(network), params, {"first": params["first"] * SCALES, "second": inverse}
        assert np.all(change(*of, rho=0.1) < 1e-9)
        assert change(*of, rho=0.1, normalization="filterwise")[1] > 2
