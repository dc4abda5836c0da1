"""What the combinators forward to whom, what they refuse, in which dtype they perturb."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same
from methods import make

import sam_optax

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}
SGD, SAM = optax.sgd(0.1), sam_optax.sam(0.3)
FOR_PERTURBATIONS = {"training_step", "ascent_grads", "draw_index", "norm_axis_name", "base_state"}
FOR_DESCENTS = {"ascent_grads", "perturbed", "perturbation_state", "norm_axis_name"}


def gradient(p):
    return jax.tree.map(lambda x: 2 * x, p)


def loss(p):
    return jnp.sum(p["a"] ** 2) + p["b"] ** 2


both = jax.value_and_grad(lambda p: (loss(p), None), has_aux=True)


def recorder(log):
    """A transformation that notes what it is given."""

    def update(updates, state, params=None, **extra):
        log.append((updates, params, extra))
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def update(tx, grads=None, params=PARAMS, **functions):
    return tx.update(grads, tx.init(params), params, **(functions or {"grad_fn": gradient}))


@pytest.mark.parametrize("name", ["sam", "rsam"])
def test_the_descent_gets_both_gradients_and_the_base_the_callers_arguments(name):
    of_descent, of_base = [], []
    method = make(name)
    tx = sam_optax.sharpness_aware(recorder(of_base), method, descent=recorder(of_descent))
    before = tx.init(PARAMS).perturbation_state
    update(tx, gradient(PARAMS), grad_fn=gradient, value=1.0)
    ((sharp, params, extra),) = of_descent
    start = method.start_fn(PARAMS, before)
    point, _ = method.perturb_fn(PARAMS, gradient(start), before)
    assert extra.keys() >= FOR_DESCENTS
    assert_same((extra["ascent_grads"], sharp), (gradient(start), gradient(point)))
    assert_same(extra["perturbation_state"], before)
    assert (extra["perturbed"], extra["value"]) == (True, 1.0)
    ((into_base, base_params, base_extra),) = of_base
    assert base_extra == {"value": 1.0}
    assert_same((params, base_params, into_base), (PARAMS, PARAMS, sharp))


@pytest.mark.parametrize("wrap", [lambda piece: piece, optax.inject_hyperparams])
def test_a_descent_always_gets_both_gradients_however_it_reads_them(wrap):
    """Case 50. L = x², x = 3, ρ = 1: g = 6, g_s = 8, the direction 2 g_s − g, SGD 0.1."""

    def helper(g_s, weight, arguments):
        return weight * g_s - arguments["ascent_grads"]

    def piece(weight=2.0):
        return optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(),
            lambda g, state, params=None, **extra: (helper(g, weight, extra), state),
        )

    descent = wrap(piece)()
    x, grad_fn = jnp.array(3.0), lambda x: 2 * x
    tx = sam_optax.sharpness_aware(SGD, sam_optax.sam(1.0), descent=descent)
    np.testing.assert_allclose(update(tx, params=x, grad_fn=grad_fn)[0], -1.0, rtol=1e-6)
    tx = sam_optax.alternating(SGD, sam_optax.sam(1.0), descent=descent)
    state = tx.init(x)
    for _ in range(2):
        updates, state = tx.update(grad_fn(x), state, x)
        x = x + updates
    np.testing.assert_allclose(x, 2.0, rtol=1e-6)


def test_a_perturbation_always_gets_its_arguments_by_every_entrance():
    """``None`` where the entrance does not know one."""
    init, calls = lambda params: optax.EmptyState(), []

    def transform(g, state, params, *, ascent_grads, training_step, base_state, **extra):
        assert extra.keys() >= {"draw_index", "norm_axis_name", "state_axis_name"}
        assert jax.tree.leaves(ascent_grads)[0] is jax.tree.leaves(g)[0]
        calls.append("update")
        return g, state

    def start_fn(params, state, *, training_step, draw_index, norm_axis_name, base_state, **extra):
        calls.append("start")
        return params

    plain = optax.GradientTransformationExtraArgs(init, transform)
    method, grads = sam_optax.Perturbation(init, transform, start_fn), gradient(PARAMS)
    method.update(grads, method.init(PARAMS), PARAMS)
    method.start_fn(PARAMS, method.init(PARAMS))
    method.perturb_fn(PARAMS, grads, method.init(PARAMS))
    assert calls == ["update", "start", "update"]
    for combine in (sam_optax.sharpness_aware, sam_optax.alternating):
        update(combine(SGD, method), grads)
        update(combine(SGD, plain), grads)
    update(sam_optax.simultaneous(SGD, plain), grad_fn=gradient, previous_grad_fn=gradient)
    update(sam_optax.lookbehind(SGD, plain, k=1))
    jax.grad(sam_optax.sharp_loss(loss, plain))(PARAMS)
    assert calls.count("start") >= 3


def test_what_the_step_adds_wins():
    """The descent's ascent gradient is the first of several."""
    of_perturbation, of_descent, of_base = [], [], []
    method, descent = optax.chain(recorder(of_perturbation), SAM), recorder(of_descent)
    tx = sam_optax.sharpness_aware(recorder(of_base), method, descent=descent, ascent_steps=3)
    mine = dict.fromkeys(FOR_PERTURBATIONS | FOR_DESCENTS, "mine")
    update(tx, grad_fn=gradient, **mine)
    for log, names in ((of_perturbation, FOR_PERTURBATIONS), (of_descent, FOR_DESCENTS)):
        assert not [name for name in names if isinstance(log[0][2][name], str)]
    assert_same(of_descent[0][2]["ascent_grads"], gradient(PARAMS))
    assert of_base[0][2] == mine


