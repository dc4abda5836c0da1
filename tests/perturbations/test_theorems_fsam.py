"""What the F-SAM paper proves, checked on the library: lemma 1, theorem 1 and theorem 2."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import x64

import sam_optax

# ---------------------------------------------------------------- F-SAM, lemma 1


def batch_gradients(samples=5, size=2):
    """The gradient of every mini-batch of a small regression, and the full gradient."""
    rng = np.random.default_rng(3)
    x, y, w = rng.normal(size=(samples, 3)), rng.normal(size=samples), rng.normal(size=3)
    per_sample = (x @ w - y)[:, None] * x
    subsets = itertools.combinations(range(samples), size)
    return np.stack([per_sample[list(s)].mean(0) for s in subsets]), per_sample.mean(0)


def residual_after(past, g, method):
    """d for the gradient g after a sequence of past ones."""
    state = method.init(g)
    for earlier in past:
        _, state = method.update(earlier, state)
    return method.update(g, state)[0]


@pytest.mark.parametrize(
    ("ema_start", "mass"),
    [
        ("first_gradient", lambda lmbda: 1.0),
        ("bias_corrected", lambda lmbda: 1.0),
        ("zero", lambda lmbda: 1 - lmbda**2),
    ],
)
@pytest.mark.parametrize("sigma", [1.0, 0.6, 0.0])
@pytest.mark.slow
def test_lemma_1_by_enumeration(ema_start, mass, sigma):
    """E⟨d, ∇L⟩ = ‖∇L‖² (1 − σ) over every sequence of three batches, if m is unbiased."""
    with x64():
        batches, full = batch_gradients()
        method = sam_optax.remove_full_gradient(sigma, 0.7, ema_start=ema_start)
        sequences = np.array(list(itertools.product(range(len(batches)), repeat=3)))
        run = jax.jit(jax.vmap(lambda gs: residual_after(gs[:2], gs[2], method)))
        residuals = run(jnp.asarray(batches[sequences]))
        expected = full @ full * (1 - sigma * mass(0.7))
        # bias_corrected computes its weights, and so their sum, in floating point.
        assert float(np.mean(residuals @ full)) == pytest.approx(expected, abs=1e-12)


def test_lemma_1_by_sampling():
    """Along one trajectory at fixed params: orthogonal on average for σ = 1, not for σ = 0."""
    with x64():
        batches, full = batch_gradients()
        draws = np.random.default_rng(4).integers(len(batches), size=20_000)

        def products(sigma):
            method = sam_optax.remove_full_gradient(sigma, 0.9)
            _, d = jax.lax.scan(
                lambda s, g: method.update(g, s)[::-1],
                method.init(jnp.asarray(full)),
                jnp.asarray(batches[draws]),
            )
            return np.asarray(d)[100:] @ full

        standard_error = products(0.0).std() / np.sqrt(20_000)
        assert products(0.0).mean() == pytest.approx(full @ full, abs=4 * standard_error)
        assert products(1.0).mean() == pytest.approx(0, abs=4 * standard_error)
        assert full @ full > 40 * standard_error


# ---------------------------------------------------------------- F-SAM, theorem 1


def averages(gradients, lmbda, **options):
    """m after each gradient, read off the state."""
    options = {"ema_start": "bias_corrected"} | options
    method = sam_optax.remove_full_gradient(1.0, lmbda, **options)

    def step(state, g):
        _, state = method.update(g, state)
        return state, state.ema

    return np.asarray(jax.lax.scan(step, method.init(gradients[0]), gradients)[1])


@pytest.mark.parametrize("lmbda", [0.0, 0.6, 0.9, 0.99])
def test_weights_of_the_theorem(lmbda):
    """One-hot gradients show the weights: w_t ∝ λ^(T−t), sum 1, and ‖w‖² of equation (18)."""
    with x64():
        steps = 60
        for t, w in enumerate(averages(jnp.eye(steps), lmbda), start=1):
            powers = float(lmbda) ** np.arange(t - 1, -1, -1)
            np.testing.assert_allclose(w[:t], powers / powers.sum(), rtol=1e-9, atol=1e-12)
            assert not np.any(w[t:])
            equation_18 = (1 + lmbda**t) / (1 - lmbda**t) * (1 - lmbda) / (1 + lmbda)
            assert w @ w == pytest.approx(equation_18, rel=1e-9)


def bound_27(steps, lmbda, variance, delta, drift):
    """The theorem's bound; ``drift`` is G β γ, how far the full gradient moves in a step."""
    noise = 4 * np.sqrt(variance) * np.sqrt(1 - lmbda) * np.sqrt(np.log(np.exp(-0.25) / delta))
    return (noise + drift / (1 - lmbda)) / (1 - lmbda**steps)


def test_bias_of_the_average_under_drift():
    """A full gradient that moves by c a step, without noise: the bias of (8), within (11)."""
    with x64():
        lmbda, c = 0.9, 0.01
        t = np.arange(1, 201)
        errors = np.abs(averages(jnp.asarray(c * t[:, None]), lmbda)[:, 0] - c * t)
        bound_11 = c * lmbda / (1 - lmbda) / (1 - lmbda**t)
        assert np.all(errors <= bound_11 + 1e-12)
        assert errors[-1] == pytest.approx(bound_11[-1], rel=1e-3)  # and it is reached


