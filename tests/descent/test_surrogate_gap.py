"""GSAM: its limits, known values and numerics. (Whole runs: ``test_catalogue``.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from family import BASE, gap, run
from helpers import assert_same, vector

import sam_optax

RHO = 0.3


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(alpha, g, g_s, perturbed=True):
    """What it makes of an ascent gradient and a sharp one."""
    gap_tx = sam_optax.surrogate_gap(alpha)
    return gap_tx.update(g_s, (), ascent_grads=g, perturbed=perturbed)[0]


def test_alpha_0_is_sam_to_the_bit():
    sharp = functools.partial(sam_optax.sharpness_aware, BASE, sam_optax.sam(RHO))
    points, states = run(sharp(descent=sam_optax.surrogate_gap(0.0)), 4)
    plain, plain_states = run(sharp(), 4)
    assert gap(points, plain) == 0
    assert_same(states[-1].base_state[1], plain_states[-1].base_state)


@pytest.mark.parametrize(
    ("g", "g_s", "alpha", "expected"),
    [
        ([2, 0], [1, 1], 0.4, [0.6, 1.4]),
        ([2, 0], [1, 1], 0.0, [1, 1]),
        ([0, 3], [2, 0], 0.5, [2, -1.5]),  # nothing of g lies along g_s
        ([4, 6], [2, 3], 0.4, [2, 3]),  # parallel
        ([0, 0], [1, 2], 0.4, [1, 2]),
        ([1, 2], [0, 0], 0.5, [-0.5, -1]),  # all of g is orthogonal to 0
        ([0, 0], [0, 0], 0.5, [0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param("float16", marks=pytest.mark.slow)])
def test_known_values(g, g_s, alpha, expected, dtype):
    """Over the whole tree: it does not matter how the vector is cut into leaves."""
    cut = lambda x: [jnp.asarray(x[:1], dtype), jnp.asarray(x[1:], dtype)]
    tolerance = 10 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(vector(apply(alpha, cut(g), cut(g_s))), expected, atol=tolerance)


@pytest.mark.slow
def test_with_a_random_start_it_is_r_gsam():
    """g is the gradient at the random start."""
    method, g_and_g_s = sam_optax.rsam(RHO, 0.5, key=3), []

    def grad_fn(p):
        g_and_g_s.append(p**3)
        return p**3

    w = jnp.array([1.0, -2.0, 0.5])
    r_gsam = sam_optax.sharpness_aware(optax.sgd(1.0), method, descent=sam_optax.surrogate_gap(0.4))
    updates, _ = r_gsam.update(None, r_gsam.init(w), w, grad_fn=grad_fn)
    g, g_s = (np.asarray(x, np.float64) for x in g_and_g_s)
    assert np.abs(g - np.asarray(w**3)).max() > 0.01
    np.testing.assert_allclose(-updates, g_s - 0.4 * (g - ref.project(g, g_s)), rtol=1e-5)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(3e4, jnp.float16), (1e-6, jnp.float16), (1e37, jnp.bfloat16), (1e-37, jnp.bfloat16)],
)
def test_squares_do_not_overflow(scale, dtype):
    """Nor vanish: the projection is the same at every scale."""
    g, g_s = (scale * np.array(x) for x in ([2.0, 0.0], [1.0, 1.0]))
    out = vector(apply(0.4, jnp.asarray(g, dtype), jnp.asarray(g_s, dtype)))
    np.testing.assert_allclose(out / scale, [0.6, 1.4], rtol=0.03)


def test_complex_gradients_are_pairs_of_real_ones():
    rng = np.random.default_rng(1)
    g, g_s = (rng.normal(size=4) + 1j * rng.normal(size=4) for _ in range(2))
    out = np.asarray(apply(0.4, jnp.asarray(g), jnp.asarray(g_s)))
    pair = lambda z: np.concatenate([z.real, z.imag])
    expected = pair(g_s) - 0.4 * (pair(g) - ref.project(pair(g), pair(g_s)))
    np.testing.assert_allclose(pair(out), expected, atol=1e-6)


def test_alpha_out_of_range():
    with pytest.raises(ValueError, match=r"alpha must be in \[0, inf\), got -0.1"):
        sam_optax.surrogate_gap(-0.1)
