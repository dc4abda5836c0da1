"""NNX: statistics and random streams advance once a step, and training equals Linen's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import RuntimeCounted, assert_close, assert_same, same
from training_steps import Batches, DropoutNet, perturbation_of

import sam_optax
from sam_optax.training import nnx_grad_fn


class NNXNet(nnx.Module):
    """The network of ``DropoutNet``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.tanh(self.norm(self.hidden(x)))))


LAYERS = ("hidden", "norm", "out")


def params_of(model: NNXNet) -> Any:
    return jax.tree.map(
        jnp.array, {name: dict(nnx.to_pure_dict(nnx.state(getattr(model, name), nnx.Param)))
                    for name in LAYERS}
    )  # fmt: skip


def stats_of(model: NNXNet) -> Any:
    return {"norm": {"mean": model.norm.mean[...], "var": model.norm.var[...]}}


def data(step: int) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(np.random.default_rng(step).normal(size=(6, 3)), jnp.float32)
    return x, jnp.sin(x[:, :1])


def nnx_run(tx: optax.GradientTransformation, steps: int, *, before: bool = True) -> Any:
    """Trains in NNX; ``before`` is where nnx_grad_fn belongs, in front of the first pass."""
    model = NNXNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = []

    @nnx.jit
    def step_fn(model: NNXNet, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: NNXNet) -> jax.Array:
            return jnp.mean(jnp.square(model(x) - y))

        grad_fn = nnx_grad_fn(model, loss_fn)
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        if not before:
            grad_fn = nnx_grad_fn(model, loss_fn)
        optimizer.update(model, grads, grad_fn=grad_fn)
        return loss

    for step in range(steps):
        losses.append(step_fn(model, optimizer, *data(step)))
    return model, jnp.stack(losses)


def linen_run(tx: optax.GradientTransformation, steps: int) -> Any:
    """Trains the same network with TrainState, from the same params and dropout keys."""
    start = NNXNet(nnx.Rngs(0))
    key = start.dropout.rngs.key[...]
    net = DropoutNet()
    state = Batches.create(
        apply_fn=net.apply, params=params_of(start), tx=tx, batch_stats=stats_of(start)
    )
    losses = []

    @jax.jit
    def step_fn(state: Batches, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            step_key = jax.random.fold_in(key, state.step)
            out, new = state.apply_fn(variables, x, step_key, mutable=["batch_stats"])
            return jnp.mean(jnp.square(out - y)), new["batch_stats"]

        state, (loss, stats) = state.apply_loss(loss_fn, has_aux=True)
        return state.replace(batch_stats=stats), loss

    for step in range(steps):
        state, loss = step_fn(state, *data(step))
        losses.append(loss)
    return state, jnp.stack(losses)


@pytest.mark.parametrize("method", ["asam", "fsam"])
@pytest.mark.fast("fsam")
def test_nnx_equals_linen_over_ten_steps(method):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), perturbation_of(method))
    model, losses = nnx_run(tx, 10)
    state, linen_losses = linen_run(tx, 10)
    assert_close(losses, linen_losses, rtol=1e-4)
    assert_close(params_of(model), state.params, rtol=1e-4, atol=1e-5)
    assert_close(stats_of(model), state.batch_stats, rtol=1e-4, atol=1e-5)
    assert model.dropout.rngs.count[...] == 10


@pytest.mark.slow
def test_the_order_matters():
    """A gradient function made after the first pass drops out other units: not the same run."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), sam_optax.sam(rho=0.1))
    right, wrong = nnx_run(tx, 3)[0], nnx_run(tx, 3, before=False)[0]
    assert float(jnp.max(jnp.abs(right.out.kernel[...] - wrong.out.kernel[...]))) > 1e-4


@pytest.mark.parametrize(
    ("method", "when"), [("sam", None), ("rsam", None), ("fsam", sam_optax.every(2))]
)
@pytest.mark.fast("sam-None")
def test_the_grad_fn_leaves_the_model_alone_and_has_one_mask(method, when):
    class Masked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.w = nnx.Param(jnp.arange(1.0, 33.0))
            self.norm = nnx.BatchNorm(1, momentum=0.9, use_bias=False, use_scale=False, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.sum(self.dropout(self.w[...])) + jnp.sum(self.norm(x))

    model = Masked(nnx.Rngs(0))
    w = jnp.array(model.w[...])
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), perturbation_of(method), when=when)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = 2.35 + jnp.array([[-1.0], [1.0], [0.0], [0.0]])

    @nnx.jit
    def step_fn(model: Masked, optimizer: nnx.Optimizer) -> Any:
        def loss_fn(model: Masked) -> Any:
            return model(x), jnp.sum(model.w[...])

        grad_fn = nnx_grad_fn(model, loss_fn, has_aux=True)
        (_, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads, grad_fn=grad_fn)
        return grads.w[...], aux

    clean, aux = step_fn(model, optimizer)
    assert aux == jnp.sum(w)
    assert_same(model.w[...], w - clean)
    assert set(np.unique(clean)) == {0, 2}
    np.testing.assert_allclose(model.norm.mean[...], [0.235], rtol=1e-6)
    assert model.dropout.rngs.count[...] == 1
    assert int(optimizer.step[...]) == 1


@pytest.mark.slow
def test_evaluations_and_the_eager_step():
    counted = RuntimeCounted(lambda model: jnp.mean(jnp.square(model(data(0)[0]) - 1)))
    model = NNXNet(nnx.Rngs(0))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grad_fn = nnx_grad_fn(model, counted)
    optimizer.update(model, nnx.grad(counted)(model), grad_fn=grad_fn)
    jax.effects_barrier()
    assert counted.evaluations == 2
    assert model.dropout.rngs.count[...] == 1


@pytest.mark.slow
def test_wrt_selects_what_is_trained():
    """A frozen layer: no gradient, no perturbation and no update, but the loss sees it."""
    model = NNXNet(nnx.Rngs(0))
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("hidden")))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.asam(rho=0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    before = params_of(model)

    def loss_fn(model: NNXNet) -> jax.Array:
        return jnp.mean(jnp.square(model(data(0)[0]) - 1))

    grad_fn = nnx_grad_fn(model, loss_fn, wrt=wrt)
    grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model)
    # At the params themselves it is the gradient of the first pass.
    params = nnx.state(model, wrt)
    assert_close(jax.tree.leaves(grad_fn(params)), jax.tree.leaves(grads), rtol=1e-5)
    optimizer.update(model, grads, grad_fn=grad_fn)
    after = params_of(model)
    assert_same(after["hidden"], before["hidden"])
    assert not same(after["out"], before["out"])


def test_a_filter_that_selects_too_much_is_named():
    model = NNXNet(nnx.Rngs(0))
    grad_fn = nnx_grad_fn(model, lambda model: jnp.sum(model(data(0)[0])), wrt=nnx.Variable)
    with pytest.raises(TypeError, match=r"count.*filter it out.*wrt"):
        grad_fn(nnx.state(model, nnx.Variable))
