"""The compiled training of several seeds against straightforward loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sam_optax
from sam_optax.experiments import data, evaluation, models, task, training
from sam_optax.experiments.family import DEFAULT, METHODS

pytestmark = pytest.mark.slow

EPOCHS, BATCH = 2, 12


class Recorder:
    def __init__(self):
        self.programs, self.pieces = [], []

    def compiling(self, what, number, count):
        self.programs.append((number, count))

    def done(self, kind, seconds):
        assert seconds > 0
        self.pieces.append(kind)


@pytest.fixture(scope="module")
def small_task(archive):
    dataset = data.load(f"npz:{archive}")
    return task.Task(
        dataset=dataset,
        model=models.build("mlp", dataset.x_train.shape[1:], dataset.classes),
        seeds=(3, 4),
        epochs=EPOCHS,
        batch_size=BATCH,
        label_noise=0.25,
        base={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        sharpness_rho=0.3,
    )


def train(small_task, chosen):
    recorder = Recorder()
    return training.train(small_task, chosen, recorder), recorder


@pytest.fixture(scope="module")
def first_run(small_task):
    return train(small_task, {name: METHODS[name].variant() for name in DEFAULT})


@pytest.fixture(scope="module")
def second_run(small_task):
    return train(
        small_task, {"sam": METHODS["sam"].variant(rho=0.0), "rsam": METHODS["rsam"].variant()}
    )


@pytest.fixture(scope="module")
def outcomes(first_run):
    return first_run[0]


def perturbation(name, seed):
    """Each method as a user would write it, with the table's values."""
    h = METHODS[name].variant().hyperparameters
    key = jax.random.fold_in(jax.random.key(seed), 1)
    return {
        "sgd": lambda: None,
        "sam": lambda: sam_optax.sam(h["rho"]),
        "asam": lambda: sam_optax.asam(h["rho"], h["eta"]),
        "rsam": lambda: sam_optax.rsam(h["rho"], h["gamma"], h["lmbda"], key=key),
        "fsam": lambda: sam_optax.fsam(h["rho"], h["sigma"], h["lmbda"]),
    }[name]()


def loop(small_task, name, seed):
    """Final params, training loss and test accuracy of one seed, step by step."""
    dataset, model = small_task.dataset, small_task.model
    y = data.corrupt(dataset.y_train, 0.25, 3, np.random.default_rng([seed, 0]))
    params = model.init(jax.random.fold_in(jax.random.key(seed), 0), dataset.x_train[:1])
    steps = EPOCHS * (40 // BATCH)
    base = optax.chain(
        optax.add_decayed_weights(0.01),
        optax.trace(0.9),
        optax.scale_by_schedule(lambda t: -0.1 * 0.5 * (1 + jnp.cos(jnp.pi * t / steps))),
    )
    method = perturbation(name, seed)
    tx = base if method is None else sam_optax.sharpness_aware(base, method)
    state = tx.init(params)

    def loss(params, x, y):
        logits = model.apply(params, x)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

    @jax.jit
    def step(params, state, x, y):
        grad_fn = jax.grad(loss)
        if method is None:
            updates, state = tx.update(grad_fn(params, x, y), state, params)
        else:
            updates, state = tx.update(None, state, params, grad_fn=lambda p: grad_fn(p, x, y))
        return optax.apply_updates(params, updates), state

    for epoch in range(EPOCHS):
        order = np.random.default_rng([seed, 1, epoch]).permutation(40)
        for batch in (order[i : i + BATCH] for i in range(0, 36, BATCH)):
            params, state = step(params, state, dataset.x_train[batch], y[batch])
    predicted = np.argmax(model.apply(params, dataset.x_test), -1)
    return params, loss(params, dataset.x_train, y), np.mean(predicted == dataset.y_test)


@pytest.mark.parametrize("name", DEFAULT)
def test_a_seed_of_a_method_is_a_straightforward_loop(small_task, outcomes, name):
    params, loss, accuracy = loop(small_task, name, seed=4)
    outcome = outcomes[name]
    for ours, theirs in zip(jax.tree.leaves(outcome.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours[1], theirs, rtol=1e-4, atol=1e-5)
    assert outcome.train_loss.shape == outcome.test_accuracy.shape == (EPOCHS, 2)
    np.testing.assert_allclose(outcome.train_loss[-1, 1], loss, rtol=1e-4)
    np.testing.assert_allclose(outcome.test_accuracy[-1, 1], accuracy, rtol=1e-6)


def test_methods_and_seeds_differ(outcomes):
    finals = [o.train_loss[-1, i] for o in outcomes.values() for i in range(2)]
    assert len({float(f) for f in finals}) == len(finals)


def test_the_seeds_are_the_same_for_all_methods(second_run, outcomes):
    """SAM with radius 0 is SGD, if it starts, shuffles and corrupts alike."""
    outcome = second_run[0]["sam"]
    np.testing.assert_array_equal(outcome.train_loss, outcomes["sgd"].train_loss)
    jax.tree.map(np.testing.assert_array_equal, outcome.params, outcomes["sgd"].params)


def test_the_same_command_gives_the_same_numbers(second_run, outcomes):
    again = second_run[0]["rsam"]
    np.testing.assert_array_equal(again.train_loss, outcomes["rsam"].train_loss)
    np.testing.assert_array_equal(again.sharpness, outcomes["rsam"].sharpness)
    jax.tree.map(np.testing.assert_array_equal, again.params, outcomes["rsam"].params)


def test_the_announced_work_is_the_work_done(small_task, first_run, second_run):
    for outcomes, recorder in (first_run, second_run):
        announced = training.work(small_task, {name: METHODS[name].variant() for name in outcomes})
        pieces = {kind: recorder.pieces.count(kind) for kind in recorder.pieces}
        assert pieces == {kind: count for kind, (_, count) in announced.items()}
        count = len(recorder.programs)
        assert recorder.programs == [(i + 1, count) for i in range(count)]


def test_step_costs_are_relative_to_sgd_even_where_it_is_not_compared(first_run, second_run):
    assert first_run[0]["sgd"].cost == 1
    for outcomes, _ in (first_run, second_run):
        assert all(0 < outcome.cost < np.inf for outcome in outcomes.values())
    assert "sgd" not in second_run[0]


def test_batched_seeds_are_seeds_in_turn(small_task, outcomes, monkeypatch):
    monkeypatch.setattr(training, "over_seeds", jax.vmap)
    batched = train(small_task, {"sgd": METHODS["sgd"].variant()})[0]["sgd"]
    np.testing.assert_allclose(batched.train_loss, outcomes["sgd"].train_loss, rtol=1e-4)


def test_every_epoch_visits_an_example_at_most_once(small_task):
    first, second = (task.batch_indices(small_task, epoch) for epoch in range(2))
    assert first.shape == (2, 3, BATCH)
    for seed in range(2):
        assert len(np.unique(first[seed])) == 36
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])


