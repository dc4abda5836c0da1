"""A loss whose gradient is the sharp gradient."""

import functools
import inspect

import equinox as eqx
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
from methods import METHODS, build

import sam_optax
from sam_optax import sam, sharp_loss

W = jnp.array([1.0, -0.5, 2.0])
X = jnp.array([1.0, 2.0, 0.5])
N = 3
RHO = 0.3
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
    "jit": lambda f: jax.jit(jax.value_and_grad(f)),
    "grad of jit": lambda f: jax.value_and_grad(jax.jit(f)),
    "jit of grad of jit": lambda f: jax.jit(jax.value_and_grad(jax.jit(f))),
    "checkpoint": lambda f: jax.value_and_grad(jax.checkpoint(f)),
    "jit of checkpoint": lambda f: jax.jit(jax.value_and_grad(jax.checkpoint(f))),
    "checkpoint of jit": lambda f: jax.value_and_grad(jax.checkpoint(jax.jit(f))),
    "grad of vmap": lambda f: jax.value_and_grad(
        lambda w, x, n: jnp.sum(jax.vmap(f, (None, 0, 0))(w, on_one(x), on_one(n)))
    ),
    "vmap of grad": lambda f: (
        lambda w, x, n: jax.tree.map(
            lambda leaf: leaf[0], jax.vmap(jax.value_and_grad(f))(on_one(w), on_one(x), on_one(n))
        )
    ),
    "scan": lambda f: jax.value_and_grad(
        lambda w, x, n: jax.lax.scan(
            lambda total, batch: (total + f(w, *batch), None), 0.0, (on_one(x), on_one(n))
        )[0]
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


@pytest.mark.parametrize("n", [jnp.array(N), jnp.array(3.0), np.float32(N)])
def test_a_number_may_be_an_array(n):
    np.testing.assert_allclose(jax.grad(LOSS)(W, X, n), GRADIENT, atol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.jit(LOSS))(W, X, n), GRADIENT, atol=1e-5)


def test_the_value_alone():
    assert_same(LOSS(W, X, N), cosh(W, X, N))
    np.testing.assert_allclose(jax.jit(LOSS)(W, X, N), VALUE, atol=1e-5)


def test_keyword_arguments():
    np.testing.assert_allclose(jax.grad(LOSS)(W, n=N, x=X), GRADIENT, atol=1e-5)
    f = sharp_loss(lambda w, params: cosh(w, params, N), sam(RHO))
    np.testing.assert_allclose(jax.grad(f)(W, params=X), GRADIENT, atol=1e-5)


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
    _, aux = WITH_AUX(W, X, N)
    assert_same(aux["predictions"], W * X)


def test_aux_is_not_differentiated():
    """Statistics that one call hands to the next are no differentiated argument there."""
    np.testing.assert_array_equal(
        jax.grad(lambda w: jnp.sum(WITH_AUX(w, X, N)[1]["predictions"]))(W), 0
    )
    f = sharp_loss(lambda w, x, s: (cosh(w, x, N), s + jnp.mean(w)), sam(RHO), has_aux=True)

    def total(w):
        def body(carry, x):
            loss, stats = f(w, x, carry[1])
            return (carry[0] + loss, stats), None

        return jax.lax.scan(body, (0.0, 0.0), jnp.stack([X, X]))[0]

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


