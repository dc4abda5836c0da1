"""The usual slips in a training step: the error names the slip and says what to pass."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same
from training_steps import create, loss, params

import sam_optax

X = jnp.ones((3, 2))
SAM = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())
OPTIMIZERS = {
    "sharpness_aware": SAM,
    "random start": sam_optax.sharpness_aware(
        optax.sgd(0.1), sam_optax.rsam(key=jax.random.key(0))
    ),
    "in a chain": optax.chain(optax.clip(1.0), SAM),
    "sgd": optax.sgd(0.1),
}
every_optimizer = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
modes = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])


def on_batch(params):
    return loss(params, X)


GRAD = jax.grad(on_batch)
PAIR = jax.value_and_grad(on_batch)


def step(tx, jitted, take):
    """One step of a new state, by a function of it."""
    return (jax.jit(take) if jitted else take)(create(tx))


@every_optimizer
@modes
@pytest.mark.slow
def test_a_pair_as_grads(tx, jitted):
    with pytest.raises(
        TypeError, match=r"grads must be a gradient.*jax\.value_and_grad.*jax\.grad"
    ):
        step(tx, jitted, lambda s: s.apply_gradients(grads=PAIR(s.params), grad_fn=GRAD))


@every_optimizer
@modes
def test_a_pair_from_grad_fn(tx, jitted):
    expected = r"the result of grad_fn must be a gradient.*jax\.value_and_grad"
    with pytest.raises(TypeError, match=expected):
        step(tx, jitted, lambda s: s.apply_gradients(grads=None, grad_fn=PAIR))
    if tx is not OPTIMIZERS["sgd"]:  # which does not call it
        with pytest.raises(TypeError, match=expected):
            step(tx, jitted, lambda s: s.apply_gradients(grads=GRAD(s.params), grad_fn=PAIR))


@every_optimizer
def test_a_function_as_grads(tx):
    with pytest.raises(TypeError, match=r"grads must be a gradient.*got a function: call it"):
        step(tx, False, lambda s: s.apply_gradients(grads=GRAD, grad_fn=GRAD))


@modes
@pytest.mark.parametrize(
    ("grad_fn", "reason"),
    [(jax.grad(loss), "missing .* argument: 'x'"), (lambda: None, "takes 0 positional")],
    ids=["batch forgotten", "params forgotten"],
)
def test_grad_fn_of_other_arguments(grad_fn, reason, jitted):
    expected = rf"{reason}[\s\S]*called as grad_fn\(params\)\..*jax\.grad\(lambda"
    for grads in (None, params()):
        with pytest.raises(TypeError, match=expected):
            step(SAM, jitted, lambda s: s.apply_gradients(grads=grads, grad_fn=grad_fn))  # noqa: B023


@every_optimizer
@modes
def test_apply_loss_with_a_batch(tx, jitted):
    with pytest.raises(TypeError, match=r"no further positional arguments, got 1\..*Close over"):
        step(tx, jitted, lambda s: s.apply_loss(loss, X)[0])
    for keywords in ({}, {"x": X}):
        with pytest.raises(
            TypeError, match=r"missing.*'x'[\s\S]*called as loss_fn\(params\)\. Close"
        ):
            step(tx, jitted, lambda s: s.apply_loss(loss, **keywords)[0])  # noqa: B023
    with pytest.raises(TypeError, match=r"takes 0 positional[\s\S]*called as loss_fn\(params\)"):
        step(tx, jitted, lambda s: s.apply_loss(lambda: 0.0)[0])


def test_groups_are_told_of_their_index():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(), groups=2)
    with pytest.raises(TypeError, match=r"called as loss_fn\(params, i\)"):
        step(tx, False, lambda s: s.apply_loss(on_batch)[0])


@every_optimizer
@pytest.mark.slow
def test_what_a_loss_returns(tx):
    with pytest.raises(TypeError, match="got a pair: pass has_aux=True"):
        step(tx, False, lambda s: s.apply_loss(lambda p: (on_batch(p), 1.0)))
    with pytest.raises(TypeError, match="differentiated here"):
        step(tx, False, lambda s: s.apply_loss(PAIR))
    with pytest.raises(TypeError, match=r"must return a pair \(loss, aux\), got an array of shape"):
        step(tx, False, lambda s: s.apply_loss(on_batch, has_aux=True))
    with pytest.raises(TypeError, match=r"scalar, got an array of shape \(3, 2\): take the mean"):
        step(tx, False, lambda s: s.apply_loss(lambda p: X @ p["kernel"]))
    with pytest.raises(TypeError, match="scalar, got a dict"):
        step(tx, False, lambda s: s.apply_loss(GRAD))


def test_errors_of_the_loss_itself_are_its_own():
    def broken(params):
        raise TypeError("of the loss")

    with pytest.raises(TypeError, match=r"^of the loss"):
        step(SAM, False, lambda s: s.apply_loss(broken))
    with pytest.raises(TypeError, match=r"^of the loss"):
        step(SAM, False, lambda s: s.apply_gradients(grads=None, grad_fn=broken))


def test_a_decorator_that_shows_another_signature_does_no_harm():
    """``functools.wraps`` around a function that closes over the batch."""

    @functools.wraps(loss)
    def closed(params):
        return loss(params, X)

    expected, _ = step(SAM, False, lambda s: s.apply_loss(on_batch))
    found, _ = step(SAM, False, lambda s: s.apply_loss(closed))
    assert_same(found.params, expected.params)


def test_params_that_are_a_pair_are_no_slip():
    pair = (jnp.ones(2), jnp.ones(3))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1))
    quadratic = lambda p: jnp.sum(p[0] ** 2) + jnp.sum(p[1] ** 2)
    state = create(tx).replace(params=pair, opt_state=tx.init(pair))
    by_grads = state.apply_gradients(grads=jax.grad(quadratic)(pair), grad_fn=jax.grad(quadratic))
    by_loss, _ = state.apply_loss(quadratic)
    assert_same(by_grads.params, by_loss.params)


@pytest.mark.slow
def test_a_pair_given_to_nnxs_optimizer():
    """NNX hands on ``{1: grads}``, what its filter leaves of the pair."""
    nnx = pytest.importorskip("flax.nnx")
    from sam_optax.training import nnx_grad_fn

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SAM, wrt=nnx.Param)
    loss_fn = lambda model: jnp.sum(model(X))
    pair = nnx.value_and_grad(loss_fn)(model)
    with pytest.raises((TypeError, ValueError), match="value_and_grad"):
        optimizer.update(model, pair, grad_fn=nnx_grad_fn(model, loss_fn))


def test_a_perturbation_as_the_optimizer():
    with pytest.raises(TypeError, match=r"tx is a Perturbation.*sharpness_aware\(base_tx, pert"):
        create(sam_optax.sam())
