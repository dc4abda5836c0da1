"""R-SAM against its formula given the noise, its options, its limits and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from helpers import assert_close, assert_same, leaves, norm, precision, same, vector, x64

import sam_optax

KEY = jax.random.key(7)


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
def test_is_the_papers_formula(dtype, tol, gamma, lmbda):
    with precision(dtype):
        w, g_hat = tree(dtype, 0), tree(dtype, 1)
        method = sam_optax.rsam(0.3, gamma, lmbda, key=KEY)
        state = method.init(w)
        expected = references.rsam(noise(method, w, state), leaves(g_hat), 0.3, lmbda)
        assert_close(jax.jit(method.update)(g_hat, state, w)[0], expected, rtol=tol, atol=tol)


def test_wrong_formulas_are_told_apart():
    """Negative controls: noise left out of ε, noise on top of the radius, gradient normalized."""
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        method = sam_optax.rsam(0.3, 0.5, 0.7, key=KEY)
        eps = vector(method.update(g, method.init(w), w)[0])
        delta, g = references.flatten(noise(method, w)), vector(g)
        unit = g / np.linalg.norm(g)
        for wrong in (0.3 * unit, delta + 0.3 * unit, 0.3 * (delta + 0.7 * unit), -eps):
            assert np.abs(eps - wrong).max() > 1e-2
        ratio = (delta + 0.7 * unit) / np.linalg.norm(delta + 0.7 * unit)
        assert np.abs(eps - 0.3 * ratio).max() > 1e-2


@pytest.mark.parametrize("norm_power", [0, 0.5, 1.0, 0.25])
@pytest.mark.parametrize("kernel_axis", [-1, 0])
def test_standard_deviation_of_each_kernel(norm_power, kernel_axis):
    """The same draw under another scale: δ₀ = γ ‖w_j‖^k z with z read off k = 0."""
    with x64():
        w = tree(jnp.float64)
        z = noise(sam_optax.rsam(gamma=1.0, norm_power=0, key=KEY), w)
        delta = noise(
            sam_optax.rsam(gamma=0.3, norm_power=norm_power, kernel_axis=kernel_axis, key=KEY), w
        )
        # The reference's standard deviation is γ ‖w_j‖^½.
        root = [references.kernel_std(leaf, 1.0, kernel_axis) for leaf in leaves(w)]
        for d, r, sample in zip(delta, root, z, strict=True):
            np.testing.assert_allclose(d, 0.3 * r ** (2 * norm_power) * sample, atol=1e-7)


def test_kernel_axis_by_function():
    with x64():
        w = tree(jnp.float64)

        def axis_of(path, leaf):
            return 2 if leaf.ndim == 4 else None

        z = noise(sam_optax.rsam(gamma=1.0, norm_power=0, key=KEY), w)
        delta = noise(sam_optax.rsam(gamma=0.3, kernel_axis=axis_of, key=KEY), w)
        for d, leaf, sample in zip(delta, leaves(w), z, strict=True):
            std = references.kernel_std(leaf, 0.3, 2 if leaf.ndim == 4 else None)
            np.testing.assert_allclose(d, std * sample, atol=1e-7)


def test_gamma_0_is_sam_to_the_bit():
    w, g = tree(seed=0), tree(seed=1)
    method = sam_optax.rsam(0.3, gamma=0.0, key=KEY)
    state = method.init(w)
    assert_same(method.start_fn(w, state), w)
    assert_same(method.update(g, state, w)[0], sam_optax.sam(0.3).update(g, ())[0])


@pytest.mark.parametrize("lmbda", [0.0, 1.0, 10.0])
def test_radius_holds_noise_and_gradient(lmbda):
    w, g = tree(seed=0), tree(seed=1)
    method = sam_optax.rsam(0.3, 0.5, lmbda, key=KEY)
    assert norm(method.update(g, method.init(w), w)[0]) == pytest.approx(0.3, rel=1e-6)


def test_zero_gradient_leaves_the_noise():
    with x64():
        w = tree(jnp.float64)
        method = sam_optax.rsam(0.3, key=KEY)
        zeros = jax.tree.map(jnp.zeros_like, w)
        delta = noise(method, w)
        eps = method.update(zeros, method.init(w), w)[0]
        assert_close(eps, references.sam(delta, 0.3), 1e-9)


def test_zero_weights_get_no_noise():
    zeros = jax.tree.map(jnp.zeros_like, tree())
    method = sam_optax.rsam(0.3, key=KEY)
    state = method.init(zeros)
    assert_same(method.start_fn(zeros, state), zeros)
    assert norm(method.update(zeros, state, zeros)[0]) == 0


@pytest.mark.parametrize(("value", "lmbda"), [(60_000, 2.0), (1e-6, 1e-3), (1e-4, 1e-6)])
def test_direction_is_not_confined_to_the_range_of_the_gradient(value, lmbda):
    """δ₀ + λĝ leaves float16's range where neither the gradient nor ε does."""
    w = {"k": jnp.zeros(4, jnp.float16)}  # no noise
    g = {"k": jnp.full(4, value, jnp.float16)}
    method = sam_optax.rsam(0.5, 0.1, lmbda, key=KEY)
    eps, _ = method.update(g, method.init(w), w)
    assert norm(eps) == pytest.approx(0.5, rel=2e-3)


