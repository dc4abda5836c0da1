"""Kinds of methods with the options of the combinators: donated buffers, no gradient, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, signature
from methods import KINDS, OPTIONS, WHOLE, make

import sam_optax

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])}
BASE = optax.sgd(0.1, momentum=0.9)
ALL = {
    "info": True,
    "skip_nonfinite": True,
    "when": sam_optax.every(2),
    "groups": 2,
    "perturb_dtype": jnp.float32,
}
ONE_GRADIENT = [name for name in KINDS if make(name).samples == 1]
CASES = [(name, "all") for name in KINDS] + [(name, "alternating") for name in ONE_GRADIENT]
CASES += [(name, "whole") for name in WHOLE] + [("sam", option) for option in OPTIONS]
DAILY = {("fsam", "all"), ("rsam", "all"), ("sam", "alternating")}
every_case = pytest.mark.parametrize(
    ("name", "option"),
    [pytest.param(*c, marks=[] if c in DAILY else [pytest.mark.slow]) for c in CASES],
)


def gradient(params, scale, group=0.0):
    return jax.grad(lambda p: sum(jnp.sum(x**4 + group * x) for x in jax.tree.leaves(p)))(
        jax.tree.map(lambda x: x * scale, params)
    )


@functools.cache
def subject(name, option):
    """The transformation, and a step of it whose gradients a factor can make zero."""
    if option == "alternating":
        tx = sam_optax.alternating(BASE, make(name), descent=sam_optax.mix_gradients(0.9))
    elif option == "whole":
        tx = WHOLE[name](BASE)
    else:
        tx = sam_optax.sharpness_aware(BASE, make(name), **{**OPTIONS, "all": ALL}[option])

    def step(params, state, scale):
        extra = {}
        if option != "alternating":
            extra["grad_fn"] = lambda p, i=0: gradient(p, scale, scale * i)
        updates, state = tx.update(gradient(params, scale), state, params, **extra)
        return optax.apply_updates(params, updates), state

    return tx, step, jax.jit(step, donate_argnums=(0, 1))


@every_case
def test_donated_steps_with_gradients_and_without(name, option):
    """The state keeps its form; without a gradient the params stay, and nothing is NaN."""
    scales = (1.0, 1.0) if name == "by_hand" else (0.0, 0.0, 1.0, 1.0)  # optax's norm divides by 0
    tx, step, donated = subject(name, option)
    fresh = lambda: (jax.tree.map(jnp.copy, PARAMS), jax.jit(tx.init)(PARAMS))
    carry, kept = fresh(), fresh()
    expected = signature(carry)
    for scale in scales:
        carry, kept = donated(*carry, scale), step(*kept, scale)
        assert signature(carry) == signature(kept) == expected
        if not scale and option != "alternating":  # which moves to the perturbed params and back
            assert_close(carry[0], PARAMS, rtol=0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(carry))
    assert_close(carry[0], kept[0], rtol=1e-5)


@every_case
def test_an_ensemble_is_its_members(name, option):
    tx, step, _ = subject(name, option)
    members = [PARAMS, jax.tree.map(lambda x: 2 * x, PARAMS)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *members)
    of_all = jax.jit(jax.vmap(lambda *one: step(*one, 1.0)))
    found = of_all(*of_all(together, jax.vmap(tx.init)(together)))
    for i, params in enumerate(members):
        alone = step(*step(params, tx.init(params), 1.0), 1.0)
        assert_close(jax.tree.map(lambda x, i=i: x[i], found[0]), alone[0], rtol=1e-5)


# ---------------------------------------------------------------- dtypes


def test_strict_dtype_promotion_of_jax_scalars():
    """Hyperparameters that are JAX scalars, given or from a schedule."""
    value = lambda x: jnp.asarray(x, jnp.float32)
    schedule = lambda x: lambda step: value(x)
    for dtype in (jnp.float16, jnp.complex64):
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), PARAMS)
        for method in (
            sam_optax.sam(value(0.1)),
            sam_optax.asam(schedule(0.1), schedule(0.01), p=3),
            sam_optax.fsam(value(0.1), schedule(0.5), value(0.9), ema_start="bias_corrected"),
            sam_optax.rsam(schedule(0.1), schedule(0.1), value(1.0), key=0),
        ):
            with jax.numpy_dtype_promotion("strict"):
                found = jax.eval_shape(method.update, params, method.init(params), params)
                assert signature(found) == signature((params, method.init(params)))


@pytest.mark.parametrize("grads", ["bfloat16", "float32"])
def test_one_dtype_of_updates_for_all_options(grads):
    """That of the base optimizer for the gradient, whatever surrounds it."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    grad_fn = lambda p, *group: jax.tree.map(lambda x: (0.5 * x).astype(grads), p)
    expected, _ = BASE.update(grad_fn(params), BASE.init(params), params)
    for name, options in OPTIONS.items():
        tx = sam_optax.sharpness_aware(BASE, sam_optax.sam(0.1), **options)
        for given in (None, grad_fn(params)):
            update = functools.partial(tx.update, params=params, grad_fn=grad_fn)
            updates, _ = jax.eval_shape(update, given, tx.init(params))
            assert signature(updates) == signature(expected), name


