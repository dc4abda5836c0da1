"""R-SAM against its formula given the noise, its options, its limits and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from helpers import assert_close, assert_same, leaves, norm, precision, same, vector, x64

import sam_optax

KEY = jax.random.key(7)
SCALES = ("relative", "sqrt_norm", "norm", "isotropic")
WEIGHTINGS = ("normalized", "normalized_gradient", "raw")
PAPER = {"noise_scale": "sqrt_norm", "weighting": "raw"}
"""Equation (7) and algorithm 1, read literally."""
GAMMA, LMBDA = 0.1, 2.0


def tree(dtype=jnp.float32, seed=0):
    """Params or a gradient; leaves in order: conv kernel, dense bias, dense kernel, scale."""
    rng = np.random.default_rng(seed)
    shapes = {"conv": (2, 1, 2, 3), "dense": {"bias": (3,), "kernel": (4, 3)}, "scale": ()}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def noise(method, params, state=None):
    """δ₀ as the start shows it; exact in float64, where params + δ₀ rounds at 1e-16."""
    state = method.init(params) if state is None else state
    start = method.start_fn(params, state)
    return [s - w for s, w in zip(leaves(start), leaves(params), strict=True)]


@pytest.mark.parametrize(("dtype", "tol"), [(jnp.float64, 1e-12), (jnp.float32, 5e-6)])
@pytest.mark.parametrize(("gamma", "lmbda"), [(0.1, 1.0), (0.5, 0.3), (0.2, 0.0)])
@pytest.mark.fast("0.5-*-float64-*")
def test_is_the_papers_formula(dtype, tol, gamma, lmbda):
    with precision(dtype):
        w, g_hat = tree(dtype, 0), tree(dtype, 1)
        method = sam_optax.rsam(0.3, gamma, lmbda, key=KEY, **PAPER)
        state = method.init(w)
        expected = references.rsam(noise(method, w, state), leaves(g_hat), 0.3, lmbda)
        assert_close(jax.jit(method.update)(g_hat, state, w)[0], expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("noise_scale", SCALES)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("lmbda", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.fast("0.3-normalized-relative")
@pytest.mark.sample("0.3-*", "4.0-*", "0.0-normalized-*")
def test_every_scale_with_every_weighting(noise_scale, weighting, lmbda):
    with x64():
        w, g_hat = tree(jnp.float64, 0), tree(jnp.float64, 1)
        options = {"noise_scale": noise_scale, "weighting": weighting}
        method = sam_optax.rsam(0.3, 0.2, lmbda, key=KEY, **options)
        std = [references.kernel_std(leaf, 0.2, -1, noise_scale) for leaf in leaves(w)]
        delta = noise(method, w)
        eps = method.update(g_hat, method.init(w), w)[0]
        scheduled = sam_optax.rsam(0.3, 0.2, lambda t: jnp.asarray(lmbda), key=KEY, **options)
        assert_close(scheduled.update(g_hat, scheduled.init(w), w)[0], eps, 1e-12)
        formula = lambda name: references.rsam(delta, leaves(g_hat), 0.3, lmbda, name, std)
        assert_close(eps, formula(weighting), 1e-9)
        for other in set(WEIGHTINGS) - {weighting}:  # negative control
            assert (
                lmbda == 0 or np.abs(vector(eps) - references.flatten(formula(other))).max() > 1e-3
            )


def test_defaults():
    """Relative noise, both terms of unit length, γ = 0.1, λ = 2: as if all of it were given."""
    w, g_hat = tree(seed=0), tree(seed=1)
    options = {"noise_scale": "relative", "weighting": "normalized"}
    given = sam_optax.rsam(0.05, GAMMA, LMBDA, key=KEY, **options)
    default = sam_optax.rsam(key=KEY)
    state = default.init(w)
    assert_same(default.update(g_hat, state, w)[0], given.update(g_hat, state, w)[0])
    assert_same(default.start_fn(w, state), given.start_fn(w, state))


@pytest.mark.parametrize("width", [8, 64, 512])
@pytest.mark.parametrize("gradient", [1e-4, 1.0, 1e3])
@pytest.mark.slow
def test_by_default_both_terms_count_at_every_size(width, gradient):
    """Cosines of ε with δ₀ and with ĝ; read literally, the noise drowns small gradients."""
    rng = np.random.default_rng(0)
    sizes = {"in": (width, width), "out": (width, 10)}
    w = {name: jnp.asarray(rng.normal(size=s) / width**0.5, "float32") for name, s in sizes.items()}
    g = {name: jnp.asarray(rng.normal(size=s) * gradient, "float32") for name, s in sizes.items()}

    def cosines(**options):
        method = sam_optax.rsam(key=KEY, **options)
        eps = vector(method.update(g, method.init(w), w)[0])
        delta = references.flatten(noise(method, w))
        cosine = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        return cosine(eps, delta), cosine(eps, vector(g))

    assert min(cosines()) > 0.3
    # Negative control: equation (7) as it stands.
    assert gradient == 1.0 or min(cosines(**PAPER)) < 0.3


@pytest.mark.parametrize("noise_scale", SCALES)
def test_the_length_of_the_noise_is_what_is_expected(noise_scale):
    """‖δ₀‖² of relative noise is γ²‖w‖², kernel by kernel and in all; zero kernels get none."""
    rng = np.random.default_rng(0)
    w = {
        "kernel": jnp.asarray(rng.normal(size=(5000, 3)) * [0.0, 1.0, 9.0], jnp.float32),
        "bias": jnp.zeros(3),
    }
    method = sam_optax.rsam(gamma=0.1, key=KEY, noise_scale=noise_scale)
    bias, kernel = noise(method, w)
    std = references.kernel_std(leaves(w)[1], 0.1, -1, noise_scale)
    np.testing.assert_allclose(
        np.linalg.norm(kernel, axis=0), np.linalg.norm(std, axis=0), rtol=0.05, atol=1e-5
    )
    assert np.any(bias != 0) == np.any(kernel[:, 0] != 0) == (noise_scale == "isotropic")
    if noise_scale == "relative":
        size = np.linalg.norm(kernel, axis=0)
        np.testing.assert_allclose(size, 0.1 * np.linalg.norm(leaves(w)[1], axis=0), rtol=0.05)


def test_wrong_formulas_are_told_apart():
    """Negative controls: noise left out of ε, noise on top of the radius, gradient normalized."""
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        method = sam_optax.rsam(0.3, 0.5, 0.7, key=KEY, **PAPER)
        eps = vector(method.update(g, method.init(w), w)[0])
        delta, g = references.flatten(noise(method, w)), vector(g)
        unit = g / np.linalg.norm(g)
        for wrong in (0.3 * unit, delta + 0.3 * unit, 0.3 * (delta + 0.7 * unit), -eps):
            assert np.abs(eps - wrong).max() > 1e-2
        ratio = (delta + 0.7 * unit) / np.linalg.norm(delta + 0.7 * unit)
        assert np.abs(eps - 0.3 * ratio).max() > 1e-2


@pytest.mark.parametrize("noise_scale", SCALES)
@pytest.mark.parametrize("kernel_axis", [-1, 0])
@pytest.mark.slow
def test_standard_deviation_of_each_kernel(noise_scale, kernel_axis):
    """The same draw under another scale, with z read off isotropic noise."""
    with x64():
        w = tree(jnp.float64)
        z = noise(sam_optax.rsam(gamma=1.0, noise_scale="isotropic", key=KEY), w)
        options = {"noise_scale": noise_scale, "kernel_axis": kernel_axis}
        delta = noise(sam_optax.rsam(gamma=0.3, key=KEY, **options), w)
        for d, leaf, sample in zip(delta, leaves(w), z, strict=True):
            std = references.kernel_std(leaf, 0.3, kernel_axis, noise_scale)
            np.testing.assert_allclose(d, std * sample, atol=1e-7)


def test_kernel_axis_by_function():
    with x64():
        w = tree(jnp.float64)

        def axis_of(path, leaf):
            return 2 if leaf.ndim == 4 else None

        z = noise(sam_optax.rsam(gamma=1.0, noise_scale="isotropic", key=KEY), w)
        delta = noise(sam_optax.rsam(gamma=0.3, kernel_axis=axis_of, key=KEY), w)
        for d, leaf, sample in zip(delta, leaves(w), z, strict=True):
            std = references.kernel_std(leaf, 0.3, 2 if leaf.ndim == 4 else None, "relative")
            np.testing.assert_allclose(d, std * sample, atol=1e-7)


@pytest.mark.parametrize(
    ("weighting", "lmbda"), [("normalized", 1.0), ("normalized", 0.7), ("raw", 1.0)]
)
@pytest.mark.parametrize("noise_scale", SCALES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.fast("float32-isotropic-*", "bfloat16-relative-normalized-*")
@pytest.mark.sample("*-normalized-1.0", "bfloat16-*")
def test_gamma_0_is_sam_to_the_bit(noise_scale, weighting, lmbda, dtype):
    w, g = tree(dtype, seed=0), tree(dtype, seed=1)
    options = {"noise_scale": noise_scale, "weighting": weighting}
    method = sam_optax.rsam(0.3, gamma=0.0, lmbda=lmbda, key=KEY, **options)
    state = method.init(w)
    assert_same(method.start_fn(w, state), w)
    assert_same(method.update(g, state, w)[0], sam_optax.sam(0.3).update(g, ())[0])


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("lmbda", [0.5, 1.0, 7.0])
def test_gamma_0_is_sam_for_any_lmbda(weighting, lmbda):
    w, g = tree(seed=0), tree(seed=1)
    method = sam_optax.rsam(0.3, 0.0, lmbda, key=KEY, weighting=weighting)
    assert_close(method.update(g, method.init(w), w)[0], sam_optax.sam(0.3).update(g, ())[0], 1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("lmbda", [0.0, 1.0, 10.0])
def test_radius_holds_noise_and_gradient(lmbda, weighting):
    w, g = tree(seed=0), tree(seed=1)
    method = sam_optax.rsam(0.3, 0.5, lmbda, key=KEY, weighting=weighting)
    assert norm(method.update(g, method.init(w), w)[0]) == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_zero_gradient_leaves_the_noise(weighting):
    with x64():
        w = tree(jnp.float64)
        method = sam_optax.rsam(0.3, key=KEY, weighting=weighting)
        zeros = jax.tree.map(jnp.zeros_like, w)
        delta = noise(method, w)
        eps = method.update(zeros, method.init(w), w)[0]
        assert_close(eps, references.sam(delta, 0.3), 1e-9)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_zero_weights_get_no_noise(weighting):
    zeros, g = jax.tree.map(jnp.zeros_like, tree()), tree(seed=1)
    method = sam_optax.rsam(0.3, key=KEY, weighting=weighting)
    state = method.init(zeros)
    assert_same(method.start_fn(zeros, state), zeros)
    assert norm(method.update(zeros, state, zeros)[0]) == 0
    assert_close(method.update(g, state, zeros)[0], sam_optax.sam(0.3).update(g, ())[0], 1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_leaf_without_gradient_does_not_count(weighting):
    """Its noise lengthens neither ε nor what the noise is divided by."""
    with x64():
        w, g = tree(jnp.float64, 0), {**tree(jnp.float64, 1), "conv": None}
        few = {name: leaf for name, leaf in w.items() if name != "conv"}
        method = sam_optax.rsam(0.3, 0.2, 0.7, key=KEY, weighting=weighting, noise_scale="norm")
        state = method.init(w)
        delta = noise(method, w, state)[1:]
        std = [references.kernel_std(leaf, 0.2, -1, "norm") for leaf in leaves(few)]
        eps = method.update(g, state, w)[0]
        assert eps["conv"] is None
        expected = references.rsam(delta, leaves(g), 0.3, 0.7, weighting, std)
        assert_close(leaves(eps), expected, 1e-9)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("size", [1e-36, 1e-18, 1e18, 1e37])
@pytest.mark.slow
def test_radius_over_the_range_of_bfloat16(weighting, size):
    w = {"k": jnp.full((8, 4), 1e-3, jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)}
    g = jax.tree.map(lambda x: jnp.full_like(x, size), w)
    method = sam_optax.rsam(0.5, key=KEY, weighting=weighting)
    assert norm(method.update(g, method.init(w), w)[0]) == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize(("value", "lmbda"), [(60_000, 2.0), (1e-6, 1e-3), (1e-4, 1e-6)])
@pytest.mark.slow
def test_direction_is_not_confined_to_the_range_of_the_gradient(value, lmbda, weighting):
    """δ₀ + λĝ leaves float16's range where neither the gradient nor ε does."""
    w = {"k": jnp.zeros(4, jnp.float16)}  # no noise
    g = {"k": jnp.full(4, value, jnp.float16)}
    method = sam_optax.rsam(0.5, 0.1, lmbda, key=KEY, weighting=weighting)
    eps, _ = method.update(g, method.init(w), w)
    assert norm(eps) == pytest.approx(0.5, rel=2e-3)


