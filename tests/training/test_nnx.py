"""NNX: `nnx_grad_fn` is given what `nnx.value_and_grad(loss_fn)` is, and training equals Linen's.

Statistics and random streams advance once a step.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import RuntimeCounted, assert_close, assert_same, same
from methods import often
from training_steps import Batches, DropoutNet, perturbation_of

import sam_optax
from sam_optax.training import nnx_grad_fn

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
LAYERS = ("hidden", "norm", "out")


class NNXNet(nnx.Module):
    """The network of ``DropoutNet``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.tanh(self.norm(self.hidden(x)))))


class Masked(nnx.Module):
    """A loss that is linear in w: its gradient is the mask of the pass."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.arange(1.0, 33.0))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, rngs: nnx.Rngs) -> jax.Array:
        return jnp.sum(self.dropout(self.w[...], rngs=rngs))


def params_of(model: NNXNet) -> Any:
    layers = {name: nnx.state(getattr(model, name), nnx.Param) for name in LAYERS}
    return jax.tree.map(jnp.array, {name: dict(nnx.to_pure_dict(s)) for name, s in layers.items()})


def stats_of(model: NNXNet) -> Any:
    return {"norm": {"mean": model.norm.mean[...], "var": model.norm.var[...]}}


def linear() -> nnx.Linear:
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def sum_of_outputs(model: nnx.Linear) -> jax.Array:
    return jnp.sum(model(X))


@nnx.jit
def nnx_step(model: NNXNet, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    def loss_fn(model: NNXNet) -> jax.Array:
        return jnp.mean(jnp.square(model(x) - jnp.sin(x[:, :1])))

    grad_fn = nnx_grad_fn(model, loss_fn)
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads, grad_fn=grad_fn)
    return loss


@jax.jit
def linen_step(state: Batches, x: jax.Array, key: jax.Array) -> Any:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        step_key = jax.random.fold_in(key, state.step)
        out, new = state.apply_fn(variables, x, step_key, mutable=["batch_stats"])
        return jnp.mean(jnp.square(out - jnp.sin(x[:, :1]))), new["batch_stats"]

    state, (loss, stats) = state.apply_loss(loss_fn, has_aux=True)
    return state.replace(batch_stats=stats), loss


def test_nnx_equals_linen_over_ten_steps():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of("fsam"))
    model = NNXNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    key = model.dropout.rngs.key[...]
    state = Batches.create(
        apply_fn=DropoutNet().apply, params=params_of(model), tx=tx, batch_stats=stats_of(model)
    )
    for step in range(10):
        x = jnp.asarray(np.random.default_rng(step).normal(size=(6, 3)), jnp.float32)
        loss = nnx_step(model, optimizer, x)
        state, linen_loss = linen_step(state, x, key)
        assert_close(loss, linen_loss, rtol=1e-4)
    assert_close(params_of(model), state.params, rtol=1e-4, atol=1e-5)
    assert_close(stats_of(model), state.batch_stats, rtol=1e-4, atol=1e-5)
    assert model.dropout.rngs.count[...] == 10


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("method", often(["sam", "rsam"], "sam"))
def test_rngs_passed_to_the_loss_give_one_mask_and_advance_once(method, jitted):
    """The sharp gradient has the clean one's mask (case 21); after a step the count is 1."""
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), perturbation_of(method))
    model, rngs = Masked(), nnx.Rngs(dropout=1)
    w = jnp.array(model.w[...])
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, x, rngs):
        def loss_fn(model, x, rngs):
            return x * model(rngs), jnp.sum(model.w[...])

        grad_fn = nnx_grad_fn(model, loss_fn, x, rngs, has_aux=True)
        (_, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, rngs)
        optimizer.update(model, grads, grad_fn=grad_fn)
        return grads.w[...], aux

    run = nnx.jit(step) if jitted else step
    clean, aux = run(model, optimizer, jnp.array(1.0), rngs)
    assert aux == jnp.sum(w)
    assert set(np.unique(clean)) == {0, 2}
    assert_same(model.w[...], w - clean)
    assert int(rngs.dropout.count[...]) == 1
    other, _ = run(model, optimizer, jnp.array(1.0), rngs)  # another mask
    assert not same(other, clean)
    assert int(rngs.dropout.count[...]) == 2


def test_every_evaluation_starts_from_the_same_copies():
    """Two evaluations of one gradient function, after the first pass has moved everything."""
    model, rngs = Masked(), nnx.Rngs(dropout=1)
    statistics = nnx.BatchStat(jnp.array(1.0))

    def loss_fn(model, statistics, rngs):
        statistics[...] = statistics[...] * 2
        return statistics[...] * model(rngs)

    grad_fn = nnx_grad_fn(model, loss_fn, statistics, rngs=rngs)
    grads = nnx.grad(loss_fn)(model, statistics, rngs=rngs)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    first, second = grad_fn(params), grad_fn(params)
    assert_same(first["w"], grads.w[...])
    assert_same(second, first)
    assert (float(statistics[...]), int(rngs.dropout.count[...])) == (2.0, 1)


