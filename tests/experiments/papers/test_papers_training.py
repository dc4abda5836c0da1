"""The steps: what is trained on, which statistics are kept, and that devices change nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import Silent, prepare, train

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import augment, devices, feed, sharpness, step
from sam_optax.experiments.papers.loop import Training
from sam_optax.experiments.papers.metrics import Metrics
from sam_optax.experiments.papers.options import SUPPORTED

pytestmark = pytest.mark.slow


def test_the_number_of_devices_changes_nothing_but_rounding(images):
    """Batch statistics, augmentation, mixup and the perturbation are of the whole batch."""
    options = {"crop": 1, "mixup": 0.3, "label_noise": 0.2}
    (one, a), (four, b) = (train(images, count, **options) for count in (1, 4))
    for x, y in zip(jax.tree.leaves(one.state), jax.tree.leaves(four.state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(a[-1]["train_loss"], b[-1]["train_loss"], rtol=1e-5)
    assert len(four.state.params["Dense_0"]["kernel"].sharding.device_set) == 4


def test_a_step_is_that_of_the_library_on_the_first_pass_s_statistics(images):
    problem, extent, place, state = prepare(images, label_smoothing=0.1, weight_decay=0.0)
    batch = next(feed.training(extent, problem.dataset, place, 0))
    x = augment.normalize(batch.images, problem.dataset.mean, problem.dataset.std)
    y = augment.smooth(batch.labels, 3, 0.1)

    def loss_and_stats(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = problem.model.apply(variables, x, train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy(logits, y).mean(), new["batch_stats"]

    value_and_grad = jax.jit(jax.value_and_grad(loss_and_stats, has_aux=True))
    (loss, stats), grads = value_and_grad(state.params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    perturbed = jax.tree.map(lambda w, g: w + 0.05 * g / norm, state.params, grads)
    _, sharp = value_and_grad(perturbed)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, state.params, sharp)

    new, metrics = jax.jit(step.train_step(problem, 0, extent.groups))(
        state, batch.images, batch.labels
    )
    np.testing.assert_allclose(metrics["train_loss"], loss, rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)
    jax.tree.map(close, new.params, expected)
    jax.tree.map(close, new.batch_stats, stats)
    assert int(new.step) == 1


def test_augmentation_changes_with_the_step(images):
    problem, extent, place, state = prepare(images, method="sgd", rho=None, cutout=4)
    batch = next(feed.training(extent, problem.dataset, place, 0))
    run = jax.jit(step.train_step(problem, 0, extent.groups))

    def loss(number):
        some = state.replace(step=jnp.asarray(number))
        return float(run(some, batch.images, batch.labels)[1]["train_loss"])

    assert loss(0) == loss(0) != loss(1)


def test_noisy_labels_are_trained_on_and_clean_ones_tested_on(images):
    problem, extent, place, _ = prepare(images, label_noise=0.25)
    clean = problem.dataset.train.batch(np.arange(48), None)[1]
    seen = np.concatenate([b.labels for b in feed.training(extent, problem.dataset, place, 0)])
    noisy = (clean + extent.shift) % 3
    np.testing.assert_array_equal(seen, noisy[extent.order(0).ravel()])
    assert np.count_nonzero(noisy != clean) == 12
    batches = list(feed.evaluation(problem.dataset.test, extent.test, 16, place))
    tested = np.concatenate([np.asarray(b.labels)[np.asarray(b.weight) == 1] for b in batches])
    np.testing.assert_array_equal(tested, np.arange(21) % 3)


def test_the_last_batch_of_an_evaluation_is_filled_up_and_not_counted(images):
    problem, extent, place, state = prepare(images, 4)
    training = Training(problem, extent, place, state)  # 21 examples in batches of 16
    found = training.test()
    x, y = problem.dataset.test.batch(np.arange(21), None)
    variables = {"params": training.state.params, "batch_stats": training.state.batch_stats}
    inputs = augment.normalize(jnp.asarray(x), problem.dataset.mean, problem.dataset.std)
    logits = jax.jit(partial(problem.model.apply, train=False))(variables, inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(y))
    np.testing.assert_allclose(found["test_loss"], losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["test_accuracy"], (logits.argmax(-1) == y).mean(), rtol=1e-6)


def test_sharpness(images):
    problem, extent, place, state = prepare(images, epochs=1)
    x, y = problem.dataset.train.batch(np.arange(48)[::2], None)
    inputs = augment.normalize(jnp.asarray(x), problem.dataset.mean, problem.dataset.std)

    @jax.jit
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits = problem.model.apply(variables, inputs, train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(y)).mean()

    grads = jax.jit(jax.grad(loss))(state.params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    perturbed = jax.tree.map(lambda w, g: w + 0.2 * g / norm, state.params, grads)
    expected = float(loss(perturbed) - loss(state.params))
    found = sharpness.measure(problem, extent, place, state, 24, 0.2)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert found > 0


def test_it_learns_in_bfloat16_with_params_in_float32(images):
    training, points = train(images, dtype=jnp.bfloat16, epochs=6)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(training.state.params)}
    assert kinds == {np.dtype("float32")}
    assert [p["epoch"] for p in points] == [1, 2, 3, 4, 5, 6]
    assert points[-1]["step"] == 18
    assert points[-1]["train_loss"] < 0.5 * points[0]["train_loss"]
    assert points[-1]["test_accuracy"] > 0.85  # chance is a third


def test_a_divergence_is_said(images, monkeypatch):
    _, extent, _, _ = prepare(images, trace=True)
    training = Training.__new__(Training)
    training._plan = extent
    point = {"epoch": 1, "train_loss": float("nan"), "test_accuracy": 0.3}
    monkeypatch.setattr(training, "_epoch", lambda *_: point)
    with pytest.raises(UserError, match=r"loss is nan in epoch 1: .*diverged; give a smaller --lr"):
        training.run(0, Metrics(None, False), Silent(), lambda _: None)


def test_more_devices_than_there_are():
    with pytest.raises(UserError, match=r"--devices 99: there are .*; use a number from 1"):
        devices.choose(99)


def test_other_processes_are_found_by_the_environment(monkeypatch):
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: asked.append(given))
    devices.connect()
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    devices.connect()
    assert asked == [
        {"num_processes": None, "process_id": None},
        {"num_processes": 4, "process_id": 1},
    ]
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(UserError, match=r"--distributed: the other processes were not found"):
        devices.connect()


def test_each_process_loads_its_share(monkeypatch):
    place = devices.choose(1)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    shares = []
    for index in range(4):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        shares += range(12)[place.rows(12)]
    assert shares == list(range(12))


@pytest.mark.parametrize("method", SUPPORTED)
def test_every_method_can_be_trained_by(method, images):
    """Traced, not run: what it computes is the library's business."""
    options = {name: float(option.default) for name, option in SUPPORTED[method].options.items()}
    rho = options.pop("rho", None)
    problem, extent, _, state = prepare(
        images, method=method, rho=rho, hyperparameters=options, trace=True
    )
    batch = jnp.zeros((16, 8, 8, 3), jnp.uint8), jnp.zeros(16, jnp.int32)
    new, metrics = jax.eval_shape(
        step.train_step(problem, extent.seed, extent.groups), state, *batch
    )
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert jax.tree.all(jax.tree.map(same, new, state))
    assert set(metrics) == {"train_loss", "train_accuracy"}