@pytest.mark.parametrize("given", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("evaluated", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["sam_scheduled", "asam", "fsam", "rsam"])
@pytest.mark.parametrize(
    "options", [{"skip_nonfinite": True}, {"groups": 2}, {"perturb_dtype": jnp.float32}]
)
def test_steps_that_perturb_and_others_agree_on_dtypes(name, options, evaluated, given):
    """Gradients in the params' dtype or wider, from the caller or from the function.

    Where both have one dtype, nothing is promoted in silence.
    """
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    cast = lambda dtype: jax.tree.map(lambda x: x.astype(dtype), params)
    tx = sam_optax.sharpness_aware(BASE, make(name), when=sam_optax.every(2), **options)

    def step(params, state):
        grads = cast(given) if given else None
        updates, state = tx.update(grads, state, params, grad_fn=lambda p, *_: cast(evaluated))
        return optax.apply_updates(params, updates), state

    narrow = {evaluated, given or "bfloat16"} == {"bfloat16"}
    with jax.numpy_dtype_promotion("strict" if narrow else "standard"):
        first = jax.eval_shape(step, params, tx.init(params))
        assert signature(jax.eval_shape(step, *first)) == signature(first)
        assert signature(first[0]) == signature(params)


# ---------------------------------------------------------------- counts and masks


def test_counts_saturate():
    """The largest training step stays it, as ``optax.safe_increment`` has it."""
    seen, largest = [], jnp.iinfo(jnp.int32).max
    for combine in (sam_optax.sharpness_aware, sam_optax.alternating):
        when = lambda step: (seen.append(int(step)), True)[1]
        tx = combine(BASE, sam_optax.sam(0.1), when=when)
        counts = {"step": largest - 5, "skipped": 10}
        state = tx.init(PARAMS)
        state = state._replace(**{k: jnp.asarray(n, jnp.int32) for k, n in counts.items()})
        seen.clear()
        for _ in range(2):
            grad_fn = lambda p: gradient(p, 1.0)
            _, state = tx.update(grad_fn(PARAMS), state, PARAMS, grad_fn=grad_fn)
        assert set(seen) == {largest}


def test_tree_map_params_of_a_mask_of_the_params():
    mask = {"bias": False, "kernel": True}
    for method in (
        sam_optax.perturb_only(sam_optax.fsam(0.1), mask),
        sam_optax.random_start(sam_optax.perturb_only(sam_optax.asam(0.1), mask), key=0),
        sam_optax.asam(0.1, bias_mask={"bias": True, "kernel": False}),
    ):
        tx = sam_optax.sharpness_aware(BASE, method)
        state = tx.init(PARAMS)
        ones = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf + 1, state)
        assert_same(ones.base_state[0].trace, jax.tree.map(jnp.ones_like, PARAMS))
        assert jax.tree.structure(ones) == jax.tree.structure(state)
