"""What the cheap members of the family save is really absent from the compiled step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from cost_programs import BASE_TX, base_step, library, mean, perturbation, program, ratios
from test_cost_evaluations import dots_of_a_gradient

import sam_optax
from sam_optax.experiments.cost.steps import Step

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
SAM = sam_optax.sam(0.05)


def on_a_part_of_some_batches(losses):
    tx = sam_optax.sharpness_aware(BASE_TX, SAM, when=sam_optax.every(2))

    def step(params, state, batch):
        few = sam_optax.part_of_batch(batch, 0.125)
        on = lambda examples: jax.grad(lambda p: mean(losses)(p, examples))
        given = {"grad_fn": on(batch), "ascent_grad_fn": on(few)}
        updates, state = tx.update(None, state, params, **given)
        return optax.apply_updates(params, updates), state, jnp.zeros(())

    return Step(tx.init, step)


def test_ascent_on_a_part_of_some_batches():
    compiled, dots = program(on_a_part_of_some_batches), dots_of_a_gradient()
    # The gradient on the whole batch is in both branches, at w and at w + ε.
    assert compiled.branches("dot") == [[dots, 2 * dots]]
    assert compiled.count("dot") == 3 * dots


def test_several_samples_are_one_loop():
    eight = program(perturbation(lambda: sam_optax.low_pass(samples=8, key=KEY)))
    assert eight.count("dot") == dots_of_a_gradient()
    assert eight.count("while") == 1


def test_looksam():
    looksam = library("sam", descent=sam_optax.reuse_orthogonal(), when=sam_optax.every(5))
    assert program(looksam).branches("dot") == [[0, dots_of_a_gradient()]]
    assert program(looksam).count("dot") == 2 * dots_of_a_gradient()


def on_rising_samples(losses):
    masked = optax.chain(SAM, sam_optax.random_mask(key=KEY))
    tx = sam_optax.sharpness_aware(BASE_TX, masked)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(mean(losses))(params, batch)
        rising = sam_optax.rising_samples(losses, params, batch, 0.5)
        updates, state = tx.update(grads, state, params, grad_fn=rising)
        return optax.apply_updates(params, updates), state, value

    return Step(tx.init, step)


def test_rising_samples():
    """A gradient, a forward pass at w + ε, and a gradient on half of the batch."""
    dots = dots_of_a_gradient()
    forward = (dots + 1) // 3
    # The losses at w are those of the ascent gradient's forward pass.
    assert program(on_rising_samples).count("dot") == 2 * dots + forward
    flops = ratios(on_rising_samples, base_step)["flops"]
    assert 1.5 + forward / dots < flops < 1.5 + forward / dots + 0.06
