"""optax's wrappers around ``sharpness_aware``, and inside it as the base optimizer."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import assert_close, assert_same, norm
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
PARAMS = {
    "layer0": {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.1, -0.2])},
    "layer1": {"kernel": jnp.array([[2.0], [-1.0]]), "bias": jnp.array([0.3])},
}


def gradient(params, shift=0.0):
    """Of a loss with a curvature that changes."""
    return jax.tree.map(lambda x: x + 0.1 * x**3 + shift, params)


def train(tx, steps=3, jit=False):
    """Params and state after some steps.

    Outside of jit, most of the work is in functions that the shared methods have compiled.
    """

    def step(params, state, shift):
        grad_fn = lambda p: gradient(p, shift)
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    params = PARAMS
    state = tx.init(params)
    for i in range(steps):
        params, state = step(params, state, jnp.asarray(0.1 * i, jnp.float32))
    return params, state


def change(params):
    return jax.tree.map(jnp.subtract, params, PARAMS)


def sharp(name, base=None, **options):
    return sam_optax.sharpness_aware(base or optax.sgd(0.1), make(name), **options)


# ---------------------------------------------------------------- around sharpness_aware


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("sam")
def test_chain(name):
    alone, _ = train(sharp(name))
    chained, _ = train(optax.chain(optax.identity(), sharp(name), optax.scale(1.0)))
    assert_close(chained, alone, 1e-6)
    halved, _ = train(optax.chain(sharp(name), optax.scale(0.5)), steps=1)
    whole, _ = train(sharp(name), steps=1)
    assert_close(jax.tree.map(lambda x: 2 * x, change(halved)), change(whole), 1e-4)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.fast("*-sam", "False-*")
def test_inject_hyperparams(name, jit):
    tx = optax.inject_hyperparams(lambda lr: sharp(name, optax.sgd(lr)))(lr=0.1)
    assert_close(train(tx, jit=jit)[0], train(sharp(name), jit=jit)[0], 1e-6)


def test_inject_hyperparams_with_a_schedule():
    tx = optax.inject_hyperparams(
        lambda rho: sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho))
    )(rho=lambda t: 0.1 * (t + 1))
    scheduled = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(lambda t: 0.1 * (t + 1)))
    assert_close(train(tx)[0], train(scheduled)[0], 1e-6)


@pytest.mark.parametrize("name", ["fsam", "rsam"])
@pytest.mark.slow
def test_apply_if_finite(name):
    params, state = train(optax.apply_if_finite(sharp(name), max_consecutive_errors=2))
    assert_close(params, train(sharp(name))[0], 1e-6)
    assert int(state.total_notfinite) == 0
    tx = optax.apply_if_finite(sharp(name), max_consecutive_errors=2)
    w = PARAMS
    nan = jax.tree.map(lambda x: x * jnp.nan, w)
    state = tx.init(w)
    updates, state = tx.update(nan, state, w, grad_fn=lambda p: nan)
    assert norm(updates) == 0
    assert_same(state.inner_state, sharp(name).init(w))


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.slow
def test_schedule_free(name):
    """Its own point y is where the gradients are taken; it runs and makes progress."""
    tx = optax.contrib.schedule_free(sharp(name, optax.sgd(0.2)), learning_rate=0.2, b1=0.9)
    params, state = train(tx, steps=12)
    evaluated = optax.contrib.schedule_free_eval_params(state, params)
    assert norm(evaluated) < 0.7 * norm(PARAMS)
    assert int(state.base_optimizer_state.step) == 12


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("sam", "rsam")
def test_multi_steps(name):
    """Every second step is taken, with the averaged gradient where it is used at all."""
    tx = optax.MultiSteps(sharp(name), every_k_schedule=2)
    params = PARAMS
    state = tx.init(params)
    # Before optax 0.2.5 it takes functions that are pytrees only.
    old = tuple(map(int, optax.__version__.split(".")[:3])) < (0, 2, 5)
    grad_fn = jax.tree_util.Partial(gradient) if old else gradient
    step = jax.jit(lambda s, p: tx.update(gradient(p), s, p, grad_fn=grad_fn))
    first, state = step(state, params)
    assert norm(first) == 0
    second, state = step(state, params)
    expected, _ = sharp(name).update(
        gradient(params), sharp(name).init(params), params, grad_fn=gradient
    )
    assert_close(second, expected, 1e-5)
    assert int(state.inner_opt_state.step) == 1


def test_masked_around_it():
    """The gradient function then gets the masked tree; the rest is the caller's to merge."""
    params = PARAMS
    tx = optax.masked(sharp("sam"), {"layer0": True, "layer1": False})

    def grad_fn(masked):
        grads = gradient({"layer0": masked["layer0"], "layer1": params["layer1"]})
        return {"layer0": grads["layer0"], "layer1": optax.MaskedNode()}

    grads = gradient(params)
    updates, _ = tx.update(grads, tx.init(params), params, grad_fn=grad_fn)
    only = sam_optax.perturb_only(make("sam"), {"layer0": True, "layer1": False})
    reference = sam_optax.sharpness_aware(optax.sgd(0.1), only)
    expected, _ = reference.update(grads, reference.init(params), params, grad_fn=gradient)
    assert_close(updates["layer0"], expected["layer0"], 1e-5)
    assert_same(updates["layer1"], grads["layer1"])