ACCEPTED = ["sam", "sam_1", "asam", "fisher", "zsharp", "only_sam", "limited", "scale", "by_hand"]


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.fast("sam-*", "asam-adam", "zsharp-sgd", "only_sam-sgd")
def test_a_loop_that_owns_the_optimizer_takes_the_steps_of_sharpness_aware(name, optimizer):
    """It draws the batches and takes the loss."""
    method, xs, ys = build(name), *batches(5)

    def fit(loss_fn, params):
        @jax.jit
        def step(params, state, x, y):
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        state, losses = optimizer.init(params), []
        for x, y in zip(xs, ys, strict=True):
            params, state, loss = step(params, state, x, y)
            losses.append(loss)
        return params, losses

    tx = sam_optax.sharpness_aware(optimizer, method)

    @jax.jit
    def expected_step(params, state, x, y):
        grad_fn = lambda p: jax.grad(mlp_loss)(p, x, y)
        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, mlp_loss(params, x, y)

    params = expected = init_mlp()
    params, losses = fit(sharp_loss(mlp_loss, method), params)
    state, expected_losses = tx.init(expected), []
    for x, y in zip(xs, ys, strict=True):
        expected, state, loss = expected_step(expected, state, x, y)
        expected_losses.append(loss)
    assert_close(params, expected, 2e-7)
    assert_close(losses, expected_losses, 2e-7)


@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_costs_two_gradients_and_a_value_one_evaluation(jit):
    counted = RuntimeCounted(mlp_loss)
    f = sharp_loss(counted, sam(RHO))
    for function, evaluations in ((f, 1), (jax.grad(f), 2), (jax.value_and_grad(f), 2)):
        counted.evaluations = 0
        (jax.jit(function) if jit else function)(init_mlp(), *X_AND_Y)
        jax.effects_barrier()
        assert counted.evaluations == evaluations


def test_two_gradients_are_all_that_is_compiled():
    def by_hand(params, x, y):
        loss, g = jax.value_and_grad(mlp_loss)(params, x, y)
        scale = RHO / jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(g)))
        point = jax.tree.map(lambda p, g: p + scale * g, params, g)
        return loss, jax.grad(mlp_loss)(point, x, y)

    count = lambda f: jax.jit(f).lower(init_mlp(), *X_AND_Y).compile().as_text().count(" dot(")
    assert count(jax.value_and_grad(sharp_loss(mlp_loss, sam(RHO)))) == count(by_hand)
    assert count(sharp_loss(mlp_loss, sam(RHO))) == count(mlp_loss)


# Arguments of all kinds.


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["typed", "raw"])
def test_labels_keys_and_static_arguments(key):
    def loss_fn(w, batch, key, mode, *, train, activation=jnp.cosh):
        assert mode == "dropout"
        assert train is True
        x, label = batch
        kept = jax.random.bernoulli(key, 0.5, (3, *x.shape))
        logits = jnp.mean(kept * activation(w * x), axis=0)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    batch = (X, jnp.array(1))
    plain = lambda w: loss_fn(w, batch, key, "dropout", train=True)
    expected = jax.jit(lambda w: sharp_gradient(plain, w))(W)
    f = sharp_loss(loss_fn, sam(RHO))
    static = functools.partial(jax.jit, static_argnums=3, static_argnames="train")
    assert_close(jax.grad(f)(W, batch, key, "dropout", train=True), expected, 1e-6)
    assert_close(static(jax.grad(f))(W, batch, key, "dropout", train=True), expected, 1e-6)
    assert_close(jax.grad(static(f))(W, batch, key, "dropout", train=True), expected, 1e-6)

    @jax.checkpoint
    def body(carry, data):
        w, total = carry
        return (w, total + f(w, *data, "dropout", train=True)), None

    def scanned(w):
        data = jax.tree.map(on_one, (batch, key))
        return jax.lax.scan(body, (w, 0.0), data)[0][1]

    assert_close(jax.grad(scanned)(W), expected, 1e-6)


def test_numpy_arrays():
    """They stay NumPy arrays inside, which may say how an array is shaped."""
    shape = np.array([3, 1])
    f = sharp_loss(lambda w, x: cosh(w.reshape(shape), x["x"].reshape(x["shape"]), N), sam(RHO))
    w, x = np.asarray(W), {"x": np.asarray(X), "shape": shape}
    np.testing.assert_allclose(jax.grad(f)(w, x), GRADIENT, atol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.jit(lambda w: f(w, x)))(w), GRADIENT, atol=1e-5)


