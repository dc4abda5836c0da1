"""A loss whose gradient is the sharp gradient."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    RuntimeCounted,
    assert_close,
    assert_same,
    batches,
    init_mlp,
    mlp_loss,
    precision,
    signature,
)
from jax.sharding import PartitionSpec as P
from methods import build, often

import sam_optax
from sam_optax import sam, sharp_loss

W = jnp.array([1.0, -0.5, 2.0])
X = jnp.array([1.0, 2.0, 0.5])
N = 3
RHO = 0.3
# Case 63.
VALUE, GRADIENT = 1.54308, (0.46263, -1.45713, 0.20439)
X_AND_Y = jax.tree.map(lambda batch: batch[0], batches(1))


def cosh(w, x, n):
    return jnp.sum(jnp.cosh(w * x)) / n


def cosh_and_aux(w, x, n):
    aux = {"predictions": w * x, "n": jnp.asarray(n, jnp.int32), "seen": 7, "name": "cosh"}
    return cosh(w, x, n), aux


LOSS = sharp_loss(cosh, sam(RHO))
WITH_AUX = sharp_loss(cosh_and_aux, sam(RHO), has_aux=True)


def sharp_gradient(loss, w, rho=RHO):
    """∇L(w + ρ ∇L(w)/‖∇L(w)‖) of one array, in JAX's convention."""
    ascent = jnp.conj(jax.grad(loss)(w))
    return jax.grad(loss)(w + rho * ascent / jnp.linalg.norm(ascent))


def on_each(*xs):
    """Several inputs, and the sharp gradient on each alone."""
    one = jax.jit(lambda x: sharp_gradient(lambda w: cosh(w, x, N), W))
    return jnp.stack(xs), jnp.stack([one(x) for x in xs])


def on_one(x):
    return jnp.asarray(x)[None]