def test_random_start_before_asam():
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        method = sam_optax.random_start(sam_optax.asam(0.3, 0.01), 0.2, 0.5, key=KEY)
        delta = noise(method, w)
        direction = [d + 0.5 * x for d, x in zip(delta, leaves(g), strict=True)]
        biases = [False, True, False, False]
        expected = references.asam(leaves(w), direction, 0.3, 0.01, biases)
        assert_close(method.update(g, method.init(w), w)[0], expected, 1e-12)


def test_random_start_before_fsam_averages_the_directions():
    w = tree()
    method = sam_optax.random_start(sam_optax.fsam(0.3), 0.2, key=KEY)
    state = method.init(w)
    directions = []
    for seed in range(1, 4):
        g = tree(seed=seed)
        delta = noise(method, w, state)
        directions.append([d + x for d, x in zip(delta, leaves(g), strict=True)])
        eps, state = method.update(g, state, w)
    residual = references.fsam_residuals(directions, 1.0, 0.9)[-1]
    assert_close(eps, references.sam(residual, 0.3), 1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_normalize_gradient_weighs_the_noise_the_same_at_any_scale(scale):
    with x64():
        w = tree(jnp.float64)
        g = jax.tree.map(lambda x: scale * x, tree(jnp.float64, 1))
        method = sam_optax.rsam(0.3, 0.2, 0.5, key=KEY, normalize_gradient=True)
        unit = [x / norm(g) for x in leaves(g)]
        expected = references.rsam(noise(method, w), unit, 0.3, 0.5)
        assert_close(method.update(g, method.init(w), w)[0], expected, 1e-9)


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
    a, b, c = noise(sam_optax.rsam(key=KEY), w)
    assert not np.any(a == b)
    assert not np.any(np.isin(a.ravel(), c.ravel()[:200]))


def test_schedules():
    with x64():
        w, g = tree(jnp.float64, 0), tree(jnp.float64, 1)
        method = sam_optax.rsam(0.3, lambda t: 0.1 * t, lambda t: 1.0 + t, key=KEY)
        state = method.init(w)
        assert norm(noise(method, w, state)) == 0
        for step in range(3):
            expected = references.rsam(noise(method, w, state), leaves(g), 0.3, 1.0 + step)
            eps, state = method.update(g, state, w)
            assert_close(eps, expected, 1e-9)
        assert norm(noise(method, w, state)) > 0
        assert int(state.schedule.step) == 3


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
        ({"norm_power": -0.5}, ValueError, ["norm_power", "-0.5", "[0, inf)"]),
        ({"norm_power": lambda t: 0.5}, TypeError, ["norm_power"]),
        ({"key": 0}, TypeError, ["key", "0", "PRNG"]),
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
    with pytest.raises(ValueError, match="random start already"):
        sam_optax.random_start(sam_optax.rsam(key=KEY), key=KEY)


def test_perturbation_must_be_a_transformation():
    with pytest.raises(TypeError, match="GradientTransformation"):
        sam_optax.random_start(0.05, key=KEY)
