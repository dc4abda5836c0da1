"""Methods × options of the combinators: with donated buffers, at zero gradients, as ensembles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, signature
from methods import KINDS, OPTIONS, WHOLE, make

import sam_optax

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])}
ALL = {
    "info": True,
    "skip_nonfinite": True,
    "when": sam_optax.every(2),
    "groups": 2,
    "perturb_dtype": jnp.float32,
}
ONE_PASS = {"momentum", "low_pass_samples"}  # take no ascent steps
CASES = [
    pytest.param(name, option, marks=[] if option == "all" else pytest.mark.exhaustive)
    for name in KINDS
    for option in (*OPTIONS, "all")
    if not (name in ONE_PASS and option == "ascent_steps")
]
TOGETHER = [pytest.param(name, "all") for name in KINDS]
TOGETHER += [pytest.param(name, "alternating") for name in KINDS if name != "low_pass_samples"]
TOGETHER += [pytest.param(name, "whole") for name in WHOLE]
CASES += [case for case in TOGETHER if "all" not in case.values]


def gradient(params, scale, group=0.0):
    return jax.grad(lambda p: sum(jnp.sum(x**4 + group * x) for x in jax.tree.leaves(p)))(
        jax.tree.map(lambda x: x * scale, params)
    )


@functools.cache
def subject(name, option):
    """The transformation, and a step of it whose gradients a factor can make zero."""
    base = optax.sgd(0.1, momentum=0.9)
    if option == "alternating":
        tx = sam_optax.alternating(base, make(name))
    elif option == "whole":
        tx = WHOLE[name](base)
    else:
        options = ALL if option == "all" else OPTIONS[option]
        tx = sam_optax.sharpness_aware(base, make(name), **options)

    def step(params, state, scale):
        extra = {}
        if option != "alternating":
            extra["grad_fn"] = lambda p, i=0: gradient(p, scale, scale * i)
        updates, state = tx.update(gradient(params, scale), state, params, **extra)
        return optax.apply_updates(params, updates), state

    return tx, step, jax.jit(step, donate_argnums=(0, 1))


def fresh(name, option):
    params = jax.tree.map(jnp.copy, PARAMS)
    return params, jax.jit(subject(name, option)[0].init)(params)


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.fast("fsam-all", "sam-alternating")
def test_donated_steps_with_gradients_and_without(name, option):
    """The state keeps its form; without a gradient the params stay, and nothing is NaN."""
    scales = (1.0, 1.0) if name == "by_hand" else (0.0, 0.0, 1.0, 1.0)  # optax's norm divides by 0
    _, step, donated = subject(name, option)
    carry, kept = fresh(name, option), fresh(name, option)
    assert signature(carry) == signature(kept)
    for scale in scales:
        carry = donated(*carry, scale)
        kept = step(*kept, scale)
        assert signature(carry) == signature(kept)
        if not scale and option != "alternating":  # which moves to the perturbed params and back
            assert_close(carry[0], PARAMS, rtol=0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(carry))
    assert_close(carry[0], kept[0], rtol=1e-5)


@pytest.mark.parametrize(("name", "option"), TOGETHER)
@pytest.mark.fast("rsam-all")
def test_an_ensemble_is_its_members(name, option):
    tx, step, _ = subject(name, option)
    members = [PARAMS, jax.tree.map(lambda x: 2 * x, PARAMS)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *members)
    carry = together, jax.vmap(tx.init)(together)
    of_all = jax.jit(jax.vmap(lambda *one: step(*one, 1.0)))
    for _ in range(2):
        carry = of_all(*carry)
    for i, params in enumerate(members):
        alone = params, tx.init(params)
        for _ in range(2):
            alone = step(*alone, 1.0)
        assert_close(jax.tree.map(lambda x, i=i: x[i], carry[0]), alone[0], rtol=1e-5)
