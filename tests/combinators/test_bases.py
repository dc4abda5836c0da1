"""Base optimizers with line searches, with a loss, with a closed signature, and in parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, needs_partition

import sam_optax

W = jnp.array([1.0, 2.0, 3.0])
SAM = sam_optax.sam(0.1)


@pytest.mark.parametrize("combine", [sam_optax.sharpness_aware, sam_optax.alternating])
def test_a_line_search_is_a_base(combine):
    """Case 31: ε is parallel to the gradient, so that the step is L-BFGS's own."""
    tx, loss = combine(optax.lbfgs(), sam_optax.sam(0.01)), lambda w: jnp.sum((w - 1) ** 2)

    @jax.jit
    def call(w, state):
        value, grad = jax.value_and_grad(loss)(w)
        updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(w, updates), state

    w, state = W, tx.init(W)
    for _ in range(2 if combine is sam_optax.alternating else 1):
        w, state = call(w, state)
    np.testing.assert_allclose(w - W, [0, -0.4472, -0.8944], atol=1e-4)


@pytest.mark.parametrize("name", ["value_fn", "obj_fn"])
def test_the_gradient_of_a_loss_that_is_passed(name):
    """Case 32. As in optax, the loss takes arguments of update by name."""
    tx, w = sam_optax.sharpness_aware(optax.sgd(0.1), SAM), jnp.array([3.0, 4.0])
    given = {name: lambda w, half, *, scale=1.0: scale * half * jnp.sum(w**2), "half": 0.5}
    for grads in (None, w):
        updates, _ = tx.update(grads, tx.init(w), w, **given)
        np.testing.assert_allclose(updates, [-0.306, -0.408], rtol=1e-6)
    # A gradient function goes before it.
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=lambda p: 2 * p, **given)
    np.testing.assert_allclose(updates, [-0.612, -0.816], rtol=1e-6)


def test_the_gradient_of_a_loss_of_complex_params():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.0))
    w = jnp.array([3.0 + 4.0j])
    updates, _ = tx.update(None, tx.init(w), w, value_fn=lambda w: 0.5 * jnp.sum(jnp.abs(w) ** 2))
    np.testing.assert_allclose(updates, -0.1 * w, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.sgd(0.1), tx)])
def test_a_closed_signature_is_left_alone(wrap):
    """A base that takes a value and refuses anything else."""
    log = []

    def update(updates, state, params=None, *, value=None):
        log.append(value)
        return updates, state

    closed = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = sam_optax.sharpness_aware(wrap(closed), SAM)
    tx.update(W, tx.init(W), W, grad_fn=lambda p: p)
    tx.update(W, tx.init(W), W, grad_fn=lambda p: p, value=3.0)
    tx = sam_optax.alternating(wrap(closed), SAM)
    state = tx.init(W)
    for _ in range(2):
        _, state = tx.update(W, state, W)
    assert log == [None, 3.0, None]


@pytest.mark.parametrize("combine", ["sharpness_aware", "alternating", "simultaneous"])
def test_the_state_of_a_descent_is_that_of_a_chain(combine):
    """As in a base optimizer that began with the piece: such checkpoints can be restored."""
    base, piece = optax.adamw(1e-3), sam_optax.reuse_orthogonal()
    make = functools.partial(getattr(sam_optax, combine), base, SAM)
    state = make(descent=piece).init(W).base_state
    assert type(state) is tuple
    assert_same(state, optax.chain(piece, base).init(W))
    assert_same(make().init(W).base_state, base.init(W))


PARAMS = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
LABELS = {"a": "x", "b": "y"}
ONLY_A = {"a": True, "b": False}


def coupled(p):
    """The gradient of L = ½ a² + ½ b² + 0.1 a b."""
    return {"a": p["a"] + 0.1 * p["b"], "b": p["b"] + 0.1 * p["a"]}


@pytest.mark.parametrize("wrapper", [pytest.param("partition", marks=needs_partition), "masked"])
def test_inside_a_partition_the_error_says_what_to_do(wrapper):
    """Case 36: the user's loss needs all of the params, and the partition hands over some."""
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), SAM)
    if wrapper == "partition":
        tx = optax.partition({"x": tx, "y": optax.sgd(1.0)}, LABELS)
    else:
        tx = optax.masked(tx, ONLY_A)
    with pytest.raises(ValueError, match=r"sharpness_aware\(optax.partition"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, grad_fn=coupled)


@needs_partition
def test_a_partition_as_the_base_and_one_of_perturbations():
    """What the error recommends: a sharp, b plain, and one radius for each group."""
    base = optax.partition({"x": optax.sgd(1.0), "y": optax.sgd(2.0)}, LABELS)
    tx = sam_optax.sharpness_aware(base, sam_optax.perturb_only(SAM, ONLY_A))
    updates, _ = tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=coupled)
    assert_close(updates, {"a": -3.5, "b": -2 * 4.31}, 1e-6)
    radii = optax.partition({"x": SAM, "y": sam_optax.sam(0.2)}, LABELS)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), radii)
    updates, _ = tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=coupled)
    assert_close(updates, {"a": -3.52, "b": -4.51}, 1e-6)