def test_a_python_number_is_differentiated():
    np.testing.assert_allclose(jax.grad(sharp_loss(lambda w: w**2, sam(1.0)))(2.0), 6.0, rtol=1e-6)


def test_leaves_that_are_not_differentiated_are_held_fixed():
    """Frozen float leaves are neither perturbed nor in the norm; others stay what they are."""
    fixed = {"frozen": 10 * X, "scale": 2.0, "steps": jnp.array(3), "name": "a", "f": jnp.cosh}

    def loss_fn(params, x):
        assert params["name"] == "a"
        assert params["missing"] is None
        assert type(params["scale"]) is float
        wx = params["f"](params["w"] * x + params["frozen"] / 10)
        return params["scale"] * jnp.sum(wx) / params["steps"]

    f = sharp_loss(loss_fn, sam_optax.asam(RHO))

    def of_w(loss, w):
        return loss({**fixed, "missing": None, "w": w}, X)

    w, tx = W, sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.asam(RHO))
    plain = functools.partial(of_w, loss_fn)
    expected, _ = tx.update(
        None, tx.init({"w": w}), {"w": w}, grad_fn=lambda p: {"w": jax.grad(plain)(p["w"])}
    )
    assert_close(jax.grad(functools.partial(of_w, f))(w), -expected["w"], 1e-6)
    assert_close(jax.grad(jax.jit(functools.partial(of_w, f)))(w), -expected["w"], 1e-6)


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
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


# Several devices.