def test_error_bound_of_theorem_1():
    """A drifting full gradient seen through noise: (27) holds with probability 1 − δ."""
    with x64():
        lmbda, delta, variance, drift, steps, runs, dim = 0.9, 0.1, 0.04, 0.01, 50, 400, 3
        rng = np.random.default_rng(5)
        full = np.cumsum(np.concatenate([np.ones((1, dim)), np.full((steps - 1, dim), drift)]), 0)
        full /= np.sqrt(dim)
        noise = rng.normal(size=(steps, runs, dim))
        noise *= np.sqrt(variance) / np.linalg.norm(noise, axis=-1, keepdims=True)
        seen = jnp.asarray((full[:, None] + noise).reshape(steps, -1))
        m = averages(seen, lmbda).reshape(steps, runs, dim)
        errors = np.linalg.norm(m - full[:, None], axis=-1)
        for t in (1, 5, steps):
            bound = bound_27(t, lmbda, variance, delta, drift)
            assert np.mean(errors[t - 1] > bound) <= delta
        # The variance of the average, M ‖w‖² (18), is what the bound is made of.
        spread = np.mean(np.sum((m[-1] - m[-1].mean(0)) ** 2, -1))
        equation_18 = (1 + lmbda**steps) / (1 - lmbda**steps) * (1 - lmbda) / (1 + lmbda)
        assert spread == pytest.approx(variance * equation_18, rel=0.1)


@pytest.mark.parametrize(("ema_start", "holds"), [("bias_corrected", True), ("zero", False)])
def test_the_bound_needs_weights_that_sum_to_1(ema_start, holds):
    """Negative control: little drift and no noise, so the bound is tight after some steps."""
    with x64():
        lmbda, drift = 0.9, 1e-4
        full = 1 + drift * np.arange(10)
        m = averages(jnp.asarray(full[:, None]), lmbda, ema_start=ema_start)
        error = abs(m[-1, 0] - full[-1])
        assert (error <= bound_27(10, lmbda, 0.0, 0.1, drift)) == holds


# ---------------------------------------------------------------- F-SAM, theorem 2

CURVATURES = np.array([1.0, 0.5, 0.2])
SMOOTHNESS = 1.0  # β
VARIANCE = 0.3  # M


def waves(w):
    """L(w) = Σ hᵢ (1 − cos wᵢ): not convex, β-smooth with β = max h, and at least 0."""
    return jnp.sum(jnp.asarray(CURVATURES) * (1 - jnp.cos(w)))


def train(start, steps, gamma_0, rho_0, runs=400, constant_rate=False):
    """L(w_t) and ‖∇L(w_t)‖² of every run, (steps + 1, runs), with γ_t = γ₀/√T and ρ_t = ρ₀/√t.

    L_B(w) = L(w) + ⟨ξ, w⟩ with E‖ξ‖² = M, whatever w is.
    """
    rate = gamma_0 if constant_rate else gamma_0 / np.sqrt(steps)
    tx = sam_optax.sharpness_aware(
        optax.sgd(rate), sam_optax.fsam(lambda t: rho_0 / jnp.sqrt(t + 1.0), sigma=1.0, lmbda=0.9)
    )
    noise = np.random.default_rng(7).normal(size=(steps, runs, 3)) * np.sqrt(VARIANCE / 3)

    def step(carry, xi):
        w, state = carry
        updates, state = tx.update(None, state, w, grad_fn=lambda v: jax.grad(waves)(v) + xi)
        w = w + updates
        return (w, state), w

    def run(noise):
        w = jnp.asarray(start)
        _, path = jax.lax.scan(step, (w, tx.init(w)), noise)
        path = jnp.concatenate([w[None], path])
        squares = jnp.sum(jax.vmap(jax.grad(waves))(path) ** 2, axis=-1)
        return jax.vmap(waves)(path), squares

    return tuple(np.asarray(x) for x in jax.jit(jax.vmap(run, 1, 1))(jnp.asarray(noise)))


def bound_48(start, steps, gamma_0, rho_0, variance=VARIANCE):
    """The theorem's bound on the mean of ‖∇L(w_t)‖² over the steps."""
    delta = float(waves(jnp.asarray(start)))  # the least loss is 0
    theta = 2 * SMOOTHNESS * variance * gamma_0 + rho_0**2 * SMOOTHNESS**3 * gamma_0
    pi = rho_0**2 * SMOOTHNESS**2
    return (2 * delta / gamma_0 + theta + pi * np.log(steps)) / np.sqrt(steps)


STARTS = {"far": (2.5, -2.0, 1.5), "at the minimum": (0.0, 0.0, 0.0)}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("rho_0", [0.1, 1.0])
@pytest.mark.slow
def test_theorem_2(start, rho_0):
    """The mean square of the full gradient is within (48), and each step within (44)."""
    with x64():
        steps, gamma_0 = 400, 1.0
        losses, squares = train(start, steps, gamma_0, rho_0)
        assert squares[:-1].mean() <= bound_48(start, steps, gamma_0, rho_0)
        gamma, rho = gamma_0 / np.sqrt(steps), rho_0 / np.sqrt(np.arange(1, steps + 1))
        change = losses[1:] - losses[:-1] + gamma / 2 * squares[:-1]
        error = change.std(1) / np.sqrt(change.shape[1])
        bound_44 = gamma**2 * SMOOTHNESS * VARIANCE + (
            gamma * rho**2 * SMOOTHNESS**2 * (1 + SMOOTHNESS * gamma) / 2
        )
        assert np.all(change.mean(1) <= bound_44 + 4 * error)


def test_theorem_2_needs_what_it_assumes():
    """Negative controls: a rate that does not fall with T, and a bound without the noise."""
    with x64():
        start, steps = STARTS["at the minimum"], 400
        _, squares = train(start, steps, 1.0, 0.1, constant_rate=True)
        assert squares[:-1].mean() > bound_48(start, steps, 1.0, 0.1)
        _, squares = train(start, steps, 1.0, 0.01)
        assert squares[:-1].mean() > bound_48(start, steps, 1.0, 0.01, variance=0.0)
