"""optax's wrappers around perturbations: they work, or say that a random start would be lost."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import assert_close, assert_same, same
from methods import make

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


def sharp(name, base=None, **options):
    return sam_optax.sharpness_aware(base or optax.sgd(0.1), make(name), **options)


RSAM = make("rsam")
LOSES_THE_START = {
    "chain": lambda: optax.chain(RSAM),
    "chain_of_two": lambda: optax.chain(optax.identity(), RSAM),
    "named_chain": lambda: optax.named_chain(("start", RSAM)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda rho: sam_optax.rsam(rho, key=KEY)
    )(rho=0.1),
    "masked": lambda: optax.masked(RSAM, {"layer0": True, "layer1": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": RSAM, "b": optax.identity()}, {"layer0": "a", "layer1": "b"}
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(RSAM, 2),
    "flatten": lambda: optax.flatten(RSAM),
    "nested": lambda: optax.chain(optax.chain(optax.masked(RSAM, True))),
    "in_random_start": lambda: sam_optax.random_start(optax.chain(RSAM), key=KEY),
    "in_perturb_only": lambda: sam_optax.perturb_only(optax.chain(RSAM), True),
    "through_the_tuple": lambda: optax.GradientTransformationExtraArgs(*RSAM),
}


@pytest.mark.parametrize("wrapper", LOSES_THE_START)
def test_a_lost_random_start_is_an_error(wrapper):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), LOSES_THE_START[wrapper]())
    with pytest.raises(ValueError, match="Put the start outermost"):
        tx.init(PARAMS)


def test_a_lost_random_start_is_an_error_in_update_too():
    params = PARAMS
    method = sam_optax.as_perturbation(optax.chain(RSAM))
    with pytest.raises(ValueError, match="Put the start outermost"):
        method.update(params, (RSAM.init(params),), params)


@pytest.mark.parametrize("copy", ["tree_map", "replace"])
@pytest.mark.slow
def test_a_rebuilt_perturbation_keeps_its_start_or_is_refused(copy):
    """A NamedTuple is a pytree and has ``_replace``: neither may make a silent SAM."""
    if copy == "tree_map":
        rebuilt = jax.tree.map(lambda function: function, RSAM)
    else:
        rebuilt = RSAM._replace(init=lambda params: RSAM.init(params))
    try:
        tx = sam_optax.sharpness_aware(optax.sgd(0.1), rebuilt)
        updates, _ = tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient)
    except (TypeError, ValueError) as error:
        assert "random" in str(error)  # noqa: PT017
    else:
        tx = sharp("rsam")
        assert_same(updates, tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient)[0])


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda m: optax.chain(m),
        lambda m: optax.chain(optax.scale(7.0), m),
        lambda m: optax.apply_if_finite(m, 2),
        lambda m: optax.inject_hyperparams(lambda x: optax.chain(m, optax.scale(x)))(x=1.0),
        lambda m: optax.masked(m, True),
        lambda m: optax.multi_transform({"a": m}, "a"),
    ],
    ids=["chain", "scale", "if_finite", "inject", "masked", "multi_transform"],
)
@pytest.mark.parametrize("name", ["sam", "asam", "fsam"])
@pytest.mark.fast("sam-*")
def test_wrapped_perturbations(name, wrapper):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), wrapper(make(name)))
    assert_close(train(tx)[0], train(sharp(name))[0], 1e-5)


def test_a_start_leaves_the_update_function_alone():
    """Bound methods take no attributes, and one that two perturbations share has no start."""

    class Constant:
        def init(self, params):
            return optax.EmptyState()

        def update(self, updates, state, params=None, **extra):
            return jax.tree.map(lambda p: jnp.full_like(p, 0.5), params), state

        def start(self, params, state, **extra):
            return jax.tree.map(lambda p: p - 1, params)

    parts = Constant()
    method = sam_optax.Perturbation(parts.init, parts.update, parts.start)
    assert method.has_start
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
    x = jnp.array(2.0)
    seen = []
    tx.update(None, tx.init(x), x, grad_fn=lambda p: seen.append(float(p)) or p)
    assert seen == [1.0, 2.5]

    def update_fn(updates, state, params=None, **extra):
        return updates, state

    assert sam_optax.Perturbation(parts.init, update_fn, parts.start).has_start
    assert not sam_optax.Perturbation(parts.init, update_fn).has_start


def test_any_transformation_is_a_perturbation():
    """The hand-made one is SAM; it is added with its sign, so sgd descends."""
    by_hand = optax.chain(optax.contrib.normalize(), optax.scale(0.3))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), by_hand)
    assert_close(train(tx)[0], train(sharp("sam"))[0], 1e-5)
    downhill = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), downhill)
    assert not same(train(tx)[0], train(sharp("sam"))[0])


@pytest.mark.parametrize(
    ("inject", "arguments"),
    [(sam_optax.sam, {"rho": 0.3}), (sam_optax.asam, {"rho": 0.5}), (sam_optax.fsam, {"rho": 0.3})],
)
def test_inject_hyperparams_of_a_method_itself(inject, arguments):
    """Without naming static arguments: numbers with a default, such as p, stay what they are."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), optax.inject_hyperparams(inject)(**arguments))
    direct = sam_optax.sharpness_aware(optax.sgd(0.1), inject(**arguments))
    assert_close(train(tx)[0], train(direct)[0], 1e-6)
