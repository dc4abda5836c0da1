"""`nnx_grad_fn` is given what `nnx.value_and_grad(loss_fn)` is: batches, `Rngs`, modules."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import RuntimeCounted, assert_close, assert_same, same

import sam_optax
from sam_optax.training import nnx_grad_fn

RHO, RATE = 0.1, 0.3
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


class Masked(nnx.Module):
    """A loss that is linear in w: its gradient is the mask of the pass."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.arange(1.0, 33.0))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, rngs: nnx.Rngs) -> jax.Array:
        return jnp.sum(self.dropout(self.w[...], rngs=rngs))


def sgd(perturbation: Any = None, rate: float = 1.0) -> Any:
    return sam_optax.sharpness_aware(optax.sgd(rate), perturbation or sam_optax.sam(RHO))


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("method", ["sam", "rsam"])
@pytest.mark.fast("sam-jit")
def test_rngs_passed_to_the_loss_give_one_mask_and_advance_once(jitted, method):
    """The sharp gradient has the mask of the clean one, and the count is 1 after a step."""
    perturbation = sam_optax.rsam(RHO, key=jax.random.key(3)) if method == "rsam" else None
    model, rngs = Masked(), nnx.Rngs(dropout=1)
    w = jnp.array(model.w[...])
    optimizer = nnx.Optimizer(model, sgd(perturbation), wrt=nnx.Param)

    def step(model, optimizer, x, rngs):
        def loss_fn(model, x, rngs):
            return x * model(rngs)

        grad_fn = nnx_grad_fn(model, loss_fn, x, rngs)
        _, grads = nnx.value_and_grad(loss_fn)(model, x, rngs)
        optimizer.update(model, grads, grad_fn=grad_fn)
        return grads.w[...]

    clean = (nnx.jit(step) if jitted else step)(model, optimizer, jnp.array(1.0), rngs)
    assert set(np.unique(clean)) == {0, 2}
    assert_same(model.w[...], w - clean)
    assert int(rngs.dropout.count[...]) == 1
    # A second step draws another mask.
    other = (nnx.jit(step) if jitted else step)(model, optimizer, jnp.array(1.0), rngs)
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

    class Noise(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.rngs = rngs

        def __call__(self) -> jax.Array:
            return jax.random.uniform(self.rngs.noise())

    rngs = nnx.Rngs(noise=0)
    model, noise = Masked(), Noise(rngs)

    def loss_fn(model, parts, scale):
        first = parts["noise"]()
        second = jax.random.uniform(parts["rngs"][0].noise())
        return scale * jnp.sum(model.w[...] * (first + 10 * second))

    parts = {"noise": noise, "rngs": [rngs], "nothing": None, "name": "text"}
    grad_fn = nnx_grad_fn(model, loss_fn, parts, 2.0)
    reference = nnx.Rngs(noise=0)
    first, second = (jax.random.uniform(reference.noise()) for _ in range(2))
    expected = jnp.full(32, 2 * (first + 10 * second))
    np.testing.assert_allclose(grad_fn(nnx.state(model, nnx.Param)).w, expected, rtol=1e-6)
    assert int(rngs.noise.count[...]) == 0
    assert float(first) != float(second)


def test_only_the_models_params_are_differentiated():
    """A teacher among the arguments has Params too, and stays as it is."""
    student, teacher = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(student, sgd(rate=0.1), wrt=nnx.Param)
    before = jnp.array(teacher.kernel[...])

    def loss_fn(student, teacher, x):
        return jnp.mean(jnp.square(student(x) - teacher(x)))

    @nnx.jit
    def step(student, optimizer, teacher, x):
        grad_fn = nnx_grad_fn(student, loss_fn, teacher, x)
        loss, grads = nnx.value_and_grad(loss_fn)(student, teacher, x)
        optimizer.update(student, grads, grad_fn=grad_fn)
        return loss

    losses = [float(step(student, optimizer, teacher, X)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert_same(teacher.kernel[...], before)
    # By path and by type, the filter is the model's alone.
    wrt = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    grads = nnx_grad_fn(student, loss_fn, teacher, X, wrt=wrt)(nnx.state(student, wrt))
    assert len(jax.tree.leaves(grads)) == 1


def test_a_model_that_is_also_among_the_arguments_is_one_model():
    model = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
    grad_fn = nnx_grad_fn(model, lambda model, same: jnp.sum(model(X) * same(X)), model)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    expected = jax.grad(lambda kernel: jnp.sum(jnp.square(X @ kernel)))(params["kernel"])
    np.testing.assert_allclose(grad_fn(params)["kernel"], expected, rtol=1e-5)


def test_the_loss_is_traced_once_more_for_the_second_pass():
    counted = RuntimeCounted(lambda model, x, rngs: jnp.mean(x) * model(rngs))
    model, rngs = Masked(), nnx.Rngs(dropout=1)
    optimizer = nnx.Optimizer(model, sgd(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, rngs):
        grad_fn = nnx_grad_fn(model, counted, x, rngs)
        grads = nnx.grad(counted)(model, x, rngs)
        optimizer.update(model, grads, grad_fn=grad_fn)

    for _ in range(3):
        step(model, optimizer, X, rngs)
    jax.effects_barrier()
    assert (counted.evaluations, counted.calls) == (6, 2)


# ---------------------------------------------------------------- Flax's tutorial


class CNN(nnx.Module):
    """The tutorial's network: two blocks of convolution, statistics and dropout, two layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.dropout1 = nnx.Dropout(0.1)
        self.conv2 = nnx.Conv(4, 4, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(4, rngs=rngs)
        self.linear1 = nnx.Linear(16, 8, rngs=rngs)
        self.dropout2 = nnx.Dropout(0.1)
        self.linear2 = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = nnx.relu(self.norm1(self.dropout1(self.conv1(x), rngs=rngs)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        return self.linear2(self.dropout2(nnx.relu(self.linear1(x)), rngs=rngs))


def loss_fn(model: CNN, rngs: nnx.Rngs | None, batch: Any) -> Any:
    logits = model(batch["image"], rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


@nnx.jit
def train_step(model: CNN, optimizer: Any, metrics: Any, rngs: nnx.Rngs, batch: Any) -> None:
    grad_fn = nnx_grad_fn(model, loss_fn, rngs, batch, has_aux=True)  # this line is new
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads, grad_fn=grad_fn)  # and here the argument


@nnx.jit
def eval_step(model: CNN, metrics: Any, batch: Any) -> None:
    loss, logits = loss_fn(model, None, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def digits(step: int) -> Any:
    """Images of noise around a bar at the row of the label."""
    rng = np.random.default_rng(step)
    label = rng.integers(0, 8, size=16)
    image = 0.1 * rng.normal(size=(16, 8, 8, 1))
    image[np.arange(16), label] += 1
    return {"image": jnp.asarray(image, jnp.float32), "label": jnp.asarray(label)}


def by_hand(model: CNN, rngs: nnx.Rngs, steps: int) -> Any:
    """SAM with SGD on arrays: pure functions of params, statistics and keys."""

    @jax.jit
    def step(params, rest, streams, batch):
        def pure(params):
            # New Variables, as only those of this function may change in it.
            own = jax.tree.map(lambda leaf: leaf, (rest, streams))
            model, rngs = nnx.merge(model_def, params, own[0]), nnx.merge(rngs_def, own[1])
            loss = loss_fn(model, rngs, batch)[0]
            return loss, (nnx.split(model, nnx.Param, ...)[2], nnx.split(rngs)[1])

        grads, new = jax.grad(pure, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        perturbed = jax.tree.map(lambda w, g: w + RHO * g / norm, params, grads)
        sharp = jax.grad(pure, has_aux=True)(perturbed)[0]
        return jax.tree.map(lambda w, g: w - RATE * g, params, sharp), *new

    model_def, params, rest = nnx.split(model, nnx.Param, ...)
    rngs_def, streams = nnx.split(rngs)
    for i in range(steps):
        params, rest, streams = step(params, rest, streams, digits(i))
    return params, rest, streams


@pytest.mark.slow
def test_flax_tutorial():
    model, rngs = CNN(rngs=nnx.Rngs(0)), nnx.Rngs(1)
    optimizer = nnx.Optimizer(model, sgd(rate=RATE), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    expected = by_hand(CNN(rngs=nnx.Rngs(0)), nnx.Rngs(1), 3)
    history = []
    for i in range(40):
        train_step(model, optimizer, metrics, rngs, digits(i))
        if i == 2:
            found = (*nnx.split(model, nnx.Param, ...)[1:], nnx.split(rngs)[1])
            assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert int(rngs.default.count[...]) == 2 * 3  # two layers draw in a step
        if i % 20 == 19:
            history.append({name: float(value) for name, value in metrics.compute().items()})
            metrics.reset()
    assert history[1]["loss"] < 0.7 * history[0]["loss"]
    model.eval()
    eval_step(model, metrics, digits(1000))
    assert float(metrics.compute()["accuracy"]) > 0.5
    assert int(optimizer.step[...]) == 40


# ---------------------------------------------------------------- slips


@pytest.mark.parametrize(
    "wrt",
    [nnx.Param, nnx.All(nnx.Param, nnx.PathContains("w")), (nnx.Param, nnx.BatchStat), ...],
    ids=["type", "filter", "tuple", "ellipsis"],
)
def test_a_filter_by_position_is_named(wrt):
    """The third argument was ``wrt`` once."""
    with pytest.raises(TypeError, match=r"wrt is a keyword argument: .*wrt=.*is a filter"):
        nnx_grad_fn(Masked(), lambda model: 0.0, wrt)


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((X, nnx.Rngs(0)), {}, "takes 2 positional"),
        ((), {}, "missing.*'x'"),
        ((X,), {"train": True}, "unexpected.*'train'"),
    ],
    ids=["too many", "too few", "unknown"],
)
def test_arguments_that_the_loss_does_not_take_are_named(args, kwargs, reason):
    model, rngs = Masked(), nnx.Rngs(0)
    grad_fn = nnx_grad_fn(model, lambda model, x: jnp.mean(x) * model(rngs), *args, **kwargs)
    expected = rf"{reason}[\s\S]*called as loss_fn\(model, .*nnx\.value_and_grad\(loss_fn\)"
    with pytest.raises(TypeError, match=expected):
        grad_fn(nnx.state(model, nnx.Param))


def test_a_decorator_that_shows_another_signature_does_no_harm():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def batch_loss(model, x):
        return jnp.sum(model(x))

    @functools.wraps(batch_loss)
    def loss_fn(model):
        return batch_loss(model, X)

    grads = nnx_grad_fn(model, loss_fn)(nnx.state(model, nnx.Param))
    assert len(jax.tree.leaves(grads)) == 2


def test_models_and_losses_of_another_kind_are_named():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    loss_fn = lambda model: jnp.sum(model(X))
    with pytest.raises(TypeError, match=r"model must be an NNX module.*got function"):
        nnx_grad_fn(loss_fn, model, X)
    with pytest.raises(TypeError, match=r"loss_fn must be a function of the model"):
        nnx_grad_fn(model, X)
    with pytest.raises(TypeError, match=r"scalar, got a pair.*value_and_grad"):
        nnx_grad_fn(model, nnx.value_and_grad(loss_fn))(params)
    with pytest.raises(TypeError, match=r"got a pair: pass has_aux=True"):
        nnx_grad_fn(model, lambda model: (loss_fn(model), 1.0))(params)
    with pytest.raises(TypeError, match=r"must return a pair \(loss, aux\), got an array of shape"):
        nnx_grad_fn(model, loss_fn, has_aux=True)(params)
    with pytest.raises(TypeError, match=r"scalar, got an array of shape \(6, 2\)"):
        nnx_grad_fn(model, lambda model: model(X))(params)
