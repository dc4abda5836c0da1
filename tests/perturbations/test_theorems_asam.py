"""What the ASAM paper proves, checked on the library: theorem 1, scale invariance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import vector, x64

import sam_optax


def relu_net(params, x):
    hidden = jax.nn.relu(x @ params["first"]["kernel"])
    return hidden @ params["second"]["kernel"] + params["second"]["bias"]


def relu_params():
    rng = np.random.default_rng(0)
    return {
        "first": {"kernel": jnp.asarray(rng.normal(size=(4, 5)))},
        "second": {
            "kernel": jnp.asarray(rng.normal(size=(5, 3))),
            "bias": jnp.asarray(rng.normal(size=3)),
        },
    }


def rescale(params, unit, a):
    """What comes into a hidden unit times a, what goes out of it divided by a: same function."""
    first, second = params["first"]["kernel"], params["second"]["kernel"]
    return {
        "first": {"kernel": first.at[:, unit].multiply(a)},
        "second": params["second"] | {"kernel": second.at[unit].divide(a)},
    }


def data():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(20, 4))), jnp.asarray(rng.integers(3, size=20))


def cross_entropy(net):
    x, y = data()

    @jax.jit
    def loss(params):
        log_p = jax.nn.log_softmax(net(params, x))
        return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))

    return loss


def perturbed_loss(method, params, loss):
    perturbed, _ = method.perturb_fn(params, jax.grad(loss)(params), method.init(params))
    return float(loss(perturbed))


@pytest.mark.parametrize("p", [1.5, 2, np.inf])
def test_asam_is_invariant_to_rescaling(p):
    with x64():
        loss, params = cross_entropy(relu_net), relu_params()
        rescaled = rescale(rescale(params, 1, 7.0), 3, 0.2)
        assert float(loss(rescaled)) == pytest.approx(float(loss(params)), rel=1e-12)

        def gap(method):
            return abs(
                perturbed_loss(method, rescaled, loss) - perturbed_loss(method, params, loss)
            )

        gaps = [gap(sam_optax.asam(0.3, eta, p=p)) for eta in (1e-2, 1e-4, 1e-6, 0.0)]
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[-1] < 1e-12
        assert gaps[0] > 1e-5  # η is what breaks it
        rise = perturbed_loss(sam_optax.asam(0.3, 0.0, p=p), params, loss) - float(loss(params))
        assert rise > 1e-2
        assert gap(sam_optax.sam(0.3, p=p)) > 1e-3  # SAM's sharpness does change


def test_asam_displacement_scales_with_the_weights():
    with x64():
        loss, params = cross_entropy(relu_net), relu_params()
        rescaled = rescale(params, 2, 50.0)
        method = sam_optax.asam(0.3, 0.0)
        eps, _ = method.update(jax.grad(loss)(params), (), params)
        other, _ = method.update(jax.grad(loss)(rescaled), (), rescaled)
        np.testing.assert_allclose(vector(other), vector(rescale(eps, 2, 50.0)), rtol=1e-9)


def normalized_conv(params, x):
    """Filters whose scale does not matter, because each channel is standardized."""
    y = jax.lax.conv(x.reshape(-1, 1, 2, 2), params["conv"].transpose(3, 2, 0, 1), (1, 1), "SAME")
    y = (y - y.mean((0, 2, 3), keepdims=True)) / y.std((0, 2, 3), keepdims=True)
    return jax.nn.relu(y).mean((2, 3)) @ params["out"]


@pytest.mark.parametrize("normalization", ["elementwise", "filterwise"])
def test_asam_is_invariant_to_the_scale_of_filters(normalization):
    with x64():
        rng = np.random.default_rng(2)
        loss = cross_entropy(normalized_conv)
        params = {
            "conv": jnp.asarray(rng.normal(size=(2, 2, 1, 5))),
            "out": jnp.asarray(rng.normal(size=(5, 3))),
        }
        scales = jnp.asarray([0.1, 1.0, 3.0, 20.0, 0.5])
        rescaled = params | {"conv": params["conv"] * scales}
        method = sam_optax.asam(0.3, 0.0, normalization=normalization)
        before = perturbed_loss(method, params, loss)
        assert perturbed_loss(method, rescaled, loss) == pytest.approx(before, rel=1e-12)
        # Filters on another axis are not what was rescaled; SAM knows of no scale at all.
        others = [sam_optax.sam(0.3)]
        if normalization == "filterwise":
            others.append(sam_optax.asam(0.3, 0.0, normalization="filterwise", filter_axis=0))
        for other in others:
            change = perturbed_loss(other, rescaled, loss) - perturbed_loss(other, params, loss)
            assert abs(change) > 1e-3


@pytest.mark.parametrize("shift", [0.5, -3.0, 100.0])
def test_asam_is_invariant_to_translations_of_biases(shift):
    """Softmax does not see a common shift of the output biases; neither does the sharpness."""
    with x64():
        loss, params = cross_entropy(relu_net), relu_params()
        second = params["second"]
        moved = params | {"second": second | {"bias": second["bias"] + shift}}
        method = sam_optax.asam(0.3, 0.0)
        before = perturbed_loss(method, params, loss)
        assert perturbed_loss(method, moved, loss) == pytest.approx(before, rel=1e-10)
        normalized = sam_optax.asam(0.3, 0.0, bias_mask=False)
        change = perturbed_loss(normalized, moved, loss) - perturbed_loss(normalized, params, loss)
        assert abs(change) > 1e-4