def test_random_start_before_asam():
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        method = sam_optax.random_start(sam_optax.asam(0.3, 0.01), 0.2, 0.5, key=KEY, **PAPER)
        delta = noise(method, w)
        direction = [d + 0.5 * x for d, x in zip(delta, leaves(g), strict=True)]
        biases = [False, True, False, False]
        expected = references.asam(leaves(w), direction, 0.3, 0.01, biases)
        assert_close(method.update(g, method.init(w), w)[0], expected, 1e-12)


@pytest.mark.slow
def test_random_start_before_fsam_averages_the_directions():
    w = tree()
    method = sam_optax.random_start(sam_optax.fsam(0.3), 0.2, 1.0, key=KEY, **PAPER)
    state = method.init(w)
    directions = []
    for seed in range(1, 4):
        g = tree(seed=seed)
        delta = noise(method, w, state)
        directions.append([d + x for d, x in zip(delta, leaves(g), strict=True)])
        eps, state = method.update(g, state, w)
    residual = references.fsam_residuals(directions, 1.0, 0.9)[-1]
    assert_close(eps, references.sam(residual, 0.3), 1e-4)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_what_the_weighting_does_not_depend_on(weighting):
    """The gradient's scale where it is normalized, γ at one start where the noise is, too."""
    w, g = tree(seed=0), tree(seed=1)

    def eps(gamma, scale):
        method = sam_optax.rsam(0.3, gamma, 0.5, key=KEY, weighting=weighting)
        scaled = jax.tree.map(lambda x: scale * x, g)
        return vector(method.update(scaled, method.init(w), w)[0])

    def changes(a, b):
        return np.abs(a - b).max() > 1e-3

    assert changes(eps(0.1, 1.0), eps(0.1, 1000.0)) == (weighting == "raw")
    assert changes(eps(0.1, 1.0), eps(0.2, 1.0)) == (weighting != "normalized")


