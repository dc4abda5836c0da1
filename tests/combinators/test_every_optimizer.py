"""Every optimizer and wrapper that optax exports, as the base and around the combinators."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, signature, vector
from methods import often
from optax_list import OPTIMIZERS, WRAPPERS, build, exported, is_optimizer

import sam_optax

if not hasattr(optax, "partition"):
    pytest.skip("this optax has other optimizers", allow_module_level=True)

PARAMS = {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])}
INNER = optax.sgd(0.1, momentum=0.9)
COMBINATORS = {"sharpness_aware": sam_optax.sharpness_aware, "alternating": sam_optax.alternating}
every_combinator = pytest.mark.parametrize("combinator", COMBINATORS)

# They take the gradient of every example, which no perturbation of the params can follow.
PER_EXAMPLE = ["differentially_private_aggregate", "dpsgd"]
# What optax does not do as a base either: its params are pairs of fast and slow ones.
OTHER_PARAMS = ["lookahead"]
WHOLE = [name for name in OPTIMIZERS if is_optimizer(name)] + WRAPPERS
BASES = [name for name in WHOLE if name not in PER_EXAMPLE + OTHER_PARAMS]

# Around sharpness_aware: wrappers that do not pass keyword arguments on, or that hand over other
# params, and what the error says.
CANNOT_AROUND = {
    "flatten": r"sharpness_aware\(optax.flatten\(base_tx\)",
    "lookahead": "unexpected keyword argument 'grad_fn'",
    "sam": "sharpness_aware needs a gradient function",
    "split_real_and_imaginary": "unexpected keyword argument 'grad_fn'",
}
AROUND = [(name, "sharpness_aware") for name in WRAPPERS if name not in CANNOT_AROUND]
AROUND += [(name, "alternating") for name in ("chain", "masked", "inject_hyperparams")]
# What they hand on is not what they got.
CHANGES_UPDATES = ["lookahead", "mechanize", "sam", "schedule_free"]
# Its step depends on the loss, which a loop with alternating passes for the perturbed params.
STEPS_BY_THE_LOSS = {"momo", "polyak_sgd"}


def loss(params):
    return 0.5 * (jnp.sum(params["bias"] ** 2) + jnp.sum(params["kernel"] ** 2))


gradient = jax.grad(loss)


def asked(name, params):
    """The extra arguments that optax's transformations ask for."""
    if name == "sam":  # takes none
        return {}
    given = {"value": loss(params)}
    if name == "lbfgs":
        return {**given, "grad": gradient(params), "value_fn": loss}
    return {**given, "obj_fn": loss}


def train(tx, params, state, calls=1, asked=lambda params: {}, **extra):
    """A training step of one or two calls."""
    for _ in range(calls):
        updates, state = tx.update(gradient(params), state, params, **asked(params), **extra)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", often(BASES, "adamw"))
def test_as_the_base(name):
    """One program for the optimizer alone and for both combinators; ρ = 0 leaves it as it is."""
    base = build(name, INNER)

    @jax.jit
    def step(rho, reached):
        run = functools.partial(train, asked=functools.partial(asked, name))
        aware, moved = (combine(base, sam_optax.sam(rho)) for combine in COMBINATORS.values())
        return [
            run(optax.with_extra_args_support(base), *reached[0]),
            run(aware, *reached[1], grad_fn=gradient),
            run(moved, *reached[2], calls=2),
        ]

    combined = [combine(base, sam_optax.sam(0.0)) for combine in COMBINATORS.values()]
    reached = [(PARAMS, tx.init(PARAMS)) for tx in (base, *combined)]
    kept = signature(step(0.0, reached)[0][1]) == signature(reached[0][1])
    for rho in (0.0, 0.0):
        before, reached = reached, step(rho, reached)
        if kept:  # where optax itself keeps the dtypes of its state
            assert signature(reached) == signature(before)
    (params, state), (aware_params, aware_state), (moved, moved_state) = reached
    assert_close((aware_params, aware_state.base_state), (params, state), rtol=2e-6, atol=1e-6)
    assert_close((moved, moved_state.base_state), (params, state), rtol=2e-6, atol=1e-6)
    assert int(aware_state.step) == int(moved_state.step) == 2
    sharp = step(0.1, reached)
    assert np.all(np.isfinite(vector([params for params, _ in sharp])))
    if name not in STEPS_BY_THE_LOSS:
        assert_close(sharp[2][0], sharp[1][0], rtol=1e-5, atol=1e-5)