def test_value_is_the_loss_that_the_step_has_evaluated_unless_the_caller_gives_one():
    log = []
    tx = sam_optax.sharpness_aware(recorder(log), SAM)
    update(tx, value_and_grad_fn=both)
    update(tx, value_and_grad_fn=both, value=-1.0)
    update(tx)
    assert [extra for _, _, extra in log] == [{"value": 14.0}, {"value": -1.0}, {}]


@pytest.mark.parametrize("jit", [False, True])
def test_extra_arguments_of_any_kind_reach_both(jit):
    log = []
    tx = sam_optax.sharpness_aware(recorder(log), optax.chain(recorder(log), SAM))
    given = {
        "array": jnp.ones(2),
        "tree": {"x": [1, 2]},
        "none": None,
        "function": abs,
        "object_array": np.array([None, "a"], dtype=object),
        "key": jax.random.key(1),
        "dtype": jnp.float32,
    }
    step = lambda s, p: tx.update(None, s, p, grad_fn=gradient, **given)
    (jax.jit(step) if jit else step)(tx.init(PARAMS), PARAMS)
    assert len(log) == 2
    for _, _, extra in log:
        assert not [name for name in given if extra[name] is not given[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "rsam"])
def test_perturb_dtype_is_the_dtype_that_grad_fn_sees(name):
    params = {"w": jnp.ones(2, jnp.bfloat16), "z": jnp.array([1 + 1j])}
    dtypes = []
    grad_fn = lambda p: dtypes.append(p["w"].dtype) or gradient(p)
    options = {"perturb_dtype": jnp.float32, "ascent_steps": 3}
    tx = sam_optax.sharpness_aware(SGD, make(name), **options)
    updates, state = update(tx, params=params, grad_fn=grad_fn)
    # The params themselves, or a random start, whose noise is not to be rounded away either.
    assert dtypes[0] == (jnp.float32 if make(name).has_start else jnp.bfloat16)
    assert dtypes[-1] == jnp.float32
    assert (updates["w"].dtype, updates["z"].dtype) == (jnp.bfloat16, jnp.complex64)
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, tx.init(params))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("combine", ["sharpness_aware", "alternating", "simultaneous"])
def test_roles_that_are_exchanged(combine):
    """Case 51."""
    combine = getattr(sam_optax, combine)
    with pytest.raises(TypeError, match=r"base_tx is a Perturbation.*Exchange the arguments"):
        combine(sam_optax.sam(0.05), SGD)
    with pytest.raises(TypeError, match=r"descent is a Perturbation.*pass it as perturbation"):
        combine(SGD, SAM, descent=sam_optax.fsam())
    with pytest.raises(TypeError, match=r"descent must be an optax\.GradientTransformation"):
        combine(SGD, SAM, descent=0.4)


