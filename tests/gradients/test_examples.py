"""Gradient functions that treat examples differently, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counted, assert_close, assert_same, batches, init_mlp, mlp, mlp_loss

import sam_optax

KEY = jax.random.key(8)
# ℓ_i = ½ (a_i·w − b_i)²: its gradient is (a_i·w − b_i) a_i.
RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(12, 3)), RNG.normal(size=12)
W = RNG.normal(size=3)
BATCH = jnp.asarray(A, jnp.float32), jnp.asarray(B, jnp.float32)


def losses_fn(w, batch):
    a, b = batch
    return 0.5 * (a @ w - b) ** 2


def mean_loss(w, batch):
    return jnp.mean(losses_fn(w, batch))


def gradients(w):
    return (A @ w - B)[:, None] * A


# ---------------------------------------------------------------- part_of_batch


@pytest.mark.parametrize(
    ("n", "fraction", "expected"),
    [
        (10, 0.2, [0, 5]),
        (10, 0.3, [0, 3, 6]),
        (10, 1.0, range(10)),
        (7, 0.5, [0, 1, 3, 5]),
        (10, 0.01, [0]),  # at least one
    ],
)
def test_evenly_spaced_examples(n, fraction, expected):
    batch = {"x": np.arange(n), "keys": jax.random.split(KEY, n), "none": None}
    part = sam_optax.part_of_batch(batch, fraction)
    np.testing.assert_array_equal(part["x"], list(expected))
    assert_same(part["keys"], batch["keys"][np.array(expected)])


# ---------------------------------------------------------------- rising_samples


def test_ties_of_rises_keep_the_count():
    """At w itself no loss has risen: some half of the examples, each once."""
    grad_fn = sam_optax.rising_samples(lambda w, x: x * w, 1.0, jnp.arange(8.0), 0.5)
    assert float(grad_fn(1.0)) in {s / 4 for s in range(6, 23)}


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 3), (0.01, 1), (1.0, 12)])
def test_the_second_pass_is_a_forward_pass_and_a_gradient_of_a_part(fraction, count):
    """Of one example at least. (Which ones: ESAM in ``test_catalogue``.)"""
    sizes = []

    def counted(w, batch):
        sizes.append(batch[0].shape[0])
        return losses_fn(w, batch)

    grad_fn = sam_optax.rising_samples(counted, jnp.ones(3), BATCH, fraction)
    grad_fn(jnp.zeros(3))
    assert sizes == [12, 12, count]


# ---------------------------------------------------------------- reweighted_ascent


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_weights_are_the_slopes_along_a_direction(power):
    """With ℓ_i = a_i·w, Σ ω_i a_i over three unit vectors shows ω, and so |u|."""
    w = jnp.asarray(W, jnp.float32)
    identity = (jnp.eye(3), jnp.zeros(3))
    linear = lambda w, batch: batch[0] @ w
    absolute = np.asarray(sam_optax.reweighted_ascent(linear, identity, key=KEY)(w), np.float64)
    assert absolute.sum() == pytest.approx(1)
    # The signs of u are the ones that explain the weights of the losses in hand.
    grad_fn = jax.jit(sam_optax.reweighted_ascent(losses_fn, BATCH, key=KEY, power=power))
    candidates = []
    for signs in np.ndindex(2, 2):
        u = absolute * np.array([1, *(2 * np.array(signs) - 1)])
        weights = np.abs(gradients(W) @ u) ** power
        candidates.append(weights @ gradients(W) / weights.sum())
    errors = [np.abs(np.asarray(grad_fn(w)) - c).max() for c in candidates]
    assert min(errors) < 1e-4
    if power == 0:
        np.testing.assert_allclose(candidates[0], gradients(W).mean(0))


@pytest.mark.parametrize("kind", ["rising", "reweighted"])
def test_complex_params_get_the_gradient_that_optax_descends_along(kind):
    """The conjugate of JAX's: ½|w − c|² has the gradient w − c."""
    c = jnp.array([1 + 2j, 1 + 2j])
    each = lambda w, c: 0.5 * jnp.abs(w - c) ** 2
    if kind == "rising":
        grad_fn = sam_optax.rising_samples(each, jnp.asarray(1j), c, 0.5)
    else:
        grad_fn = sam_optax.reweighted_ascent(each, c, key=KEY)
    np.testing.assert_allclose(grad_fn(jnp.asarray(3 - 1j)), 2 - 3j, rtol=1e-5)


def test_zero_gradients_weigh_evenly():
    grad_fn = sam_optax.reweighted_ascent(lambda w, x: 0 * w[0] * x, jnp.ones(4), key=KEY)
    np.testing.assert_array_equal(grad_fn(jnp.ones(2)), 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_slopes_whose_sum_leaves_the_range_of_float16(dtype):
    batch = jnp.full((4000, 2), 300, dtype)
    grad_fn = sam_optax.reweighted_ascent(lambda w, a: a @ w * 10, batch, key=KEY)
    out = grad_fn(jnp.ones(2, dtype))
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), 3000, rtol=0.02)


def test_trees_of_params_and_what_it_evaluates():
    x, y = jax.tree.map(lambda batch: batch[0], batches(1, size=6))
    each = Counted(lambda p, batch: jnp.mean((mlp(p, batch[0]) - batch[1]) ** 2, axis=1))
    params = init_mlp()
    out = jax.jit(sam_optax.reweighted_ascent(each, (x, y), key=KEY, power=0.0))(params)
    assert_close(out, jax.grad(mlp_loss)(params, x, y), 1e-5)
    assert each.calls == 2  # the forward pass along a direction, and the gradient


def rising(batch=BATCH, fraction=0.5, losses_fn=losses_fn):
    return sam_optax.rising_samples(losses_fn, jnp.ones(3), batch, fraction)


def part(batch=BATCH, fraction=0.5):
    return sam_optax.part_of_batch(batch, fraction)


def reweighted(losses_fn=losses_fn, **options):
    return sam_optax.reweighted_ascent(losses_fn, BATCH, **{"key": KEY, **options})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: reweighted(key=0.5), TypeError, ["key", "PRNG"]),
        (lambda: reweighted(power=-1.0), ValueError, ["power", "-1.0"]),
        (lambda: reweighted(mean_loss)(jnp.ones(3)), ValueError, ["one loss for each", "()"]),
        (
            lambda: rising(losses_fn=mean_loss),
            ValueError,
            ["one loss for each", "(12,), got", "()"],
        ),
        (lambda: rising(fraction=1.5), ValueError, ["fraction", "1.5"]),
        (lambda: part(fraction=0.0), ValueError, ["fraction", "(0, 1]", "0.0"]),
        (lambda: part(fraction=lambda t: 0.5), TypeError, ["fraction"]),
        (lambda: part((jnp.ones(4), jnp.ones(3))), ValueError, ["batch", "(4,)", "(3,)"]),
        (lambda: part(jnp.ones(())), ValueError, ["batch", "()"]),
        (lambda: part(jnp.ones((0, 3))), ValueError, ["batch", "at least one", "(0, 3)"]),
        (lambda: part({}), ValueError, ["batch"]),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
