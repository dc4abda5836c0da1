"""``sharpness_aware``: what it forwards to whom, what it refuses, in which dtype it perturbs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import assert_same
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)
PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}


def gradient(p):
    return jax.tree.map(lambda x: 2 * x, p)


def recorder(log):
    """A transformation that notes what it is given."""

    def update(updates, state, params=None, **extra):
        log.append((updates, params, extra))
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


FOR_PERTURBATIONS = {"training_step", "ascent_grads", "draw_index", "norm_axis_name", "base_state"}
FOR_DESCENTS = {"ascent_grads", "perturbed", "perturbation_state", "norm_axis_name"}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", [*FOUR, "only_sam", "by_hand"])
def test_the_descent_gets_both_gradients_and_the_base_the_callers_arguments(name, given):
    of_descent, of_base = [], []
    method = make(name)
    tx = sam_optax.sharpness_aware(recorder(of_base), method, descent=recorder(of_descent))
    state = tx.init(PARAMS)
    grads = gradient(PARAMS) if given else None
    tx.update(grads, state, PARAMS, grad_fn=gradient, value=1.0)
    ((sharp, params, extra),) = of_descent
    start = method.start_fn(PARAMS, state.perturbation_state)
    assert extra.keys() >= FOR_DESCENTS
    assert_same(extra["ascent_grads"], gradient(start))
    assert extra["perturbed"] is True
    assert_same(extra["perturbation_state"], state.perturbation_state)
    point, _ = method.perturb_fn(PARAMS, gradient(start), state.perturbation_state)
    assert_same(sharp, gradient(point))
    ((into_base, base_params, base_extra),) = of_base
    assert_same(into_base, sharp)
    assert base_extra == {"value": 1.0} == {"value": extra["value"]}
    assert_same(params, PARAMS)
    assert_same(base_params, PARAMS)


@pytest.mark.parametrize("place", ["helper", "method", "inject_hyperparams", "partial"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_descent_always_gets_both_gradients_however_it_reads_them(place, jit):
    """L = x², x = 3, ρ = 1: g = 6, g_s = 8, the direction 2 g_s − g, SGD 0.1."""

    def direction(g_s, weight=2.0, **extra):
        return weight * g_s - extra["ascent_grads"]

    class Held:
        def read(self, g_s, arguments):
            return direction(g_s, **arguments)

    read = {
        "helper": direction,
        "method": lambda g_s, **extra: Held().read(g_s, extra),
        "partial": functools.partial(lambda kind, g_s, **extra: direction(g_s, **extra), "kind"),
    }

    def piece(weight=2.0):
        function = read.get(place, functools.partial(direction, weight=weight))
        return optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(),
            lambda updates, state, params=None, **extra: (function(updates, **extra), state),
        )

    descent = optax.inject_hyperparams(piece)() if place == "inject_hyperparams" else piece()
    x = jnp.array(3.0)
    grad_fn = jax.grad(lambda x: x**2)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(1.0), descent=descent)
    step = lambda state, x: tx.update(None, state, x, grad_fn=grad_fn)
    updates, _ = (jax.jit(step) if jit else step)(tx.init(x), x)
    np.testing.assert_allclose(updates, -1.0, rtol=1e-6)
    tx = sam_optax.alternating(optax.sgd(0.1), sam_optax.sam(1.0), descent=descent)
    state = tx.init(x)
    for _ in range(2):
        updates, state = tx.update(grad_fn(x), state, x)
        x = x + updates
    np.testing.assert_allclose(x, 2.0, rtol=1e-6)


def test_a_perturbation_always_gets_its_arguments_by_every_entrance():
    seen = []

    def init(params):
        return optax.EmptyState()

    def update(
        g, state, params, *, ascent_grads, training_step, draw_index, norm_axis_name, **extra
    ):
        seen.append(extra["base_state"])
        assert jax.tree.leaves(ascent_grads)[0] is jax.tree.leaves(g)[0]
        return g, state

    def start_fn(params, state, *, training_step, draw_index, norm_axis_name, base_state, **extra):
        return params

    plain = optax.GradientTransformationExtraArgs(init, update)
    started = sam_optax.Perturbation(init, update, start_fn)
    momentum = optax.sgd(0.1, momentum=0.9)
    base_state = momentum.init(PARAMS)
    for method in (sam_optax.as_perturbation(plain), started):
        state = method.init(PARAMS)
        method.update(gradient(PARAMS), state, PARAMS)
        method.start_fn(PARAMS, state)
        method.perturb_fn(PARAMS, gradient(PARAMS), state)
        assert seen == [None, None]
        method.perturb_fn(PARAMS, gradient(PARAMS), state, base_state=base_state)
        seen.clear()
        for combine in (sam_optax.sharpness_aware, sam_optax.alternating):
            for descent in (None, sam_optax.mix_gradients(0.5)):
                tx = combine(momentum, method, descent=descent)
                state = tx.init(PARAMS)
                for _ in range(2):
                    _, state = tx.update(gradient(PARAMS), state, PARAMS, grad_fn=gradient)
                for found in seen:
                    assert jax.tree.structure(found) == jax.tree.structure(base_state)
                seen.clear()
    both = {"grad_fn": gradient, "previous_grad_fn": gradient}
    for tx, functions in (
        (sam_optax.simultaneous(momentum, plain), both),
        (sam_optax.lookbehind(momentum, plain, k=1), {"grad_fn": gradient}),
    ):
        tx.update(None, tx.init(PARAMS), PARAMS, **functions)
        assert jax.tree.structure(seen.pop()) == jax.tree.structure(base_state)
    loss = lambda p: jnp.sum(p["a"] ** 2) + p["b"] ** 2
    jax.grad(sam_optax.sharp_loss(loss, plain))(PARAMS)
    assert seen == [None]


def test_what_the_step_adds_wins():
    of_perturbation, of_descent, of_base = [], [], []
    tx = sam_optax.sharpness_aware(
        recorder(of_base), recorder(of_perturbation), descent=recorder(of_descent)
    )
    mine = dict.fromkeys(FOR_PERTURBATIONS | FOR_DESCENTS, "mine")
    tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient, **mine)
    for log, names in ((of_perturbation, FOR_PERTURBATIONS), (of_descent, FOR_DESCENTS)):
        for name in names:
            assert not isinstance(log[0][2][name], str), name
    assert of_base[0][2] == mine


def test_ascent_grads_are_the_first_of_several():
    log = []
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), sam_optax.sam(0.3), descent=recorder(log), ascent_steps=4
    )
    tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient)
    assert_same(log[0][2]["ascent_grads"], gradient(PARAMS))


def test_value_is_the_loss_that_the_step_has_evaluated_unless_the_caller_gives_one():
    log = []
    tx = sam_optax.sharpness_aware(recorder(log), sam_optax.sam(0.3))
    loss = lambda p: (jnp.sum(p["a"] ** 2) + p["b"] ** 2, None)
    both = jax.value_and_grad(loss, has_aux=True)
    tx.update(None, tx.init(PARAMS), PARAMS, value_and_grad_fn=both)
    tx.update(None, tx.init(PARAMS), PARAMS, value_and_grad_fn=both, value=-1.0)
    tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient)
    assert [extra for _, _, extra in log] == [{"value": 14.0}, {"value": -1.0}, {}]


@pytest.mark.parametrize("combine", ["sharpness_aware", "alternating", "simultaneous"])
def test_roles_that_are_exchanged(combine):
    combine = getattr(sam_optax, combine)
    with pytest.raises(TypeError, match=r"base_tx is a Perturbation.*Exchange the arguments"):
        combine(sam_optax.sam(0.05), optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"descent is a Perturbation.*pass it as perturbation"):
        combine(optax.sgd(0.1), sam_optax.sam(), descent=sam_optax.fsam())
    with pytest.raises(TypeError, match=r"descent must be an optax\.GradientTransformation"):
        combine(optax.sgd(0.1), sam_optax.sam(), descent=0.4)


@pytest.mark.parametrize("role", ["base_tx", "perturbation", "descent"])
def test_a_closed_signature_fails_with_its_own_error_and_a_note(role):
    closed = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), lambda updates, state, params=None: (updates, state)
    )
    parts = {"base_tx": optax.sgd(0.1), "perturbation": sam_optax.sam(), role: closed}
    tx = sam_optax.sharpness_aware(**parts)
    with pytest.raises(TypeError, match=r"unexpected keyword argument[\s\S]*optax's protocol"):
        tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=gradient, value=1.0)


EXTRAS = {
    "array": jnp.ones(2),
    "numpy": np.float32(1),
    "number": 1.0,
    "tree": {"x": [1, 2]},
    "none": None,
    "function": abs,
    "string": "name",
    "numpy_string": np.str_("name"),
    "object_array": np.array([None, "a"], dtype=object),
    "string_array": np.array(["a", "b"]),
    "key": jax.random.key(1),
    "dtype": jnp.float32,
}


@pytest.mark.parametrize("kind", EXTRAS)
@pytest.mark.parametrize("jit", [False, True])
def test_extra_arguments_of_any_kind_reach_both(kind, jit):
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra["unknown"])
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = sam_optax.sharpness_aware(spy, optax.chain(spy, sam_optax.sam(0.3)))
    step = lambda s, p: tx.update(None, s, p, grad_fn=gradient, unknown=EXTRAS[kind])
    (jax.jit(step) if jit else step)(tx.init(PARAMS), PARAMS)
    assert len(seen) == 2
    assert jax.tree.structure(seen[0]) == jax.tree.structure(EXTRAS[kind])
    assert seen[1] is EXTRAS[kind]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("missing", ["params", "grad_fn"])
def test_missing_arguments(missing, jit):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())

    def step(g, s, p):
        if missing == "params":
            return tx.update(g, s, grad_fn=gradient)
        return tx.update(g, s, p)

    step = jax.jit(step) if jit else step
    with pytest.raises(ValueError, match=r"update\(grads, state, params, grad_fn=grad_fn\)"):
        step(PARAMS, tx.init(PARAMS), PARAMS)


def test_grad_fn_must_be_callable():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())
    with pytest.raises((TypeError, ValueError), match="grad_fn"):
        tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=PARAMS)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"base_tx": 0.1}, TypeError, ["base_tx", "0.1", "optax.sgd"]),
        ({"base_tx": optax.sgd}, TypeError, ["base_tx", "optax.sgd"]),
        ({"perturbation": 0.05}, TypeError, ["perturbation", "0.05", "sam_optax.sam"]),
        ({"perturbation": sam_optax.sam}, TypeError, ["perturbation", "sam_optax.sam()"]),
        ({"ascent_steps": 0}, ValueError, ["ascent_steps", "0", "1"]),
        ({"ascent_steps": -3}, ValueError, ["ascent_steps", "-3", "1"]),
        ({"ascent_steps": 1.5}, TypeError, ["ascent_steps", "1.5"]),
        ({"ascent_steps": True}, TypeError, ["ascent_steps", "True"]),
        ({"when": 2}, TypeError, ["when", "2", "sam_optax.every"]),
        ({"perturb_dtype": jnp.int32}, ValueError, ["perturb_dtype", "int32", "float"]),
        ({"perturb_dtype": "no dtype"}, TypeError, ["no dtype"]),
    ],
)
def test_bad_arguments(arguments, error, words):
    good = {"base_tx": optax.sgd(0.1), "perturbation": sam_optax.sam()}
    with pytest.raises(error) as caught:
        sam_optax.sharpness_aware(**(good | arguments))
    for word in words:
        assert word in str(caught.value)


# ---------------------------------------------------------------- perturb_dtype


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["sam", "asam", "fsam", "rsam"])
@pytest.mark.slow
def test_perturb_dtype_is_the_dtype_that_grad_fn_sees(name, steps):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    dtypes = []

    def grad_fn(p):
        dtypes.append(p["a"].dtype)
        return gradient(p)

    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), make(name), perturb_dtype=jnp.float32, ascent_steps=steps
    )
    state = tx.init(params)
    updates, new_state = tx.update(None, state, params, grad_fn=grad_fn)
    # The params themselves, or a random start, whose noise is not to be rounded away either.
    assert dtypes[0] == (jnp.float32 if make(name).has_start else jnp.bfloat16)
    assert dtypes[-1] == jnp.float32
    assert updates["a"].dtype == jnp.bfloat16
    assert jax.tree.map(jnp.result_type, new_state) == jax.tree.map(jnp.result_type, state)


@pytest.mark.slow
def test_perturb_dtype_leaves_complex_params_complex():
    params = {"c": jnp.array([1 + 1j]), "r": jnp.array([1.0], jnp.bfloat16)}
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(), perturb_dtype=jnp.float32)
    updates, _ = tx.update(None, tx.init(params), params, grad_fn=lambda p: p)
    assert updates["c"].dtype == jnp.complex64
    assert float(jnp.abs(updates["c"].imag[0])) > 0.1


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"base_tx": optax.chain(sam_optax.sam())}, "base_tx"),
        ({"base_tx": optax.inject_hyperparams(sam_optax.sam)(rho=0.1)}, "base_tx"),
        ({"base_tx": optax.sgd(0.1), "descent": optax.chain(sam_optax.sam())}, "descent"),
    ],
)
@pytest.mark.parametrize("combine", [sam_optax.sharpness_aware, sam_optax.alternating])
def test_a_perturbation_inside_another_part_is_refused(combine, arguments, place):
    tx = combine(**arguments, perturbation=sam_optax.sam())
    with pytest.raises(TypeError, match=f"{place} contains a Perturbation"):
        tx.init(PARAMS)
    sam_optax.sam().init(PARAMS)  # the error has left no trace


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (lambda p: ((p["a"], None), p), "must return a scalar"),
        (lambda p: ((p["b"], None), {**p, "a": p["a"][None]}), "must have the shapes of the par"),
    ],
)
def test_value_and_grad_fn_returns_a_scalar_and_a_gradient(found, match):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())
    with pytest.raises((TypeError, ValueError), match=match):
        tx.update(None, tx.init(PARAMS), PARAMS, value_and_grad_fn=found)
