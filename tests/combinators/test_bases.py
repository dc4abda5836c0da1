"""Base optimizers that refuse what they do not know, and who receives what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import needs_partition

import sam_optax

W = jnp.array([1.0, 2.0, 3.0])


def distance(w):
    """Its gradient is parallel at w and at w + ε."""
    return jnp.sum((w - 1) ** 2)


def line_search_arguments(w, loss=distance):
    value, grad = jax.value_and_grad(loss)(w)
    return {"value": value, "grad": grad, "value_fn": loss}


LINE_SEARCHES = {
    "lbfgs": optax.lbfgs,
    "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(10)),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", [*LINE_SEARCHES, "lbfgs-gsam"])
@pytest.mark.fast("backtracking-True")
def test_a_line_search_is_a_base(name, jit):
    """ε is parallel to the gradient here, so that the step is the line search's own."""
    base = LINE_SEARCHES[name.removesuffix("-gsam")]()
    descent = sam_optax.surrogate_gap(0.4) if "gsam" in name else None
    tx = sam_optax.sharpness_aware(base, sam_optax.sam(0.01), descent=descent)

    def step(w):
        given = line_search_arguments(w)
        updates, _ = tx.update(given["grad"], tx.init(w), w, **given)
        alone, _ = base.update(given["grad"], base.init(w), w, **given)
        return updates, alone

    updates, alone = (jax.jit(step) if jit else step)(W)
    np.testing.assert_allclose(updates, alone, rtol=0.02)
    if "lbfgs" in name:
        np.testing.assert_allclose(updates, [0, -0.4472, -0.8944], atol=1e-4)


def test_a_line_search_under_alternating():
    tx = sam_optax.alternating(optax.lbfgs(), sam_optax.sam(0.01))

    @jax.jit
    def call(w, state):
        given = line_search_arguments(w)
        updates, state = tx.update(given["grad"], state, w, **given)
        return optax.apply_updates(w, updates), state

    w, state = W, tx.init(W)
    for _ in range(2):
        w, state = call(w, state)
    np.testing.assert_allclose(w - W, [0, -0.4472, -0.8944], atol=1e-4)


@pytest.mark.slow
def test_a_loss_with_arguments_of_its_own():
    """As in optax, they are taken from the arguments of update by name."""

    def loss(w, target, *, scale=1.0):
        return scale * jnp.sum((w - target) ** 2)

    tx = sam_optax.sharpness_aware(optax.lbfgs(), sam_optax.sam(0.01))
    given = line_search_arguments(W, functools.partial(loss, target=1.0)) | {"value_fn": loss}
    updates, _ = tx.update(None, tx.init(W), W, target=1.0, **given)
    np.testing.assert_allclose(updates, [0, -0.4472, -0.8944], atol=1e-4)


@pytest.mark.parametrize("name", ["value_fn", "obj_fn"])
def test_the_gradient_of_a_loss_that_is_passed(name):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1))
    w = jnp.array([3.0, 4.0])
    loss = {name: lambda w: 0.5 * jnp.sum(w**2)}
    for grads in (None, w):
        updates, _ = tx.update(grads, tx.init(w), w, **loss)
        np.testing.assert_allclose(updates, [-0.306, -0.408], rtol=1e-6)
    # A gradient function goes before it.
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=lambda p: 2 * p, **loss)
    np.testing.assert_allclose(updates, [-0.612, -0.816], rtol=1e-6)


def test_the_gradient_of_a_loss_of_complex_params():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.0))
    w = jnp.array([3.0 + 4.0j])
    updates, _ = tx.update(None, tx.init(w), w, value_fn=lambda w: 0.5 * jnp.sum(jnp.abs(w) ** 2))
    np.testing.assert_allclose(updates, -0.1 * w, rtol=1e-6)


def closed(log):
    """A transformation that takes a value and refuses anything else."""

    def update(updates, state, params=None, *, value=None):
        log.append(value)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def asking(log):
    """A transformation that asks by name."""

    def update(updates, state, params=None, *, ascent_grads=None, perturbed=None, **extra):
        log.append((ascent_grads, perturbed))
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


CLOSED = {
    "alone": closed,
    "chain": lambda log: optax.chain(optax.sgd(0.1), closed(log)),
    "masked": lambda log: optax.masked(closed(log), True),
    "inject": lambda log: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.sgd(rate), closed(log))
    )(rate=0.1),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_signature_is_left_alone(name):
    log = []
    tx = sam_optax.sharpness_aware(CLOSED[name](log), sam_optax.sam(0.1))
    tx.update(W, tx.init(W), W, grad_fn=lambda p: p)
    tx.update(W, tx.init(W), W, grad_fn=lambda p: p, value=3.0)
    assert log == [None, 3.0]
    tx = sam_optax.alternating(CLOSED[name](log), sam_optax.sam(0.1))
    state = tx.init(W)
    for _ in range(2):
        _, state = tx.update(W, state, W)
    assert log == [None, 3.0, None]


WRAPPED = {
    "alone": lambda asks: asks,
    "chain": lambda asks: optax.chain(optax.chain(asks), optax.identity()),
    "masked": lambda asks: optax.masked(asks, True),
    "inject": lambda asks: optax.inject_hyperparams(lambda x: optax.chain(asks, optax.scale(x)))(
        x=1.0
    ),
    "jit": lambda asks: asks._replace(update=jax.jit(asks.update)),
}


