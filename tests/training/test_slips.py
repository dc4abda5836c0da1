"""The usual slips in a training step: the error names the slip and says what to pass."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same
from training_steps import create, loss, params, sgd_with

import sam_optax

X = jnp.ones((3, 2))
SAM = sgd_with("sam")
OPTIMIZERS = [SAM, sgd_with("rsam"), optax.chain(optax.clip(1.0), SAM), optax.sgd(0.1)]


def on_batch(params):
    return loss(params, X)


def of_kernel(params):
    return X @ params["kernel"]


GRAD = jax.grad(on_batch)
PAIR = jax.value_and_grad(on_batch)
GIVEN = r"grads must be a gradient.*"
RESULT = r"the result of grad_fn must be a gradient.*jax\.value_and_grad"
GRAD_FN = r"[\s\S]*called as grad_fn\(params\)\..*jax\.grad\(lambda"
LOSS_FN = r"[\s\S]*called as loss_fn\(params\)\. Close"
SLIPS = {
    "a pair as grads": (
        lambda s: s.apply_gradients(grads=PAIR(s.params), grad_fn=GRAD),
        GIVEN + r"jax\.value_and_grad.*jax\.grad",
    ),
    "a function as grads": (
        lambda s: s.apply_gradients(grads=GRAD, grad_fn=GRAD),
        GIVEN + "got a function: call it",
    ),
    "a pair from grad_fn": (lambda s: s.apply_gradients(grads=None, grad_fn=PAIR), RESULT),
    "a batch for apply_loss": (
        lambda s: s.apply_loss(loss, X)[0],
        r"no further positional arguments, got 1\..*Close over",
    ),
    "no batch": (lambda s: s.apply_loss(loss)[0], "missing.*'x'" + LOSS_FN),
    "a batch by keyword": (lambda s: s.apply_loss(loss, x=X)[0], "missing.*'x'" + LOSS_FN),
    "no params": (lambda s: s.apply_loss(lambda: 0.0)[0], "takes 0 positional" + LOSS_FN),
    "a pair": (lambda s: s.apply_loss(lambda p: (on_batch(p), 1.0)), "pair: pass has_aux=True"),
    "a differentiated loss": (lambda s: s.apply_loss(PAIR), "differentiated here"),
    "no aux": (
        lambda s: s.apply_loss(on_batch, has_aux=True),
        r"must return a pair \(loss, aux\), got an array of shape",
    ),
    "an array": (
        lambda s: s.apply_loss(of_kernel),
        r"scalar, got an array of shape \(3, 2\): take the mean",
    ),
    "a gradient": (lambda s: s.apply_loss(GRAD), "scalar, got a dict"),
}
# What sharpness_aware itself would not find: it does not see these calls.
OF_SAM = {
    "a pair from grad_fn beside grads": (
        lambda s: s.apply_gradients(grads=GRAD(s.params), grad_fn=PAIR),
        RESULT,
    ),
    "batch forgotten": (
        lambda s: s.apply_gradients(grads=None, grad_fn=jax.grad(loss)),
        "missing .* argument: 'x'" + GRAD_FN,
    ),
    "params forgotten": (
        lambda s: s.apply_gradients(grads=params(), grad_fn=lambda: None),
        "takes 0 positional" + GRAD_FN,
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_named_whatever_the_optimizer(slip):
    call, match = SLIPS[slip]
    for tx in OPTIMIZERS:
        with pytest.raises(TypeError, match=match):
            call(create(tx))


@pytest.mark.parametrize("slip", OF_SAM)
def test_a_slip_is_named_under_jit(slip):
    call, match = OF_SAM[slip]
    with pytest.raises(TypeError, match=match):
        jax.jit(call)(create(SAM))


def finite(tx):
    return create(optax.apply_if_finite(tx, max_consecutive_errors=1))


def with_leaf(leaf):
    state = create(optax.identity()).replace(params={"w": jnp.ones(2), "n": leaf})
    return state.apply_loss(lambda p: jnp.sum(p["w"]))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: create(SAM).apply_gradients(grads=None), ValueError, "grads or grad_fn"),
        (lambda: create(SAM).apply_gradients(grads=params()), ValueError, "grad_fn"),
        (lambda: create(sam_optax.sam()), TypeError, r"tx is a Perturb.*sharpness_aware\(base_tx"),
        (
            lambda: create(sgd_with("sam", groups=2)).apply_loss(on_batch),
            TypeError,
            r"called as loss_fn\(params, i\)",
        ),
        (lambda: finite(sgd_with("rsam")).apply_loss(on_batch), TypeError, "skip_nonfinite=True"),
        (
            lambda: create(SAM).apply_loss(on_batch, step=1.0),
            TypeError,
            r"step.*state\.replace\(step=",
        ),
        *(
            (lambda leaf=leaf: with_leaf(leaf), TypeError, r"\['n'\].*filter it out")
            for leaf in (jnp.array([1, 2]), jnp.array([True]), jax.random.key(0), jnp.tanh)
        ),
    ],
)
def test_other_errors_say_what_to_do(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_errors_of_the_loss_itself_are_its_own():
    def broken(params):
        raise TypeError("of the loss")

    with pytest.raises(TypeError, match=r"^of the loss"):
        create(SAM).apply_loss(broken)
    with pytest.raises(TypeError, match=r"^of the loss"):
        create(SAM).apply_gradients(grads=None, grad_fn=broken)


def test_a_decorator_that_shows_another_signature_does_no_harm():
    """``functools.wraps`` around a function that closes over the batch."""
    closed = functools.wraps(loss)(lambda params: loss(params, X))
    expected, _ = create(SAM).apply_loss(on_batch)
    assert_same(create(SAM).apply_loss(closed)[0].params, expected.params)
