"""What the cheap members of the family save is really absent from the compiled step."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from cost_hlo import Program
from helpers import init_mlp, mlp

import sam_optax
from sam_optax.experiments.cost.measure import costs

pytestmark = pytest.mark.slow

LAYERS, WIDTH, BATCH = 3, 128, 256
KEY = jax.random.key(0)
BASE = optax.sgd(0.1, momentum=0.9)
SAM = sam_optax.sam(0.05)
PARAMS = jax.eval_shape(lambda: init_mlp(sizes=(WIDTH,) * (LAYERS + 1)))
DATA = (jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),) * 2
# One forward and two backward products a layer, but the inputs need no gradient.
DOTS = 3 * LAYERS - 1


def losses(params, batch):
    x, y = batch
    return jnp.mean((mlp(params, x) - y) ** 2, axis=1)


def loss(params, batch):
    return jnp.mean(losses(params, batch))


def base_step(params, state, batch):
    updates, state = BASE.update(jax.grad(loss)(params, batch), state, params)
    return optax.apply_updates(params, updates), state


def with_grad_fn(tx, part=None):
    """A step from a gradient function alone; the ascent on part of the batch."""

    def step(params, state, batch):
        extra = {}
        if part is not None:
            few = sam_optax.part_of_batch(batch, part)
            extra["ascent_grad_fn"] = lambda p: jax.grad(loss)(p, few)
        grad_fn = lambda p: jax.grad(loss)(p, batch)
        updates, state = tx.update(None, state, params, grad_fn=grad_fn, **extra)
        return optax.apply_updates(params, updates), state

    return step


def compile_step(step, tx):
    state = jax.eval_shape(tx.init, PARAMS)
    return jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, DATA).compile()


@functools.cache
def base():
    return compile_step(base_step, BASE)


def flops(compiled):
    """As multiples of the base optimizer's step."""
    return costs(compiled)["flops"] / costs(base())["flops"]


def dots(compiled):
    return Program(compiled.as_text()).count("dot")


def branches(compiled):
    return Program(compiled.as_text()).branches("dot")


def sharp(perturbation=SAM, base=BASE, **options):
    return sam_optax.sharpness_aware(base, perturbation, **options)


def test_ascent_on_a_part_of_some_batches():
    tx = sharp(when=sam_optax.every(2))
    compiled = compile_step(with_grad_fn(tx, 0.125), tx)
    # The gradient on the whole batch is in both branches, at w and at w + ε.
    assert branches(compiled) == [[DOTS, 2 * DOTS]]
    assert dots(compiled) == 3 * DOTS


def test_several_samples_are_one_loop():
    eight = sharp(sam_optax.low_pass(samples=8, key=KEY))
    compiled = compile_step(with_grad_fn(eight), eight)
    assert dots(compiled) == DOTS
    assert Program(compiled.as_text()).count("while") == 1


def test_looksam():
    tx = sharp(descent=sam_optax.reuse_orthogonal(), when=sam_optax.every(5))
    compiled = compile_step(with_grad_fn(tx), tx)
    assert branches(compiled) == [[0, DOTS]]
    assert dots(compiled) == 2 * DOTS


def test_rising_samples():
    """A gradient, a forward pass at w + ε, and a gradient on half of the batch."""
    tx = sharp(optax.chain(SAM, sam_optax.random_mask(key=KEY)))

    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        rising = sam_optax.rising_samples(losses, params, batch, 0.5)
        updates, state = tx.update(grads, state, params, grad_fn=rising)
        return optax.apply_updates(params, updates), state

    compiled = compile_step(step, tx)
    # The losses at w are those of the ascent gradient's forward pass.
    assert dots(compiled) == 2 * DOTS + LAYERS
    forward = LAYERS / DOTS
    assert 1.5 + forward < flops(compiled) < 1.5 + forward + 0.06