@every_combinator
def test_gradients_of_single_examples(combinator):
    """An average over examples is needed, or the perturbation would have another shape."""
    examples = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    match = r"{} must have the shapes.*their mean.*For differential privacy"
    for name in PER_EXAMPLE:
        tx = COMBINATORS[combinator](build(name), sam_optax.sam(0.1))
        with pytest.raises(ValueError, match=match.format("grads")):
            tx.update(examples, tx.init(PARAMS), PARAMS, grad_fn=gradient)
    if combinator == "sharpness_aware":
        with pytest.raises(ValueError, match=match.format("the result of grad_fn")):
            tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=lambda p: examples)


@every_combinator
def test_pairs_of_fast_and_slow_params(combinator):
    tx = COMBINATORS[combinator](build("lookahead", INNER), sam_optax.sam(0.1))
    with pytest.raises(TypeError, match=f"{combinator} got optax.LookaheadParams"):
        tx.init(optax.LookaheadParams.init_synced(PARAMS))


@functools.cache
def after_two_steps(name, kind, rho):
    """The wrapper around a combinator (or around the base alone), after two training steps."""
    inner = COMBINATORS[kind](INNER, sam_optax.sam(rho)) if kind else INNER
    tx = optax.with_extra_args_support(build(name, inner))
    extra = {"grad_fn": gradient} if kind == "sharpness_aware" else {}
    calls = 2 if kind == "alternating" else 1
    step = jax.jit(functools.partial(train, tx, calls=calls, **extra))
    reached = step(PARAMS, tx.init(PARAMS))
    last = step(*reached)
    assert signature(last) == signature(reached)
    return last[0]


@pytest.mark.parametrize(("name", "kind"), AROUND)
@pytest.mark.slow
def test_around_a_combinator(name, kind):
    assert_close(after_two_steps(name, kind, 0.0), after_two_steps(name, None, 0.0), 1e-6, 1e-6)
    sharp = after_two_steps(name, kind, 0.3)
    if name not in CHANGES_UPDATES:
        assert_close(sharp, after_two_steps("chain", "sharpness_aware", 0.3), 1e-5)
    assert np.all(np.isfinite(vector(sharp)))
    assert np.any(vector(sharp) != vector(after_two_steps(name, None, 0.0)))


@pytest.mark.parametrize("name", CANNOT_AROUND)
def test_what_cannot_be_around(name):
    tx = build(name, sam_optax.sharpness_aware(INNER, sam_optax.sam(0.1)))
    params = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    with pytest.raises((TypeError, ValueError), match=CANNOT_AROUND[name]):
        tx.update(gradient(PARAMS), tx.init(params), params, grad_fn=gradient)


@every_combinator
def test_multi_steps_inside_is_not_a_transformation(combinator):
    """optax's class has ``init`` and ``update``; its method returns one."""
    accumulating = optax.MultiSteps(INNER, 2)
    with pytest.raises(TypeError, match=r"base_tx .*MultiSteps.*\.gradient_transformation\(\)"):
        COMBINATORS[combinator](accumulating, sam_optax.sam(0.1))
    COMBINATORS[combinator](accumulating.gradient_transformation(), sam_optax.sam(0.1))


def test_the_list_is_optax_whole():
    """The functions are found, and what is excepted is there."""
    assert {"sgd", "adamw", "lbfgs", "prodigy", "schedule_free_sgd"} <= set(OPTIMIZERS)
    assert {"chain", "masked", "lookahead", "flatten", "schedule_free"} <= set(WRAPPERS)
    excepted = {*PER_EXAMPLE, *OTHER_PARAMS, *CANNOT_AROUND, *CHANGES_UPDATES}
    assert excepted <= set(exported())
