"""What the ASAM paper proves, checked on the library: theorem 1 with its ends, and lemma 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import vector, x64

import sam_optax
from sam_optax import analysis


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
@pytest.mark.fast("2")
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
@pytest.mark.fast("filterwise")
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


# ---------------------------------------------------------------- where theorem 1 ends


def hidden_bias_net(params, x):
    first, second = params["first"], params["second"]
    return jax.nn.relu(x @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]


def both_measures(loss, params, rho=0.3, eta=0.0, **arguments):
    """The loss at ASAM's ε, and adaptive sharpness by several steps of ascent."""
    method = sam_optax.asam(rho, eta, **arguments)
    measured = analysis.adaptive_sharpness(loss, params, rho, eta, steps=5, restarts=0, **arguments)
    return np.array([perturbed_loss(method, params, loss), float(measured.value)])


@pytest.mark.slow
def test_a_hidden_bias_is_rescaled_and_its_normalization_is_not():
    """By default biases have T = 1: their layer's scale is seen. bias_mask=False, and it is not."""
    with x64():
        loss, params = cross_entropy(hidden_bias_net), relu_params()
        rng = np.random.default_rng(3)
        params["first"]["bias"] = jnp.asarray(rng.normal(size=5))
        second = params["second"]
        rescaled = {
            "first": jax.tree.map(lambda w: 10 * w, params["first"]),
            "second": second | {"kernel": second["kernel"] / 10},
        }
        assert float(loss(rescaled)) == pytest.approx(float(loss(params)), rel=1e-12)

        def change(**arguments):
            before = both_measures(loss, params, **arguments)
            return np.abs(both_measures(loss, rescaled, **arguments) / before - 1)

        assert np.all(change(bias_mask=False) < 1e-9)
        assert np.all(change() > 5e-3)
        assert np.all(change(bias_mask=False, eta=0.01) > 1e-4)


def two_convolutions(params, x):
    def convolve(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    hidden = jax.nn.relu(convolve(x.reshape(-1, 2, 2, 1), params["first"]))
    if params["second"].ndim == 2:  # a dense layer, which is normalized element-wise
        return hidden.mean((1, 2)) @ params["second"]
    return convolve(hidden, params["second"]).mean((1, 2))


@pytest.mark.parametrize(
    ("normalization", "second", "invariant"),
    [
        ("elementwise", (2, 2, 5, 3), True),
        ("filterwise", (2, 2, 5, 3), False),  # conv → ReLU → conv
        ("filterwise", (5, 3), True),  # conv → ReLU → pooling → dense
    ],
)
@pytest.mark.slow
def test_filterwise_ends_where_the_next_convolution_undoes_the_scale(
    normalization, second, invariant
):
    with x64():
        rng = np.random.default_rng(4)
        loss = cross_entropy(two_convolutions)
        params = {
            "first": jnp.asarray(rng.normal(size=(2, 2, 1, 5))),
            "second": jnp.asarray(rng.normal(size=second)),
        }
        scales = jnp.asarray([0.1, 1.0, 3.0, 20.0, 0.5])
        rescaled = {"first": params["first"] * scales, "second": params["second"] / scales[:, None]}
        assert float(loss(rescaled)) == pytest.approx(float(loss(params)), rel=1e-12)
        before = both_measures(loss, params, rho=0.1, normalization=normalization)
        after = both_measures(loss, rescaled, rho=0.1, normalization=normalization)
        if invariant:
            np.testing.assert_allclose(after, before, rtol=1e-9)
        else:  # adaptive sharpness is several times as large
            assert after[1] > 3 * before[1] > 0


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


# ---------------------------------------------------------------- lemma 1


def lemma_1_threshold(k, n, factor=1.0):
    """k (1 + √(log n/k))², in units of σ_max²; the factor is 1 in the lemma."""
    return k * (1 + factor * np.sqrt(np.log(n) / k)) ** 2


@pytest.mark.parametrize("n", [2, 100, 50_000])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_lemma_1_for_equal_variances(k, n):
    """P(Σ εᵢ² ≥ k σ² (1 + √(log n/k))²) ≤ 1/√n; here the left side is known."""
    assert scipy.stats.chi2.sf(lemma_1_threshold(k, n), k) <= 1 / np.sqrt(n)


def test_lemma_1_needs_its_logarithm():
    """Negative control: half of the term √(log n/k), or none of it, is too little."""
    for factor in (0.5, 0.0):
        tail = scipy.stats.chi2.sf(lemma_1_threshold(1000, 50_000, factor), 1000)
        assert tail > 2 / np.sqrt(50_000)


@pytest.mark.parametrize("eta", [0.05, 1.0])
def test_noise_lies_within_the_radius_of_theorem_2(eta):
    """What the proof takes from lemma 1: ‖T⁻¹ε‖ ≤ √k σ (1 + √(log n/k))/η in most draws.

    T⁻¹ε has variances σ²/Tᵢ², which differ from weight to weight, and T ≥ η.
    """
    with x64():
        params, sigma, n, draws = relu_params(), 0.3, 100, 4000
        params = jax.tree.map(lambda w: w * (jnp.abs(w) > 0.5), params)  # many at T = η
        ones = jax.tree.map(jnp.ones_like, params)
        method = sam_optax.asam(1.0, eta, p=np.inf, bias_mask=False)
        operator = vector(method.update(ones, method.init(params), params)[0])
        assert operator.min() == pytest.approx(eta)
        k = operator.size
        noise = sigma * np.random.default_rng(6).normal(size=(draws, k))
        norms = np.linalg.norm(noise / operator, axis=1)
        radius = sigma * np.sqrt(lemma_1_threshold(k, n)) / eta
        assert np.mean(norms >= radius) <= 1 / np.sqrt(n)
        # Negative control: the least T counts, and not its root mean square.
        too_small = radius * eta / np.sqrt(np.mean(operator**2))
        assert np.mean(norms >= too_small) > 1 / np.sqrt(n)