def test_objects_in_containers_and_objects_that_share():
    """A stream in two places of the arguments is one stream, which the loss draws from twice."""
    model, rngs = Masked(), nnx.Rngs(noise=0)

    def loss_fn(model, parts, scale):
        first, second = (jax.random.uniform(r.noise()) for r in (parts["one"], parts["two"][0]))
        return scale * jnp.sum(model.w[...] * (first + 10 * second))

    parts = {"one": rngs, "two": [rngs], "nothing": None, "name": "text"}
    grad_fn = nnx_grad_fn(model, loss_fn, parts, 2.0)
    reference = nnx.Rngs(noise=0)
    first, second = (jax.random.uniform(reference.noise()) for _ in range(2))
    expected = jnp.full(32, 2 * (first + 10 * second))
    np.testing.assert_allclose(grad_fn(nnx.state(model, nnx.Param)).w, expected, rtol=1e-6)
    assert int(rngs.noise.count[...]) == 0


def test_a_model_that_is_also_among_the_arguments_is_one_model():
    model = linear()
    grad_fn = nnx_grad_fn(model, lambda model, same: jnp.sum(model(X) * same(X)), model)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    squares = lambda p: jnp.sum(jnp.square(X @ p["kernel"] + p["bias"]))
    assert_close(dict(grad_fn(params)), jax.grad(squares)(dict(params)), rtol=1e-5)


def test_wrt_selects_what_is_trained_and_only_of_the_model():
    """A frozen kernel has no gradient; a teacher among the arguments has Params too."""
    student, teacher = linear(), nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    wrt = nnx.All(nnx.Param, nnx.PathContains("bias"))
    loss_fn = lambda student, teacher: jnp.mean(jnp.square(student(X) - teacher(X)))
    grads = nnx_grad_fn(student, loss_fn, teacher, wrt=wrt)(nnx.state(student, wrt))
    expected = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(student, teacher)
    assert len(jax.tree.leaves(grads)) == 1
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(expected), rtol=1e-5)


def test_the_loss_is_traced_once_more_for_the_second_pass():
    counted = RuntimeCounted(lambda model, x, rngs: jnp.mean(x) * model(rngs))
    model, rngs = Masked(), nnx.Rngs(dropout=1)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, rngs):
        grad_fn = nnx_grad_fn(model, counted, x, rngs)
        optimizer.update(model, nnx.grad(counted)(model, x, rngs), grad_fn=grad_fn)

    for _ in range(3):
        step(model, optimizer, X, rngs)
    jax.effects_barrier()
    assert (counted.evaluations, counted.calls) == (6, 2)


# ---------------------------------------------------------------- slips


@pytest.mark.parametrize(
    ("args", "match"),
    [
        # The third argument was ``wrt`` once.
        *(
            ((linear(), sum_of_outputs, wrt), r"wrt is a keyword argument: .*wrt=.*is a filter")
            for wrt in (nnx.Param, nnx.PathContains("w"), (nnx.Param, nnx.BatchStat), ...)
        ),
        ((sum_of_outputs, linear(), X), r"model must be an NNX module.*got function"),
        ((linear(), X), r"loss_fn must be a function of the model"),
    ],
)
def test_arguments_of_another_kind_are_named(args, match):
    with pytest.raises(TypeError, match=match):
        nnx_grad_fn(*args)


def product(model, x):
    return jnp.mean(x) * sum_of_outputs(model)


CALLED = r"[\s\S]*called as loss_fn\(model, .*nnx\.value_and_grad\(loss_fn\)"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda m: nnx_grad_fn(m, product, X, nnx.Rngs(0)), "takes 2 positional" + CALLED),
        (lambda m: nnx_grad_fn(m, product), "missing.*'x'" + CALLED),
        (lambda m: nnx_grad_fn(m, product, X, train=True), "unexpected.*'train'" + CALLED),
        (lambda m: nnx_grad_fn(m, nnx.value_and_grad(sum_of_outputs)), "pair.*value_and_grad"),
        (partial(nnx_grad_fn, loss_fn=lambda m: (0.0, 1.0)), "got a pair: pass has_aux=True"),
        (partial(nnx_grad_fn, loss_fn=sum_of_outputs, has_aux=True), r"must return a pair \(loss"),
        (partial(nnx_grad_fn, loss_fn=lambda m: m(X)), r"scalar, got an array of shape \(6, 2\)"),
    ],
)
def test_losses_of_another_kind_are_named(make, match):
    model = linear()
    with pytest.raises(TypeError, match=match):
        make(model)(nnx.state(model, nnx.Param))


def test_a_filter_that_selects_too_much_is_named():
    model = NNXNet(nnx.Rngs(0))
    grad_fn = nnx_grad_fn(model, lambda model: jnp.sum(model(X)), wrt=nnx.Variable)
    with pytest.raises(TypeError, match=r"count.*filter it out.*wrt"):
        grad_fn(nnx.state(model, nnx.Variable))
