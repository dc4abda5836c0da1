"""Starts belong to whoever writes them, and states to whoever returns them."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same

import sam_optax

W = jnp.array(3.0)
KEY = jax.random.key(0)


def tens_away(state=()):
    """A user's perturbation that takes its ascent gradient at w + 10."""
    return sam_optax.Perturbation(
        lambda params: state,
        lambda grads, state, params=None, **extra: (jax.tree.map(lambda g: 0.1 * g, grads), state),
        lambda params, state, **extra: jax.tree.map(lambda w: w + 10, params),
    )


def points_of(tx, params=W):
    """Where a step evaluates its gradients."""
    seen = []
    tx.update(None, tx.init(params), params, grad_fn=lambda p: seen.append(float(p)) or p)
    return seen


def test_a_start_of_the_users_is_used():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), tens_away())
    np.testing.assert_allclose(points_of(tx), [13, 4.3], rtol=1e-6)


@pytest.mark.parametrize("state", [(), jnp.zeros(()), KEY, {"a": 1.0}, None])
@pytest.mark.parametrize(
    "wrapper",
    [
        lambda p: optax.chain(p),
        lambda p: optax.chain(optax.identity(), optax.chain(p)),
        lambda p: optax.masked(p, True),
        lambda p: optax.GradientTransformationExtraArgs(*p),
        lambda p: sam_optax.Perturbation(p.init, p.update),
        lambda p: p._replace(update=p.update),
    ],
    ids=["chain", "nested", "masked", "tuple", "rebuilt", "replace"],
)
def test_a_start_of_the_users_is_never_lost_in_silence(wrapper, state):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), wrapper(tens_away(state)))
    with pytest.raises(ValueError, match="contains a start"):
        tx.init(W)


@pytest.mark.parametrize(
    "rebuilt",
    [copy.copy, copy.deepcopy, lambda p: jax.tree.map(lambda leaf: leaf, p)],
    ids=["copy", "deepcopy", "tree_map"],
)
@pytest.mark.parametrize("make", [tens_away, lambda: sam_optax.rsam(0.1, key=KEY)])
def test_a_copy_keeps_its_start(rebuilt, make):
    method = make()
    again = rebuilt(method)
    assert isinstance(again, sam_optax.Perturbation)
    assert again.has_start
    for whole in (method, again):
        assert isinstance(whole.init(W), sam_optax.StartState)
    tx, other = (sam_optax.sharpness_aware(optax.sgd(0.1), m) for m in (method, again))
    assert points_of(tx) == points_of(other)


def test_wrappers_of_ours_keep_a_start_of_the_users():
    only = sam_optax.perturb_only(tens_away(), True)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), only)
    np.testing.assert_allclose(points_of(tx), [13, 4.3], rtol=1e-6)


STATES = {
    "count": jnp.zeros((), jnp.int32),
    "raw_key": jax.random.PRNGKey(0),
    "typed_key": KEY,
    "array": jnp.ones((2, 3)),
    "list": [jnp.zeros(()), {"a": jnp.ones(2)}],
    "none": None,
    "number": 2.0,
}


@pytest.mark.parametrize("combinator", [sam_optax.sharpness_aware, sam_optax.alternating])
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.fast("typed_key-alternating", "array-sharpness_aware", "none-*")
def test_whatever_init_returns_is_a_state(kind, combinator):
    """Eagerly, under jit and in a scan."""

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

    start = jnp.ones(2), jax.tree.map(jnp.asarray, tx.init(jnp.ones(2)))
    ends = [start, start, jax.jit(lambda carry: jax.lax.scan(step, carry, None, 4)[0])(start)]
    for _ in range(4):
        ends = [step(ends[0])[0], jax.jit(step)(ends[1])[0], ends[2]]
    steps = 4 if combinator is sam_optax.sharpness_aware else 2
    expected = STATES[kind]
    for _ in range(steps):
        expected = advance(expected)
    for end in ends:
        found = end[1].perturbation_state
        if kind == "typed_key":
            found, expected_data = (jax.random.key_data(k) for k in (found, expected))
            np.testing.assert_array_equal(found, expected_data)
        else:
            assert_same(found, jax.tree.map(jnp.asarray, expected))


def test_a_state_of_another_kind_is_refused_by_the_method():
    method = sam_optax.fsam(0.1)
    other = sam_optax.rsam(0.1, key=KEY)
    with pytest.raises(TypeError, match=r"FullGradientState.*StartState.*another method"):
        method.update(W, other.init(W), W)
    with pytest.raises(TypeError, match="StartState"):
        other.start_fn(W, method.init(W))
