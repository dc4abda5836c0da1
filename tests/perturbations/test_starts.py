"""Starts belong to whoever writes them, and states to whoever returns them."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same
from methods import often

import sam_optax

W = jnp.array(3.0)
KEY = jax.random.key(0)
RSAM = sam_optax.rsam(0.1, key=KEY)


def tens_away(state=()):
    """A user's perturbation that takes its ascent gradient at w + 10."""
    return sam_optax.Perturbation(
        lambda params: state,
        lambda grads, state, params=None, **extra: (jax.tree.map(lambda g: 0.1 * g, grads), state),
        lambda params, state, **extra: jax.tree.map(lambda w: w + 10, params),
    )


def points_of(method):
    """Where a step evaluates its gradients."""
    seen, tx = [], sam_optax.sharpness_aware(optax.sgd(0.1), method)
    tx.update(None, tx.init(W), W, grad_fn=lambda p: seen.append(float(p)) or p)
    return seen


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: sam_optax.perturb_only(p, True)])
def test_a_start_of_the_users_is_used(wrap):
    np.testing.assert_allclose(points_of(wrap(tens_away())), [13, 4.3], rtol=1e-6)


LOSES_THE_START = {
    "chain": lambda p: optax.chain(optax.identity(), optax.chain(p)),
    "named_chain": lambda p: optax.named_chain(("start", p)),
    "inject_hyperparams": lambda p: optax.inject_hyperparams(lambda rho: p)(rho=0.1),
    "masked": lambda p: optax.masked(p, True),
    "multi_transform": lambda p: optax.multi_transform({"a": p}, "a"),
    "apply_if_finite": lambda p: optax.apply_if_finite(p, 2),
    "flatten": optax.flatten,
    "in_random_start": lambda p: sam_optax.random_start(optax.chain(p), key=KEY),
    "in_perturb_only": lambda p: sam_optax.perturb_only(optax.chain(p), True),
    "tuple": lambda p: optax.GradientTransformationExtraArgs(*p),
    "rebuilt": lambda p: sam_optax.Perturbation(p.init, p.update),
    "replace": lambda p: p._replace(update=p.update),
}


@pytest.mark.parametrize("wrapper", LOSES_THE_START)
def test_a_start_is_never_lost_in_silence(wrapper):
    for state in ((), jnp.zeros(()), KEY, {"a": 1.0}, None):
        for method in (RSAM, tens_away(state)):
            tx = sam_optax.sharpness_aware(optax.sgd(0.1), LOSES_THE_START[wrapper](method))
            with pytest.raises(ValueError, match=r"contains a start.*Put the start outermost"):
                tx.init(W)


def test_a_lost_start_is_an_error_in_update_too():
    method = sam_optax.as_perturbation(optax.chain(RSAM))
    with pytest.raises(ValueError, match="Put the start outermost"):
        method.update(W, (RSAM.init(W),), W)


@pytest.mark.parametrize(
    "rebuilt",
    [copy.copy, copy.deepcopy, lambda p: jax.tree.map(lambda leaf: leaf, p)],
    ids=["copy", "deepcopy", "tree_map"],
)
@pytest.mark.parametrize("method", [tens_away(), RSAM], ids=["users", "rsam"])
def test_a_copy_keeps_its_start(rebuilt, method):
    again = rebuilt(method)
    assert isinstance(again, sam_optax.Perturbation)
    assert isinstance(again.init(W), sam_optax.StartState)
    assert points_of(again) == points_of(method)


STATES = {
    "count": jnp.zeros((), jnp.int32),
    "raw_key": jax.random.PRNGKey(0),
    "typed_key": KEY,
    "array": jnp.ones((2, 3)),
    "none": None,
    "number": 2.0,
}


@pytest.mark.parametrize("combinator", [sam_optax.sharpness_aware, sam_optax.alternating])
@pytest.mark.parametrize("kind", often(STATES, "typed_key", "array"))
def test_whatever_init_returns_is_a_state(kind, combinator):
    """Eagerly, and in a scan under jit."""

    def advance(state):
        if kind == "typed_key":
            return jax.random.split(state)[0]
        return jax.tree.map(lambda leaf: leaf + 1, state)

    method = optax.GradientTransformation(
        lambda params: STATES[kind], lambda grads, state, params=None: (0.1 * grads, advance(state))
    )
    tx = combinator(optax.sgd(0.1), method)
    given = {"grad_fn": lambda p: p} if combinator is sam_optax.sharpness_aware else {}

    def step(carry, _=None):
        w, state = carry
        updates, state = tx.update(w, state, w, **given)
        return (optax.apply_updates(w, updates), state), None

    eager = start = jnp.ones(2), jax.tree.map(jnp.asarray, tx.init(jnp.ones(2)))
    expected = STATES[kind]
    for t in range(4):
        eager, _ = step(eager)
        if given or t % 2:
            expected = advance(expected)
    scanned, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, None, 4))(start)
    for _, state in (eager, scanned):
        assert_same(state.perturbation_state, jax.tree.map(jnp.asarray, expected))


def test_a_state_of_another_kind_is_refused_by_the_method():
    fsam = sam_optax.fsam(0.1)
    with pytest.raises(TypeError, match=r"FullGradientState.*StartState.*another method"):
        fsam.update(W, RSAM.init(W), W)
    with pytest.raises(TypeError, match="StartState"):
        RSAM.start_fn(W, fsam.init(W))