def test_a_random_start_hands_on_a_direction_of_the_gradients_size():
    """So what averages directions, as F-SAM does, averages what it would of gradients."""
    w, g = tree(seed=0), jax.tree.map(lambda x: 1e3 * x, tree(seed=1))
    method = sam_optax.random_start(optax.identity(), 0.0, 0.3, key=KEY)
    assert_same(method.update(g, method.init(w), w)[0], g)
    method = sam_optax.random_start(optax.identity(), 0.1, key=KEY)
    assert 1 < norm(method.update(g, method.init(w), w)[0]) / norm(g) < 3


def test_keys():
    w = tree()
    base = sam_optax.rsam(key=KEY)
    state = base.init(w)
    assert_same(sam_optax.rsam(key=KEY).init(w), state)
    assert_same(sam_optax.rsam(key=jax.random.key_data(KEY)).init(w), state)
    assert_same(sam_optax.rsam(key=np.asarray(jax.random.key_data(KEY))).init(w), state)
    other = sam_optax.rsam(key=jax.random.key(8))
    starts = [base.start_fn(w, state), other.start_fn(w, other.init(w))]
    for _ in range(3):
        _, state = base.update(w, state, w)
        starts.append(base.start_fn(w, state))
    for i, start in enumerate(starts):
        for earlier in starts[:i]:
            # No leaf repeats: every kernel's noise is new with every key and every step.
            pairs = zip(leaves(start), leaves(earlier), strict=True)
            assert all(np.all(a != b) for a, b in pairs)