@pytest.mark.parametrize("role", ["base_tx", "perturbation", "descent"])
def test_a_closed_signature_fails_with_its_own_error_and_a_note(role):
    closed = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), lambda updates, state, params=None: (updates, state)
    )
    tx = sam_optax.sharpness_aware(**{"base_tx": SGD, "perturbation": SAM, role: closed})
    with pytest.raises(TypeError, match=r"unexpected keyword argument[\s\S]*optax's protocol"):
        update(tx, grad_fn=gradient, value=1.0)


def sharp(**given):
    return sam_optax.sharpness_aware(**{"base_tx": SGD, "perturbation": SAM, **given})


TX = sharp()
PASSED = update(TX, value_and_grad_fn=both)[1]
INJECTED = optax.inject_hyperparams(sam_optax.sam)(rho=0.1)
CALL = r"update\(grads, state, params, grad_fn=grad_fn\)"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: sharp(base_tx=0.1), r"base_tx .*optax\.sgd.*0\.1"),
        (lambda: sharp(perturbation=0.05), r"perturbation .*sam_optax\.sam.*0\.05"),
        (lambda: sharp(perturbation=sam_optax.sam), r"perturbation .*sam_optax\.sam\(\)"),
        (lambda: sharp(ascent_steps=0), "ascent_steps must be at least 1, got 0"),
        (lambda: sharp(ascent_steps=1.5), r"ascent_steps .*1\.5"),
        (lambda: sharp(ascent_steps=True), "ascent_steps .*True"),
        (lambda: sharp(when=2), r"when .*sam_optax\.every"),
        (lambda: sharp(perturb_dtype=jnp.int32), "perturb_dtype .*float.*int32"),
        (lambda: sharp(perturb_dtype="no dtype"), "no dtype"),
        (lambda: sharp(base_tx=optax.chain(SAM)).init(PARAMS), "base_tx contains a Perturbation"),
        (lambda: sharp(base_tx=INJECTED).init(PARAMS), "base_tx contains a Perturbation"),
        (lambda: sharp(descent=optax.chain(SAM)).init(PARAMS), "descent contains a Perturbation"),
        (lambda: sam_optax.alternating(INJECTED, SAM).init(PARAMS), "base_tx contains a Pertur"),
        (lambda: TX.update(PARAMS, TX.init(PARAMS), grad_fn=gradient), CALL),
        (lambda: TX.update(PARAMS, TX.init(PARAMS), PARAMS), CALL),
        (lambda: update(TX, grad_fn=PARAMS), "grad_fn must be a function"),
        (lambda: update(TX, grad_fn=gradient, value_and_grad_fn=both), "not both"),
        (lambda: update(TX, PARAMS, value_and_grad_fn=both), "requires grads=None"),
        (lambda: update(TX, value_and_grad_fn=2), "value_and_grad_fn must be a function"),
        (lambda: update(TX, value_and_grad_fn=jax.value_and_grad(loss)), r"\(loss, aux\).*has_aux"),
        (lambda: update(TX, value_and_grad_fn=lambda p: ((p["a"], 0), p)), "must return a scalar"),
        (lambda: TX.update(None, PASSED, PARAMS, grad_fn=gradient), "still holds the first pass"),
        (lambda: sam_optax.pop_first_pass(TX.init(PARAMS)), "exactly one first pass, not 0"),
        (  # case 54: Equinox's own loop, and a loss of the whole model
            lambda: update(TX, None, {"w": 1.0, "f": None}, grad_fn=lambda p: p["f"](p["w"])),
            r"NoneType[\s\S]*put the rest back.*eqx\.combine\(params, static\)",
        ),
        (
            lambda: update(TX, value_and_grad_fn=lambda p: ((p["b"], 0), {**p, "a": p["b"]})),
            "must have the shapes of the params",
        ),
    ],
)
def test_errors_say_what_to_pass(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
    SAM.init(PARAMS)  # the error has left no trace