def test_a_rise_of_the_loss_that_is_not_known_is_nan(small_task):
    chosen = {name: METHODS[name].variant() for name in ("sam", "rsam")}
    outcomes = training.train(small_task, chosen, Recorder(), watch=True)
    seen = {name: outcome.watched for name, outcome in outcomes.items()}
    assert set(seen["sam"]) == set(sam_optax.StepInfo._fields) - {"loss_known"}
    assert np.all(np.isfinite(seen["sam"]["loss_rise"]))
    assert np.all(np.isnan(seen["rsam"]["loss_rise"]))  # its ascent starts elsewhere


def test_sharpness_is_the_rise_along_the_full_gradient(small_task, outcomes):
    params = jax.tree.map(lambda leaf: leaf[0], outcomes["sam"].params)
    y = task.corrupted_labels(small_task)[0]
    x = small_task.dataset.x_train

    def loss(p):
        logits = small_task.model.apply(p, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    before, grads = value_and_grad(params)
    scale = 0.3 / np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    rise = value_and_grad(jax.tree.map(lambda p, g: p + scale * g, params, grads))[0] - before
    assert rise > 0
    np.testing.assert_allclose(outcomes["sam"].sharpness[0], rise, rtol=1e-3)


@pytest.mark.parametrize("block", [1, 7, 39, 40, 500])
def test_blocks_do_not_change_the_measures(small_task, monkeypatch, block):
    model, dataset = small_task.model, small_task.dataset
    params = model.init(jax.random.key(0), dataset.x_train[:1])

    def measures():
        train = evaluation.blocks(dataset.x_train, dataset.y_train)
        test = evaluation.blocks(dataset.x_test, dataset.y_test)
        found = evaluation.evaluate(model, params, train, test)
        return found["train_loss"], found["test_accuracy"]

    whole = measures()
    monkeypatch.setattr(evaluation, "_BLOCK", block)
    np.testing.assert_allclose(measures(), whole, rtol=1e-5)


def test_cost_is_the_median_ratio_after_the_warm_up():
    assert training.relative_cost([9, 4, 6, 60], [1, 2, 2, 3]) == pytest.approx(3)
    assert training.relative_cost([3], [2]) == pytest.approx(1.5)
    assert training.relative_cost([9, 2, 4], [1, 1]) == pytest.approx(2)