# ---------------------------------------------------------------- inside, as base_tx


@pytest.mark.parametrize("name", FOUR)
def test_masked_and_multi_transform_inside(name):
    labels = {"layer0": "fast", "layer1": "frozen"}
    base = optax.multi_transform({"fast": optax.sgd(0.1), "frozen": optax.set_to_zero()}, labels)
    params, _ = train(sharp(name, base))
    assert_same(params["layer1"], PARAMS["layer1"])
    assert norm(change(params)) > 1e-3
    one, _ = train(sharp(name, base), steps=1)
    whole, _ = train(sharp(name), steps=1)
    assert_close(one["layer0"], whole["layer0"], 1e-6)
    decay = optax.masked(optax.add_decayed_weights(0.1), {"layer0": True, "layer1": False})
    decayed, _ = train(sharp(name, optax.chain(decay, optax.sgd(0.1))), steps=1)
    assert_close(decayed["layer1"], whole["layer1"], 1e-6)
    difference = jax.tree.map(jnp.subtract, decayed["layer0"], whole["layer0"])
    assert_close(difference, jax.tree.map(lambda x: -0.01 * x, PARAMS["layer0"]), 1e-3)


@pytest.mark.parametrize(
    "base",
    [
        optax.adamw(1e-2),
        optax.lion(1e-2),
        optax.chain(optax.clip(0.1), optax.adam(1e-2)),
        optax.contrib.schedule_free_adamw(1e-2),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.inject_hyperparams(optax.sgd)(0.1),
        optax.flatten(optax.sgd(0.1)),
    ],
    ids=["adamw", "lion", "clip", "schedule_free", "if_finite", "inject", "flatten"],
)
@pytest.mark.fast("adamw", "clip", "schedule_free")
def test_base_optimizers(base):
    """Each sees the sharp gradient and the unperturbed params, and nothing else changes."""
    params = PARAMS
    tx = sam_optax.sharpness_aware(base, make("sam"))
    state = tx.init(params)
    updates, state = tx.update(gradient(params), state, params, grad_fn=gradient)
    point, _ = make("sam").perturb_fn(params, gradient(params), make("sam").init(params))
    expected = base.update(gradient(point), base.init(params), params)
    assert_same((updates, state.base_state), expected)


@pytest.mark.parametrize("combine", ["sharpness_aware", "alternating", "simultaneous"])
def test_the_state_of_a_descent_is_that_of_a_chain(combine):
    """As in a base optimizer that began with the piece: such checkpoints can be restored."""
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    for piece in (sam_optax.surrogate_gap(), sam_optax.reuse_orthogonal()):
        base = optax.adamw(1e-3)
        tx = getattr(sam_optax, combine)(base, sam_optax.sam(), descent=piece)
        state = tx.init(params).base_state
        assert type(state) is tuple
        assert_same(state, optax.chain(piece, base).init(params))
    without = getattr(sam_optax, combine)(base, sam_optax.sam())
    assert_same(without.init(params).base_state, base.init(params))


def test_a_descent_behind_a_wrapper_that_drops_arguments_says_so():
    wrapped = optax.MultiSteps(sam_optax.surrogate_gap(), 2).gradient_transformation()
    w = jnp.ones(2)
    for tx in (
        sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(), descent=wrapped),
        sam_optax.sharpness_aware(
            optax.chain(sam_optax.surrogate_gap(), optax.sgd(0.1)), sam_optax.sam()
        ),
    ):
        with pytest.raises(ValueError, match=r"pass it as descent=.*optax\.MultiSteps"):
            tx.update(None, tx.init(w), w, grad_fn=lambda w: w)