@pytest.mark.parametrize("role", ["descent", "base_tx"])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_the_role_decides_who_receives(wrapper, role):
    log = []
    roles = {"base_tx": optax.sgd(0.1), role: WRAPPED[wrapper](asking(log))}
    tx = sam_optax.sharpness_aware(perturbation=sam_optax.sam(0.1), **roles)
    tx.update(W, tx.init(W), W, grad_fn=lambda p: p)
    ((ascent_grads, perturbed),) = log
    received = role == "descent"
    assert (ascent_grads is not None) == received
    assert (perturbed is not None) == received


def test_a_descent_inside_inject_hyperparams():
    injected = optax.inject_hyperparams(sam_optax.surrogate_gap)(alpha=0.4)
    grad_fn = jax.grad(lambda w: jnp.sum(w**4))
    updates = []
    for descent in (injected, sam_optax.surrogate_gap(0.4)):
        tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1), descent=descent)
        updates.append(tx.update(None, tx.init(W), W, grad_fn=grad_fn)[0])
    np.testing.assert_allclose(*updates, rtol=1e-6)


@pytest.mark.parametrize("combinator", [sam_optax.sharpness_aware, sam_optax.alternating])
def test_multi_steps_inside_is_a_transformation(combinator):
    """optax's class has ``init`` and ``update``, but is no transformation."""
    accumulating = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    with pytest.raises(TypeError, match=r"base_tx .*MultiSteps.*\.gradient_transformation\(\)"):
        combinator(accumulating, sam_optax.sam(0.1))
    tx = combinator(accumulating.gradient_transformation(), sam_optax.sam(0.1))
    assert isinstance(tx, optax.GradientTransformation)


def test_a_perturbation_with_a_closed_signature():
    """A plain one gets no arguments; one that claims to take any is told what it breaks."""

    def update(updates, state, params=None):
        return 0.1 * updates, state

    for wrap in (lambda method: method, optax.chain):
        method = wrap(optax.GradientTransformation(lambda params: (), update))
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
        updates, _ = tx.update(None, tx.init(W), W, grad_fn=lambda p: p)
        np.testing.assert_allclose(updates, -1.1 * W, rtol=1e-6)
        method = wrap(optax.GradientTransformationExtraArgs(lambda params: (), update))
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
        with pytest.raises(TypeError, match=r"write update\(.*, \*\*extra\)"):
            tx.update(None, tx.init(W), W, grad_fn=lambda p: p)


@pytest.mark.parametrize("slip", ["grad_fn", "grads", "ascent_grad_fn"])
def test_a_pair_in_place_of_a_gradient(slip):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1))
    both = jax.value_and_grad(distance)
    given = {"grads": None, "grad_fn": jax.grad(distance)}
    given[slip] = both(W) if slip == "grads" else both
    with pytest.raises(TypeError, match=rf"{slip}.*value_and_grad"):
        tx.update(given.pop("grads"), tx.init(W), W, **given)


def test_a_value_without_aux():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1))
    with pytest.raises(TypeError, match=r"value_and_grad_fn .*\(loss, aux\).*has_aux=True"):
        tx.update(None, tx.init(W), W, value_and_grad_fn=jax.value_and_grad(distance))


@pytest.mark.parametrize("wrapper", [pytest.param("partition", marks=needs_partition), "masked"])
def test_inside_a_partition_the_error_says_what_to_do(wrapper):
    """The user's loss needs all of the params, and the partition hands over some."""
    params = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1))
    if wrapper == "partition":
        tx = optax.partition({"x": tx, "y": optax.sgd(1.0)}, {"a": "x", "b": "y"})
    else:
        tx = optax.masked(tx, {"a": True, "b": False})
    grad_fn = jax.grad(lambda p: 0.5 * (p["a"] ** 2 + p["b"] ** 2) + 0.1 * p["a"] * p["b"])
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"sharpness_aware\(optax.partition"):
        tx.update(params, state, params, grad_fn=grad_fn)


@needs_partition
@pytest.mark.slow
def test_a_partition_as_the_base_and_one_of_perturbations():
    """What the error recommends: a sharp, b plain, and one radius for each group."""
    params = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
    grad_fn = jax.grad(lambda p: 0.5 * (p["a"] ** 2 + p["b"] ** 2) + 0.1 * p["a"] * p["b"])
    labels = {"a": "x", "b": "y"}
    base = optax.partition({"x": optax.sgd(1.0), "y": optax.sgd(2.0)}, labels)
    only_a = sam_optax.perturb_only(sam_optax.sam(0.1), {"a": True, "b": False})
    tx = sam_optax.sharpness_aware(base, only_a)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=grad_fn)
    np.testing.assert_allclose([updates["a"], updates["b"]], [-3.5, -2 * 4.31], rtol=1e-6)
    radii = optax.partition({"x": sam_optax.sam(0.1), "y": sam_optax.sam(0.2)}, labels)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), radii)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=grad_fn)
    np.testing.assert_allclose([updates["a"], updates["b"]], [-3.52, -4.51], rtol=1e-6)