# Each takes a function of (w, x, n) and returns its value and its gradient for w.
MODES = {
    "eager": jax.value_and_grad,
    "jit of grad of jit": lambda f: jax.jit(jax.value_and_grad(jax.jit(f))),
    "jit of checkpoint": lambda f: jax.jit(jax.value_and_grad(jax.checkpoint(f))),
    "grad of vmap": lambda f: jax.value_and_grad(
        lambda w, x, n: jnp.sum(jax.vmap(f, (None, 0, 0))(w, on_one(x), on_one(n)))
    ),
    "scan of checkpoint": lambda f: jax.value_and_grad(
        lambda w, x, n: jax.lax.scan(
            jax.checkpoint(lambda total, batch: (total + f(w, *batch), None)),
            0.0,
            (on_one(x), on_one(n)),
        )[0]
    ),
    "cond": lambda f: jax.value_and_grad(
        lambda w, x, n: jax.lax.cond(n > 0, f, lambda w, x, n: 0.0, w, x, n)
    ),
    "vjp": lambda f: lambda w, x, n: (f(w, x, n), jax.vjp(lambda w: f(w, x, n), w)[1](1.0)[0]),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_value_is_that_at_w_and_the_gradient_that_at_w_plus_eps(mode):
    value, grads = MODES[mode](LOSS)(W, X, N)
    np.testing.assert_allclose(value, VALUE, atol=1e-5)
    np.testing.assert_allclose(grads, GRADIENT, atol=1e-5)


def test_the_derivative_is_linear_in_the_cotangent():
    grads = jax.grad(lambda w: 5 * LOSS(w, X, N) + jnp.sum(w))(W)
    np.testing.assert_allclose(grads, 5 * np.array(GRADIENT) + 1, atol=1e-4)
    # And it can be differentiated with respect to it.
    slope = jax.grad(lambda s: jnp.sum(jax.grad(lambda w: s * LOSS(w, X, N))(W)))(2.0)
    np.testing.assert_allclose(slope, np.sum(GRADIENT), atol=1e-4)


@pytest.mark.parametrize("jit", [False, True])
def test_aux_is_that_of_the_first_pass(jit):
    def run(w):
        (value, aux), grads = jax.value_and_grad(WITH_AUX, has_aux=True)(w, X, N)
        assert (aux.pop("name"), type(aux.pop("seen"))) == ("cosh", int)  # as loss_fn returns them
        return value, aux, grads

    value, aux, grads = (jax.jit(run) if jit else run)(W)
    np.testing.assert_allclose(value, VALUE, atol=1e-5)
    np.testing.assert_allclose(grads, GRADIENT, atol=1e-5)
    assert_same(aux, {"n": jnp.asarray(N, jnp.int32), "predictions": W * X})


def test_aux_is_not_differentiated():
    """Statistics that one call hands to the next are no differentiated argument there."""
    f = sharp_loss(lambda w, x, s: (cosh(w, x, N), s + jnp.mean(w)), sam(RHO), has_aux=True)

    def total(w):
        first, stats = f(w, X, 0.0)
        second, stats = f(w, X, stats)
        return first + second, stats

    grads, stats = jax.grad(total, has_aux=True)(W)
    np.testing.assert_allclose(grads, 2 * np.array(GRADIENT), atol=1e-4)
    np.testing.assert_allclose(stats, 2 * jnp.mean(W), rtol=1e-6)


def test_vmap_perturbs_for_each_example():
    xs, each = on_each(X, X[::-1], 2 * X)
    assert_close(jax.vmap(jax.grad(LOSS), (None, 0, None))(W, xs, N), each, 1e-6)
    mean = lambda f: lambda w, xs: jnp.mean(jax.vmap(f, (None, 0, None))(w, xs, N))
    assert_close(jax.grad(mean(LOSS))(W, xs), jnp.mean(each, 0), 1e-6)
    inside = jax.grad(sharp_loss(mean(cosh), sam(RHO)))(W, xs)
    assert_close(inside, sharp_gradient(lambda w: mean(cosh)(w, xs), W), 1e-6)
    assert jnp.max(jnp.abs(inside - jnp.mean(each, 0))) > 1e-3


ACCEPTED = ["sam", "asam", "fisher", "zsharp", "only_sam", "limited", "by_hand"]


@pytest.mark.parametrize("name", often(ACCEPTED, "asam"))
def test_a_loop_that_takes_the_loss_takes_the_steps_of_sharpness_aware(name):
    """Case 62: to 2e-7, in a loop that owns the optimizer."""
    optimizer, method = optax.adam(0.1), build(name)
    tx = sam_optax.sharpness_aware(optimizer, method)

    @jax.jit
    def step(params, state, x, y):
        grads = jax.grad(sharp_loss(mlp_loss, method))(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def expected_step(params, state, x, y):
        grad_fn = lambda p: jax.grad(mlp_loss)(p, x, y)
        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    found = init_mlp(), optimizer.init(init_mlp())
    expected = init_mlp(), tx.init(init_mlp())
    for x, y in zip(*batches(5), strict=True):
        found, expected = step(*found, x, y), expected_step(*expected, x, y)
    assert_close(found[0], expected[0], 2e-7)


@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_costs_two_gradients_and_a_value_one_evaluation(jit):
    counted = RuntimeCounted(mlp_loss)
    f = sharp_loss(counted, sam(RHO))
    for function, evaluations in ((f, 1), (jax.grad(f), 2), (jax.value_and_grad(f), 2)):
        counted.evaluations = 0
        (jax.jit(function) if jit else function)(init_mlp(), *X_AND_Y)
        jax.effects_barrier()
        assert counted.evaluations == evaluations


# ---------------------------------------------------------------- arguments of all kinds


def test_keyword_arguments_and_numbers_that_are_arrays():
    np.testing.assert_allclose(jax.grad(LOSS)(W, n=np.float32(N), x=X), GRADIENT, atol=1e-5)
    f = sharp_loss(lambda w, params: cosh(w, params, N), sam(RHO))
    np.testing.assert_allclose(jax.grad(f)(W, params=X), GRADIENT, atol=1e-5)


@pytest.mark.slow
def test_labels_keys_and_static_arguments():
    def loss_fn(w, batch, key, mode, *, train, activation=jnp.cosh):
        assert mode == "dropout"
        assert train is True
        x, label = batch
        kept = jax.random.bernoulli(key, 0.5, (3, *x.shape))
        logits = jnp.mean(kept * activation(w * x), axis=0)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    batch, key = (X, jnp.array(1)), jax.random.key(1)
    plain = lambda w: loss_fn(w, batch, key, "dropout", train=True)
    expected = jax.jit(lambda w: sharp_gradient(plain, w))(W)
    f = sharp_loss(loss_fn, sam(RHO))
    static = functools.partial(jax.jit, static_argnums=3, static_argnames="train")
    for grad in (jax.grad(f), static(jax.grad(f)), jax.grad(static(f))):
        assert_close(grad(W, batch, key, "dropout", train=True), expected, 1e-6)


def test_numpy_arrays_and_python_numbers_stay_what_they_are():
    shape = np.array([3, 1])  # says how an array is shaped
    f = sharp_loss(lambda w, x: cosh(w.reshape(shape), x["x"].reshape(x["shape"]), N), sam(RHO))
    w, x = np.asarray(W), {"x": np.asarray(X), "shape": shape}
    np.testing.assert_allclose(jax.grad(f)(w, x), GRADIENT, atol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.jit(lambda w: f(w, x)))(w), GRADIENT, atol=1e-5)
    np.testing.assert_allclose(jax.grad(sharp_loss(lambda w: w**2, sam(1.0)))(2.0), 6.0, rtol=1e-6)


def test_leaves_that_are_not_differentiated_are_held_fixed():
    """Frozen float leaves are neither perturbed nor in the norm; others stay what they are."""
    fixed = {"frozen": X, "scale": 2.0, "steps": jnp.array(3), "f": jnp.cosh, "missing": None}

    def loss_fn(params, x):
        assert type(params["scale"]) is float
        wx = params["f"](params["w"] * x + params["frozen"])
        return params["scale"] * jnp.sum(wx) / params["steps"]

    def of_w(loss, w):
        return loss({**fixed, "w": w}, X)

    expected = sharp_gradient(functools.partial(of_w, loss_fn), W)
    f = functools.partial(of_w, sharp_loss(loss_fn, sam(RHO)))
    assert_close(jax.grad(f)(W), expected, 1e-6)
    assert_close(jax.grad(jax.jit(f))(W), expected, 1e-6)


def test_integer_params_have_no_gradient():
    params = {"w": W, "n": jnp.array(N)}
    f = sharp_loss(lambda p, x: cosh(p["w"], x, p["n"]), sam(RHO))
    for grad in (jax.grad(f, allow_int=True), jax.jit(jax.grad(jax.jit(f), allow_int=True))):
        grads = grad(params, X)
        assert grads["n"].dtype == jax.dtypes.float0
        np.testing.assert_allclose(grads["w"], GRADIENT, atol=1e-5)


def test_complex_params():
    """The perturbation sees optax's convention, the caller JAX's."""
    z = jnp.array([1 + 2j, -0.5j, 2])
    loss_fn = lambda z: jnp.sum(jnp.abs(jnp.cosh(z)) ** 2)
    assert_close(jax.grad(sharp_loss(loss_fn, sam(RHO)))(z), sharp_gradient(loss_fn, z), 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "complex64"])