def test_start_is_the_same_each_time_it_is_asked_for():
    w = tree()
    method = sam_optax.rsam(key=KEY)
    state = method.init(w)
    assert_same(method.start_fn(w, state), method.start_fn(w, state))
    assert not same(method.start_fn(w, state), w)


def test_leaves_have_noise_of_their_own():
    w = {"a": jnp.ones((40, 5)), "b": jnp.ones((40, 5)), "c": jnp.ones((300, 300))}
    # Of scales that differ, so that equal draws are not equal noise.
    a, b, c = noise(sam_optax.rsam(key=KEY, noise_scale="sqrt_norm"), w)
    assert not np.any(a == b)
    assert not np.any(np.isin(a.ravel(), c.ravel()[:200]))


def test_schedules():
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        method = sam_optax.rsam(0.3, lambda t: 0.1 * t, lambda t: 1.0 + t, key=KEY, **PAPER)
        state = method.init(w)
        assert norm(noise(method, w, state)) == 0
        for step in range(3):
            expected = references.rsam(noise(method, w, state), leaves(g), 0.3, 1.0 + step)
            eps, state = method.update(g, state, w)
            assert_close(eps, expected, 1e-9)
        assert norm(noise(method, w, state)) > 0
        assert int(state.step) == 3


def test_params_are_needed():
    method = sam_optax.rsam(key=KEY)
    with pytest.raises(ValueError, match="random_start needs the params"):
        method.update(tree(), method.init(tree()))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rho": -1.0}, ValueError, ["rho", "-1.0", "[0, inf)"]),
        ({"gamma": -0.1}, ValueError, ["gamma", "-0.1", "[0, inf)"]),
        ({"lmbda": -1.0}, ValueError, ["lmbda", "-1.0", "[0, inf)"]),
        ({"noise_scale": "covariance"}, ValueError, ["noise_scale", "'covariance'", *SCALES]),
        ({"noise_scale": 0.5}, ValueError, ["noise_scale", "0.5", *SCALES]),
        ({"weighting": "unit"}, ValueError, ["weighting", "'unit'", *WEIGHTINGS]),
        ({"weighting": None}, ValueError, ["weighting", "None", *WEIGHTINGS]),
        ({"draw": "normal"}, TypeError, ["draw", "'normal'", "jax.random.normal"]),
        ({"key": True}, TypeError, ["key", "True", "seed"]),
        ({"key": 0.5}, TypeError, ["key", "0.5", "seed"]),
        ({"key": 2**70}, ValueError, ["key", str(2**70), "64 bits"]),
        ({"key": None}, TypeError, ["key", "None", "PRNG"]),
        ({"key": jax.random.split(KEY)}, TypeError, ["key", "PRNG"]),
        ({"key": jnp.zeros(2)}, TypeError, ["key", "PRNG"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        sam_optax.rsam(**{"key": KEY, **arguments})
    for word in words:
        assert word in str(caught.value)


def test_key_is_required():
    with pytest.raises(TypeError, match="key"):
        sam_optax.rsam(0.05)


def test_one_random_start_only():
    with pytest.raises(ValueError, match="already has a random start"):
        sam_optax.random_start(sam_optax.rsam(key=KEY), key=KEY)


def test_perturbation_must_be_a_transformation():
    with pytest.raises(TypeError, match="GradientTransformation"):
        sam_optax.random_start(0.05, key=KEY)
