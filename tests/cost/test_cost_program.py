"""Compiled steps hold no surprises, small programs stay small, and states are what they must be."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cost_programs import (
    METHODS,
    base_step,
    compile_step,
    library,
    library_step,
    perturbation,
    program,
)
from helpers import init_mlp, mlp_loss, x64

import sam_optax
from sam_optax.experiments.cost.measure import COLLECTIVES
from sam_optax.experiments.cost.steps import guarded_norm

pytestmark = pytest.mark.slow

KERNEL = 1024 * 1024
# What talks to the host or to other devices, or stands for a library's random generator.
FOREIGN = {"infeed", "outfeed", "send", "recv", "rng", "rng-bit-generator", "while", "conditional"}
FOREIGN |= {*COLLECTIVES}
# What only moves data. Inside of a fusion it costs nothing; outside it is a pass over memory.
MOVES = {"broadcast", "concatenate", "constant", "convert", "copy", "dynamic-slice", "iota", "pad"}
MOVES |= {"reshape", "slice", "transpose"}


def custom_calls(compiled):
    """Targets of calls into libraries, such as matrix products on some backends."""
    return set(re.findall(r'custom_call_target="([^"]*)"', compiled.text))


def held_moves(compiled):
    """Instructions outside of fusions that only move a whole kernel's worth of data."""
    return [i.text for i in compiled.top_level() if i.opcode in MOVES and i.size >= KERNEL]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_arithmetic(method):
    compiled = program(library(method))
    assert not {i.opcode for i in compiled.all()} & FOREIGN
    assert custom_calls(compiled) <= custom_calls(program(base_step))


def test_foreign_instructions_are_found():
    def reports_the_norm():
        def displacement(grads, params):
            del params
            jax.debug.callback(lambda norm: None, guarded_norm(grads))
            return grads

        return sam_optax.as_perturbation(optax.stateless(displacement))

    reporting = program(perturbation(reports_the_norm))
    assert custom_calls(reporting) - custom_calls(program(base_step))
    several = program(library("sam", ascent_steps=3))  # a loop
    assert {i.opcode for i in several.all()} & FOREIGN


@pytest.mark.parametrize("method", METHODS)
def test_no_kernel_is_copied_or_a_constant(method):
    compiled = program(library(method))
    assert not held_moves(compiled)
    assert not large_constants(compiled)


def large_constants(compiled):
    return [i.text[:80] for i in compiled.all() if i.opcode == "constant" and i.size >= KERNEL]


def test_copies_and_constants_are_found():
    def masks_with_a_constant():
        mask = np.arange(KERNEL, dtype=np.float32).reshape(1024, 1024) % 3

        def displacement(grads, params):
            del params
            return jax.tree.map(lambda g: g * mask if g.ndim == 2 else g, grads)

        return sam_optax.as_perturbation(optax.stateless(displacement))

    def remembers_the_params():
        init = lambda params: jax.tree.map(jnp.copy, params)
        return sam_optax.as_perturbation(
            optax.GradientTransformation(init, lambda grads, _, params: (grads, params))
        )

    assert held_moves(program(perturbation(remembers_the_params)))
    assert large_constants(program(perturbation(masks_with_a_constant)))


@pytest.mark.parametrize("method", METHODS)
def test_float32_params_stay_float32_under_x64(method):
    with x64():
        params = init_mlp()
        assert "f64[" not in small_step(params, METHODS[method]()).as_text()
        assert "f64[" in small_step(params, to_float64()).as_text()  # the control


def small_step(params, method):
    def loss(params, batch):
        return mlp_loss(params, *batch)

    batch = jnp.ones((5, 3), jnp.float32), jnp.ones((5, 2), jnp.float32)
    return compile_step(library_step(loss, method), params, batch)


def to_float64():
    """SAM with a NumPy scalar as radius, which promotes under x64."""
    return sam_optax.as_perturbation(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x * np.float64(0.1), g))
    )


# State: what a method keeps from step to step, beside the base optimizer's.


def state_bytes(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("method", METHODS)
def test_state_sizes(method):
    params = init_mlp()
    copy = state_bytes(params)
    count, key = 4, 8
    expected = {"sam": 0, "asam": 0, "fsam": copy + count, "rsam": key}[method]
    assert state_bytes(METHODS[method]().init(params)) == expected
    base = optax.sgd(0.1, momentum=0.9)
    tx = sam_optax.sharpness_aware(base, METHODS[method]())
    counters = 2 * count
    assert state_bytes(tx.init(params)) == expected + counters + state_bytes(base.init(params))