def test_each_leaf_keeps_its_dtype(dtype):
    with precision(dtype):
        params = {"a": jnp.array([1.0, -0.5], dtype), "b": jnp.array([2.0], jnp.float32)}

        def loss_fn(p):
            return sum(jnp.sum(jnp.abs(x) ** 2).astype(jnp.float32) for x in p.values())

        value, grads = jax.jit(jax.value_and_grad(sharp_loss(loss_fn, sam(RHO))))(params)
        assert signature(grads) == signature(params)
        factor = 2 * (1 + RHO / np.sqrt(5.25))
        assert_close(grads, jax.tree.map(lambda x: x * factor, params), 1e-2)
        assert value.dtype == jnp.float32


def test_the_cotangent_scales_float16_before_it_underflows():
    """So that a scaled loss keeps small gradients."""
    w = jnp.array([1.0, 2.0], jnp.float16)
    loss_fn = lambda w: 1e-6 * jnp.sum((w**2).astype(jnp.float32))
    scaled = jax.grad(lambda w: 2.0**15 * sharp_loss(loss_fn, optax.scale(0.0))(w))(w)
    np.testing.assert_allclose(scaled, 2.0**15 * 2e-6 * np.array([1.0, 2.0]), rtol=1e-3)


# ---------------------------------------------------------------- several devices


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is newer than this jax")
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Where JAX sums the gradients of replicated params, the perturbation is the same for all."""
    xs, each = on_each(X, X[::-1])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    f = sharp_loss(lambda w, x: cosh(w, x[0], N), sam(RHO))
    mapped = jax.shard_map(
        lambda w, x, weight: weight * f(w, x),
        mesh=mesh,
        in_specs=(P(), P("d"), P("d")),
        out_specs=P("d"),
        check_vma=check_vma,
    )
    found = jax.jit(jax.grad(lambda w: jnp.sum(mapped(w, xs, jnp.array([1.0, 2.0])))))(W)
    expected = each[0] + 2 * each[1]
    if check_vma:
        ascent = jax.grad(lambda w: cosh(w, xs[0], N) + cosh(w, xs[1], N))(W)
        point = W + RHO * ascent / jnp.linalg.norm(ascent)
        expected = jax.grad(lambda w: cosh(w, xs[0], N) + 2 * cosh(w, xs[1], N))(point)
    assert_close(found, expected, 1e-6)


def test_optax_reads_its_signature():
    """A line search passes on the arguments that the loss names."""
    assert list(inspect.signature(LOSS).parameters) == ["w", "x", "n"]
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
    value, grads = jax.value_and_grad(LOSS)(W, X, N)
    updates, _ = tx.update(grads, tx.init(W), W, value=value, grad=grads, value_fn=LOSS, x=X, n=N)
    assert cosh(W + updates, X, N) < value


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "cp"])
def test_another_argument_is_differentiated(transform):
    only_params = r"only with respect to params, but {} is differentiated.*jax\.lax\.stop_gradient"
    f = transform(LOSS)
    with pytest.raises(TypeError, match=only_params.format(r"args\[1\]")):
        jax.grad(f, argnums=(0, 2))(W, X, float(N))
    g = transform(sharp_loss(lambda w, *, x: jnp.sum(w * x["a"] * x["b"]), sam(RHO)))
    with pytest.raises(TypeError, match=only_params.format(r"kwargs\['x'\]\['b'\]")):
        jax.grad(lambda x: g(W, x={"a": X, "b": x}))(X)
    stopped = jax.grad(lambda w: f(w, jax.lax.stop_gradient(X * w), N))(W)
    assert_close(stopped, sharp_gradient(lambda w: cosh(w, X * W, N), W), 1e-6)


SECOND = {
    "hessian": lambda f: jax.hessian(f)(W),
    "grad of jit of grad": lambda f: jax.grad(lambda w: jnp.sum(jax.jit(jax.grad(f))(w)))(W),
    "jit of grad of grad": lambda f: jax.jit(
        jax.grad(lambda w: jnp.sum(jax.grad(jax.checkpoint(f))(w)))
    )(W),
    "by another argument": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(LOSS)(W, x, N)))(X),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative(name):
    with pytest.raises(TypeError, match="sharp_loss can be differentiated only once"):
        SECOND[name](lambda w: LOSS(w, X, N))


START = sam_optax.Perturbation(
    lambda params: (), lambda g, state, params=None, **extra: (g, state), lambda p, *_, **__: p
)
COUNTING = optax.GradientTransformation(lambda params: jnp.zeros(()), lambda g, s, p=None: (g, s))


@pytest.mark.parametrize(
    ("perturbation", "words"),
    [
        *((name, r"a state, which holds .*\..*") for name in ("sam_scheduled", "fsam", "esam")),
        *((name, "a start") for name in ("rsam", "momentum", "low_pass", "only_rsam")),
        (START, "a start"),
        (COUNTING, "a state, which holds an array"),
        (optax.inject_hyperparams(sam)(rho=0.1), r"a state, which holds \.count.*"),
    ],
)
def test_a_perturbation_with_a_state_or_a_start(perturbation, words):
    perturbation = build(perturbation) if isinstance(perturbation, str) else perturbation
    match = f"perturbation must have neither .* but has {words}: .*Use sam_optax\\.sharp"
    with pytest.raises(ValueError, match=match):
        sharp_loss(cosh, perturbation)


def test_a_state_that_only_the_params_show():
    """A mask has the structure of the params, which are known when the loss is differentiated."""
    mask = {"w": True, "x": False}
    loss_fn = lambda p: cosh(p["w"], p["x"], N)
    stateful = sharp_loss(loss_fn, sam_optax.perturb_only(sam_optax.fsam(RHO), mask))
    with pytest.raises(ValueError, match="perturbation must have neither"):
        jax.grad(stateful)({"w": W, "x": X})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: jax.jvp(lambda w: LOSS(w, X, N), (W,), (W,)), "forward-mode"),
        (lambda: sharp_loss(3, sam()), r"loss_fn must be a function .* got 3"),
        (lambda: sharp_loss(cosh, sam), r"perturbation must be an optax\.GradientTransformation"),
        (
            lambda: sharp_loss(jnp.cosh, sam())(W),
            r"must return a scalar, got an array of shape \(3",
        ),
        (lambda: jax.grad(sharp_loss(jnp.cosh, sam()))(W), "must return a scalar, got an array"),
        (lambda: sharp_loss(cosh_and_aux, sam())(W, X, N), "pass has_aux=True"),
        (
            lambda: jax.grad(sharp_loss(cosh, sam(), has_aux=True))(W, X, N),
            "with has_aux=True loss_fn must return a pair",
        ),
    ],
)
def test_bad_arguments_and_losses(call, match):
    with pytest.raises(TypeError, match=match):
        call()