def test_pmap():
    """Each device perturbs along its own gradient."""
    xs, each = on_each(X, X[::-1])
    mapped = jax.pmap(
        lambda w, x: jax.lax.pmean(jax.grad(LOSS)(w, x, N), "d"),
        axis_name="d",
        in_axes=(None, 0),
        devices=jax.devices()[:2],
    )
    assert_close(mapped(W, xs)[0], jnp.mean(each, 0), 1e-6)
    outside = jax.pmap(lambda w, x: LOSS(w, x, N), in_axes=(None, 0), devices=jax.devices()[:2])
    weights = jnp.array([1.0, 2.0])
    grads = jax.grad(lambda w: jnp.sum(weights * outside(w, xs)))(W)
    assert_close(grads, each[0] + 2 * each[1], 1e-6)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is newer than this jax")
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Where JAX sums the gradients of replicated params, the perturbation is the same for all."""
    xs, each = on_each(X, X[::-1])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    f = sharp_loss(lambda w, x: cosh(w, x[0], N), sam(RHO))
    weights = jnp.array([1.0, 2.0])

    def losses(w, x):
        mapped = jax.shard_map(
            lambda w, x, weight: weight * f(w, x),
            mesh=mesh,
            in_specs=(P(), P("d"), P("d")),
            out_specs=P("d"),
            check_vma=check_vma,
        )
        return jnp.sum(mapped(w, x, weights))

    if check_vma:
        ascent = jax.grad(lambda w: cosh(w, xs[0], N) + cosh(w, xs[1], N))(W)
        point = W + RHO * ascent / jnp.linalg.norm(ascent)
        expected = jax.grad(lambda w: cosh(w, xs[0], N) + 2 * cosh(w, xs[1], N))(point)
    else:
        expected = each[0] + 2 * each[1]
    assert_close(jax.grad(losses)(W, xs), expected, 1e-6)
    assert_close(jax.jit(jax.grad(losses))(W, xs), expected, 1e-6)


# Other libraries' models.


@pytest.mark.parametrize("jit", [False, True])
def test_equinox(jit):
    """A model that holds functions and static numbers as leaves."""
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    assert any(callable(leaf) for leaf in jax.tree.leaves(model))
    x, y = X_AND_Y

    def loss_fn(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    f = eqx.filter_value_and_grad(sharp_loss(loss_fn, sam(RHO)))
    value, grads = (eqx.filter_jit(f) if jit else f)(model, x, y)
    expected, g = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(model, x, y)
    eps, _ = sam(RHO).update(g, sam(RHO).init(g))
    sharp = eqx.filter_jit(eqx.filter_grad(loss_fn))(eqx.apply_updates(model, eps), x, y)
    assert jax.tree.structure(grads) == jax.tree.structure(sharp)
    assert_close(value, expected, 1e-6)
    assert_close(grads, sharp, 1e-5)


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.out = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.norm(self.hidden(x))))

    x, y = X_AND_Y
    graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, rest, x, y):
        model = nnx.merge(graphdef, params, rest)
        loss = jnp.mean((model(x) - y) ** 2)
        return loss, nnx.state(model, nnx.BatchStat)

    f = sharp_loss(loss_fn, sam(RHO), has_aux=True)
    (value, stats), grads = jax.jit(jax.value_and_grad(f, has_aux=True))(params, rest, x, y)
    # (NNX's variables are updated in place: the reference needs copies.)
    copied = lambda params, rest, x, y: loss_fn(params, jax.tree.map(jnp.asarray, rest), x, y)
    plain = jax.jit(jax.value_and_grad(copied, has_aux=True))
    (expected, expected_stats), g = plain(params, rest, x, y)
    eps, _ = sam(RHO).update(g, sam(RHO).init(g))
    point = jax.tree.map(jnp.add, params, eps)
    _, sharp = plain(point, rest, x, y)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert_close((value, stats), (expected, expected_stats), 1e-6)
    assert_close(grads, sharp, 1e-5)


def test_optax_reads_its_signature():
    """A line search passes on the arguments that the loss names."""
    assert list(inspect.signature(LOSS).parameters) == ["w", "x", "n"]
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
    value, grads = jax.value_and_grad(LOSS)(W, X, N)
    updates, _ = tx.update(grads, tx.init(W), W, value=value, grad=grads, value_fn=LOSS, x=X, n=N)
    assert cosh(W + updates, X, N) < value


# What is refused.


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "cp"])
def test_another_argument_is_differentiated(transform):
    only_params = r"only with respect to params, but {} is differentiated.*jax\.lax\.stop_gradient"
    f = transform(LOSS)
    with pytest.raises(TypeError, match=only_params.format(r"args\[0\]")):
        jax.grad(f, argnums=1)(W, X, N)
    with pytest.raises(TypeError, match=only_params.format(r"args\[1\]")):
        jax.grad(f, argnums=(0, 2))(W, X, float(N))
    g = transform(sharp_loss(lambda w, *, x: jnp.sum(w * x["a"] * x["b"]), sam(RHO)))
    with pytest.raises(TypeError, match=only_params.format(r"kwargs\['x'\]\['b'\]")):
        jax.grad(lambda x: g(W, x={"a": X, "b": x}))(X)
    stopped = jax.grad(lambda w: f(w, jax.lax.stop_gradient(X * w), N))(W)
    assert_close(stopped, sharp_gradient(lambda w: cosh(w, X * W, N), W), 1e-6)


SECOND = {
    "hessian": lambda f: jax.hessian(f)(W),
    "grad of grad": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w)))(W),
    "grad of jit of grad": lambda f: jax.grad(lambda w: jnp.sum(jax.jit(jax.grad(f))(w)))(W),
    "jit of grad of grad": lambda f: jax.jit(
        jax.grad(lambda w: jnp.sum(jax.grad(jax.checkpoint(f))(w)))
    )(W),
    "Hessian-vector product": lambda f: jax.jvp(jax.grad(f), (W,), (W,)),
    "value of value_and_grad": lambda f: jax.grad(lambda w: jax.value_and_grad(f)(w)[0])(W),
    "vmap": lambda f: jax.vmap(jax.hessian(f))(on_one(W)),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative(name):
    with pytest.raises(TypeError, match="sharp_loss can be differentiated only once"):
        SECOND[name](lambda w: LOSS(w, X, N))


def test_a_derivative_of_the_gradient_by_another_argument():
    mixed = jax.grad(lambda x: jnp.sum(jax.grad(LOSS)(W, x, N)))
    with pytest.raises(TypeError, match="sharp_loss can be differentiated only once"):
        mixed(X)


def test_forward_mode():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: LOSS(w, X, N), (W,), (W,))


STATEFUL = ["sam_scheduled", "fsam", "vasso", "esam", "ssam"]
STARTS = ["rsam", "momentum", "low_pass", "only_rsam", "bsam"]


@pytest.mark.parametrize("name", STATEFUL)
def test_a_perturbation_with_state(name):
    match = r"perturbation must have .* but has a state, which holds .*\..*: .*Use sam_optax\.sharp"
    with pytest.raises(ValueError, match=match):
        sharp_loss(cosh, build(name))


@pytest.mark.parametrize("name", STARTS)
def test_a_perturbation_with_a_start(name):
    with pytest.raises(ValueError, match=r"neither a start .* but has a start: .*Use sam_op"):
        sharp_loss(cosh, build(name))


def test_a_start_without_state():
    start = sam_optax.Perturbation(
        lambda params: (), lambda g, state, params=None, **extra: (g, state), lambda p, *_, **__: p
    )
    with pytest.raises(ValueError, match="but has a start"):
        sharp_loss(cosh, start)


def test_hyperparameters_in_the_state():
    with pytest.raises(ValueError, match=r"but has a state, which holds \.count.*: .*Use"):
        sharp_loss(cosh, optax.inject_hyperparams(sam)(rho=0.1))


def test_a_state_that_is_an_array():
    counting = optax.GradientTransformation(
        lambda params: jnp.zeros(()), lambda g, s, p=None: (g, s)
    )
    with pytest.raises(ValueError, match=r"holds an array: .*Use"):
        sharp_loss(cosh, counting)


def test_a_state_that_only_the_params_show():
    """A mask has the structure of the params, which are known when the loss is differentiated."""
    mask = {"w": True, "x": False}
    loss_fn = lambda p: cosh(p["w"], p["x"], N)
    params = {"w": W, "x": X}
    stateful = sharp_loss(loss_fn, sam_optax.perturb_only(sam_optax.fsam(RHO), mask))
    with pytest.raises(ValueError, match="perturbation must have neither"):
        jax.grad(stateful)(params)
    grads = jax.grad(sharp_loss(loss_fn, sam_optax.perturb_only(sam(RHO), mask)))(params)
    np.testing.assert_allclose(grads["w"], GRADIENT, atol=1e-5)


@pytest.mark.slow
def test_every_method_is_accepted_or_refused():
    for name in METHODS:
        method = build(name)
        stateless = not jax.tree.leaves(method.init(init_mlp()))
        if stateless and not getattr(method, "has_start", False):
            jax.eval_shape(jax.grad(sharp_loss(mlp_loss, method)), init_mlp(), *X_AND_Y)
        else:
            with pytest.raises(ValueError, match="perturbation must have neither"):
                sharp_loss(mlp_loss, method)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"loss_fn must be a function .* got 3"):
        sharp_loss(3, sam())
    with pytest.raises(TypeError, match=r"perturbation must be an optax\.GradientTransformation"):
        sharp_loss(cosh, sam)


@pytest.mark.parametrize("run", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_bad_losses(run):
    with pytest.raises(TypeError, match=r"loss_fn must return a scalar, got an array of shape \(3"):
        run(sharp_loss(jnp.cosh, sam()))(W)
    with pytest.raises(TypeError, match="pass has_aux=True"):
        run(sharp_loss(cosh_and_aux, sam()))(W, X, N)
    with pytest.raises(TypeError, match="with has_aux=True loss_fn must return a pair"):
        run(sharp_loss(cosh, sam(), has_aux=True))(W, X, N)
