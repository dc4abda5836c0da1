"""Base optimizers that refuse what they do not know, and what reaches those that ask."""

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
    "with_a_piece_that_asks": lambda: optax.chain(sam_optax.surrogate_gap(0.4), optax.lbfgs()),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", LINE_SEARCHES)
@pytest.mark.fast("backtracking-True")
def test_a_line_search_is_a_base(name, jit):
    """ε is parallel to the gradient here, so that the step is the line search's own."""
    base = LINE_SEARCHES[name]()
    tx = sam_optax.sharpness_aware(base, sam_optax.sam(0.01))

    def step(w):
        given = line_search_arguments(w)
        updates, _ = tx.update(given["grad"], tx.init(w), w, **given)
        alone = (LINE_SEARCHES["lbfgs"]() if "asks" in name else base).update(
            given["grad"], base.init(w)[-1] if "asks" in name else base.init(w), w, **given
        )
        return updates, alone[0]

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


class Slotted:
    """An update without a ``__dict__``, as a method and as a call."""

    __slots__ = ("log",)

    def __init__(self, log):
        self.log = log

    def update(self, updates, state, params=None, *, value=None):
        self.log.append(value)
        return updates, state

    __call__ = update


class Inherits(Slotted):
    """The call is that of the class above."""

    __slots__ = ()


def logging(function):
    """A decorator that looks at its arguments and takes what the function takes."""

    @functools.wraps(function)
    def logged(*args, **kwargs):
        str(kwargs)
        return function(*args, **kwargs)

    return logged


def with_update(update):
    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


CLOSED = {
    "method_of_slots": lambda log: with_update(Slotted(log).update),
    "call": lambda log: with_update(Inherits(log)),
    "partial": lambda log: with_update(functools.partial(Slotted.update, Slotted(log))),
    "decorator": lambda log: with_update(logging(closed(log).update)),
    "alone": lambda log: closed(log),
    "chain": lambda log: optax.chain(optax.sgd(0.1), closed(log)),
    "masked": lambda log: optax.masked(closed(log), True),
    "inject": lambda log: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.sgd(rate), closed(log))
    )(rate=0.1),
}


@pytest.mark.parametrize("wrap", ["partial", "call", "method", "checkpoint"])
def test_a_closed_signature_under_jit(wrap):
    def update(rate, updates, state, params=None):
        return jax.tree.map(lambda u: -rate * u, updates), state

    class Called:
        def __call__(self, updates, state, params=None):
            return update(0.1, updates, state)

    inner = {
        "partial": functools.partial(update, 0.1),
        "call": Called(),
        "method": Called().__call__,
        "checkpoint": jax.checkpoint(Called().__call__),
    }[wrap]
    for combine in (sam_optax.sharpness_aware, sam_optax.alternating):
        tx = combine(with_update(jax.jit(inner)), sam_optax.sam(0.0))
        extra = {"grad_fn": lambda p: p} if combine is sam_optax.sharpness_aware else {}
        state, w = tx.init(W), W
        for _ in range(1 if extra else 2):
            updates, state = tx.update(W, state, w, **extra)
            w = w + updates
        np.testing.assert_allclose(w, 0.9 * W, rtol=1e-6)


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


@pytest.mark.parametrize("wrapper", ["alone", "chain", "masked", "inject", "jit", "method"])
def test_who_asks_receives(wrapper):
    log = []
    asks = asking(log)
    base = {
        "alone": lambda: asks,
        "chain": lambda: optax.chain(optax.chain(asks), optax.sgd(0.1)),
        "masked": lambda: optax.masked(asks, True),
        "inject": lambda: optax.inject_hyperparams(lambda x: optax.chain(asks, optax.scale(x)))(
            x=1.0
        ),
        "jit": lambda: asks._replace(update=jax.jit(asks.update)),
        "method": lambda: Method(asks).transformation(),
    }[wrapper]()
    tx = sam_optax.sharpness_aware(base, sam_optax.sam(0.1))
    tx.update(W, tx.init(W), W, grad_fn=lambda p: p)
    ((ascent_grads, perturbed),) = log
    assert ascent_grads is not None
    assert perturbed is not None


class Method:
    """A transformation whose update is a method."""

    def __init__(self, inner):
        self.inner = inner

    def update(self, updates, state, params=None, **extra):
        return self.inner.update(updates, state, params, **extra)

    def transformation(self):
        return optax.GradientTransformationExtraArgs(self.inner.init, self.update)


def test_a_factory_that_names_our_pieces_asks():
    base = optax.inject_hyperparams(
        lambda alpha: optax.chain(sam_optax.surrogate_gap(alpha), optax.sgd(0.1))
    )(alpha=0.4)
    tx = sam_optax.sharpness_aware(base, sam_optax.sam(0.1))
    direct = optax.chain(sam_optax.surrogate_gap(0.4), optax.sgd(0.1))
    direct = sam_optax.sharpness_aware(direct, sam_optax.sam(0.1))
    grad_fn = jax.grad(lambda w: jnp.sum(w**4))
    updates = [t.update(None, t.init(W), W, grad_fn=grad_fn)[0] for t in (tx, direct)]
    np.testing.assert_allclose(*updates, rtol=1e-6)


@pytest.mark.parametrize("combinator", [sam_optax.sharpness_aware, sam_optax.alternating])
def test_multi_steps_inside_is_a_transformation(combinator):
    """optax's class has ``init`` and ``update``, but is no transformation."""
    accumulating = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    with pytest.raises(TypeError, match=r"base_tx .*MultiSteps.*\.gradient_transformation\(\)"):
        combinator(accumulating, sam_optax.sam(0.1))
    tx = combinator(accumulating.gradient_transformation(), sam_optax.sam(0.1))
    assert isinstance(tx, optax.GradientTransformation)


def test_functions_that_belong_to_no_module():
    """As in doctests and other code that is executed in a namespace without a name."""
    source = """
def scaled(updates, state, params=None, **extra):
    return doubled(updates), state
def doubled(updates):
    return 2 * updates
"""
    scope = {"__name__": None}
    exec(source, scope)
    assert scope["scaled"].__module__ is None
    piece = optax.GradientTransformationExtraArgs(lambda params: (), scope["scaled"])
    tx = sam_optax.sharpness_aware(optax.chain(piece, optax.sgd(1.0)), optax.chain(piece))
    updates, _ = tx.update(None, tx.init(W), W, grad_fn=lambda p: p)
    np.testing.assert_allclose(updates, -6 * W, rtol=1e-6)


def test_a_perturbation_with_a_closed_signature():
    def update(updates, state, params=None):
        return 0.1 * updates, state

    method = optax.GradientTransformationExtraArgs(lambda params: (), update)
    for perturbation in (method, optax.chain(method)):
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), perturbation)
        updates, _ = tx.update(None, tx.init(W), W, grad_fn=lambda p: p)
        np.testing.assert_allclose(updates, -1.1 * W, rtol=1e-6)


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
