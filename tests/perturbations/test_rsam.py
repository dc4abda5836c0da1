"""R-SAM against its formula given the noise, its options, its limits and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from helpers import assert_close, assert_same, leaves, norm, vector, x64

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


@pytest.mark.parametrize(
    ("weighting", "noise_scale", "lmbda"),
    [
        ("normalized", "relative", 0.3),
        ("normalized_gradient", "norm", 4.0),
        ("raw", "sqrt_norm", 0.3),  # as the paper prints it
        ("normalized", "isotropic", 0.0),
    ],
)
def test_is_the_formula(noise_scale, weighting, lmbda):
    with x64():
        w, g_hat = tree(jnp.float64, 0), tree(jnp.float64, 1)
        options = {"noise_scale": noise_scale, "weighting": weighting}
        method = sam_optax.rsam(0.3, 0.2, lmbda, key=KEY, **options)
        std = [references.kernel_std(leaf, 0.2, -1, noise_scale) for leaf in leaves(w)]
        delta = noise(method, w)
        eps = method.update(g_hat, method.init(w), w)[0]
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


@pytest.mark.parametrize(("width", "gradient"), [(8, 1e3), (64, 1.0), (512, 1e-4)])
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


@pytest.mark.parametrize(
    ("noise_scale", "kernel_axis"),
    [
        ("relative", -1),
        ("sqrt_norm", 0),
        ("norm", -1),
        ("relative", lambda path, leaf: 2 if leaf.ndim == 4 else None),
    ],
)
def test_standard_deviation_of_each_kernel(noise_scale, kernel_axis):
    """The same draw under another scale, with z read off isotropic noise."""
    with x64():
        w = tree(jnp.float64)
        z = noise(sam_optax.rsam(gamma=1.0, noise_scale="isotropic", key=KEY), w)
        options = {"noise_scale": noise_scale, "kernel_axis": kernel_axis}
        delta = noise(sam_optax.rsam(gamma=0.3, key=KEY, **options), w)
        for d, leaf, sample in zip(delta, leaves(w), z, strict=True):
            axis = kernel_axis(None, leaf) if callable(kernel_axis) else kernel_axis
            std = references.kernel_std(leaf, 0.3, axis, noise_scale)
            np.testing.assert_allclose(d, std * sample, atol=1e-7)


@pytest.mark.parametrize(
    ("noise_scale", "weighting", "lmbda", "dtype"),
    [
        ("relative", "normalized", 0.7, jnp.bfloat16),
        ("isotropic", "raw", 1.0, jnp.float32),
        ("norm", "normalized", 1.0, jnp.float16),
    ],
)
def test_gamma_0_is_sam_to_the_bit(noise_scale, weighting, lmbda, dtype):
    w, g = tree(dtype, seed=0), tree(dtype, seed=1)
    options = {"noise_scale": noise_scale, "weighting": weighting}
    method = sam_optax.rsam(0.3, gamma=0.0, lmbda=lmbda, key=KEY, **options)
    state = method.init(w)
    assert_same(method.start_fn(w, state), w)
    assert_same(method.update(g, state, w)[0], sam_optax.sam(0.3).update(g, ())[0])


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
@pytest.mark.parametrize(
    ("dtype", "weight", "size", "lmbda"),
    [
        *((jnp.bfloat16, 1e-3, size, 2.0) for size in (1e-36, 1e-18, 1e18, 1e37)),
        # Without noise: δ₀ + λĝ leaves the range where neither the gradient nor ε does.
        *((jnp.float16, 0.0, *x) for x in ((60_000, 2.0), (1e-6, 1e-3), (1e-4, 1e-6))),
    ],
)
@pytest.mark.slow
def test_radius_over_the_range_of_narrow_dtypes(weighting, dtype, weight, size, lmbda):
    w = {"k": jnp.full((8, 4), weight, dtype)}
    method = sam_optax.rsam(0.5, 0.1, lmbda, key=KEY, weighting=weighting)
    eps, _ = method.update({"k": jnp.full((8, 4), size, dtype)}, method.init(w), w)
    assert norm(eps) == pytest.approx(0.5, rel=1e-2 if dtype == jnp.bfloat16 else 2e-3)


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


@pytest.mark.slow
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
    assert_same(base.start_fn(w, state), base.start_fn(w, state))
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


def test_other_errors():
    method = sam_optax.rsam(key=KEY)
    with pytest.raises(ValueError, match="random_start needs the params"):
        method.update(tree(), method.init(tree()))
    with pytest.raises(ValueError, match="already has a random start"):
        sam_optax.random_start(method, key=KEY)
