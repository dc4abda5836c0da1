"""AE-SAM's decision against its formula; where it cannot be taken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, RuntimeCounted, assert_same

import sam_optax

W = jnp.array([1.0, -2.0])
SCALES = [1.0, 0.5, 0.6, 2.0, 0.1, 0.7, 3.0, 2.9]
SAM = sam_optax.sam(0.3)
ALWAYS, NEVER = sam_optax.above_average(-1e9), sam_optax.above_average(1e9)


def sharp(when, **options):
    return sam_optax.sharpness_aware(optax.sgd(0.1), SAM, when=when, **options)


def gradient(params):
    return params**3


def squares(scale):
    return float(np.sum((scale * np.asarray(gradient(W), np.float64)) ** 2))


@pytest.mark.parametrize(("c", "decay"), [(0.5, 0.9), (lambda step: 1.0 - 0.4 * step, 0.6)])
def test_decisions_and_statistics_follow_the_formula(c, decay):
    tx = sharp(sam_optax.above_average(c, decay))
    step = jax.jit(lambda s, a: tx.update(None, s, W, grad_fn=lambda p: a * gradient(p)))
    state, mean, variance = tx.init(W), 0.0, 0.0
    for t, scale in enumerate(SCALES):
        square = squares(scale)
        mean = decay * mean + (1 - decay) * square
        variance = decay * variance + (1 - decay) * (square - mean) ** 2
        perturbs = square >= mean + (c(t) if callable(c) else c) * np.sqrt(variance)
        updates, state = step(state, scale)
        assert state.when_state.mean == pytest.approx(mean, rel=1e-5)
        assert state.when_state.variance == pytest.approx(variance, rel=1e-4, abs=1e-9)
        point = W + (SAM.update(gradient(W), SAM.init(W), W)[0] if perturbs else 0)
        np.testing.assert_allclose(updates, -0.1 * scale * gradient(point), rtol=1e-5)


@pytest.mark.parametrize(("when", "evaluations"), [(ALWAYS, 2), (NEVER, 1)])
def test_what_a_step_evaluates(when, evaluations):
    tx, counted = sharp(when), RuntimeCounted(gradient)
    jax.jit(lambda s: tx.update(None, s, W, grad_fn=counted))(tx.init(W))
    jax.effects_barrier()
    assert counted.evaluations == evaluations
    plain = Counted(gradient)
    tx.update(gradient(W), tx.init(W), W, grad_fn=plain)
    assert plain.calls == evaluations - 1


def test_a_step_that_is_skipped_leaves_the_statistics():
    tx = sharp(sam_optax.above_average(0.0), skip_nonfinite=True)
    _, state = tx.update(None, tx.init(W), W, grad_fn=gradient)
    _, after = tx.update(None, state, W, grad_fn=lambda p: p * jnp.nan)
    assert_same(after.when_state, state.when_state)
    assert after.skipped == 1


def test_where_there_is_no_gradient_at_the_params():
    for method in (sam_optax.rsam(key=0), sam_optax.momentum_start(SAM)):
        with pytest.raises(ValueError, match=r"when sees the norm .*a start"):
            sam_optax.sharpness_aware(optax.sgd(0.1), method, when=ALWAYS)
    with pytest.raises(ValueError, match=r"when sees the norm .*groups"):
        sharp(ALWAYS, groups=2)
    with pytest.raises(ValueError, match="alternating decides before there is a gradient"):
        sam_optax.alternating(optax.sgd(0.1), SAM, when=ALWAYS)
    tx = sharp(ALWAYS)
    with pytest.raises(ValueError, match=r"ascent_grad_fn is for perturbing steps only"):
        tx.update(None, tx.init(W), W, grad_fn=gradient, ascent_grad_fn=gradient)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_out_of_range(decay):
    with pytest.raises(ValueError, match=f"decay must be .*{decay}"):
        sam_optax.above_average(0.0, decay)
