"""The trainer against straightforward loops: seeds, devices, groups, statistics, fed data."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tasks
from jax.flatten_util import ravel_pytree

import sam_optax
from sam_optax.experiments.data.dataset import from_arrays
from sam_optax.experiments.data.examples import corrupt
from sam_optax.experiments.methods import builtin
from sam_optax.experiments.networks import augmentation
from sam_optax.experiments.training import devices, measures, runner, task
from sam_optax.experiments.training import train as training

EPOCHS, BATCH = 2, 12
slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_fast")


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, rtol=2e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# Against loops of a user.


@pytest.fixture(scope="module")
def small(data):
    """SGD, SAM and a method that draws, from two seeds."""
    options = {"seeds": 2, "seed_offset": 3, "weight_decay": 0.01, "sharpness_rho": 0.3}
    options |= {"batch_size": BATCH, "label_noise": 0.25, "model": tasks.Flat(norm=False)}
    return tasks.make(from_arrays(**data), "sgd", "sam", "rsam", **options)


def some(small, *methods):
    """The same task with a part of its methods."""
    return dataclasses.replace(small, entries={name: small.entries[name] for name in methods})


@pytest.fixture(scope="module")
def outcomes(small):
    return tasks.run(small)


@slow
def test_a_seed_of_a_method_is_a_straightforward_loop(small, outcomes):
    (x, clean), test, seed = small.dataset.train, small.dataset.test, 4
    y = corrupt(clean, 0.25, 3, np.random.default_rng([seed, 0]))
    steps, key = EPOCHS * (40 // BATCH), jax.random.key(seed)
    base = optax.chain(
        optax.add_decayed_weights(0.01),
        optax.trace(0.9),
        optax.scale_by_schedule(lambda t: -0.1 * 0.5 * (1 + jnp.cos(jnp.pi * t / steps))),
    )
    h = builtin.rsam.variant().hyperparameters
    rsam = sam_optax.rsam(h["rho"], h["gamma"], h["lmbda"], key=jax.random.fold_in(key, 1))
    tx = sam_optax.sharpness_aware(base, rsam)

    def loss(params, x, y):
        logits = small.model.apply(params, x, train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params, state, x, y):
        updates, state = tx.update(None, state, params, grad_fn=lambda p: jax.grad(loss)(p, x, y))
        return optax.apply_updates(params, updates), state

    params = small.model.init(jax.random.fold_in(key, 0), x[:1], train=False)
    state = tx.init(params)
    for epoch in range(EPOCHS):
        order = np.random.default_rng([seed, 1, epoch]).permutation(40)
        for batch in (order[i : i + BATCH] for i in range(0, 36, BATCH)):
            params, state = step(params, state, x[batch], y[batch])
    accuracy = np.mean(np.argmax(small.model.apply(params, test.x, train=False), -1) == test.y)
    close(outcomes["rsam"].variables[seed], params, 1e-4, 1e-5)
    curves = outcomes["rsam"].curves
    assert curves["train_loss"].shape == curves["test_accuracy"].shape == (EPOCHS, 2)
    np.testing.assert_allclose(curves["train_loss"][-1, 1], loss(params, x, y), rtol=1e-4)
    np.testing.assert_allclose(curves["test_accuracy"][-1, 1], accuracy, rtol=1e-6)


@slow
def test_the_same_command_gives_the_same_numbers(small, outcomes):
    """Also in other company."""
    assert outcomes["sgd"].cost == 1
    for name, again in tasks.run(some(small, "sam", "rsam")).items():
        before = outcomes[name]
        assert np.isnan(again.cost)  # SGD is not trained
        assert again.curves.keys() == before.curves.keys()
        equal(again.curves, before.curves)
        equal((again.sharpness, again.variables), (before.sharpness, before.variables))


@slow
def test_sharpness_is_the_rise_along_the_full_gradient(small, outcomes):
    params = outcomes["sam"].variables[3]
    y = task.noisy_labels(small, (3,))[0]

    def loss(p):
        logits = small.model.apply(p, small.dataset.train.x, train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    before, grads = value_and_grad(params)
    scale = 0.3 / np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    rise = value_and_grad(jax.tree.map(lambda p, g: p + scale * g, params, grads))[0] - before
    assert rise > 0
    np.testing.assert_allclose(outcomes["sam"].sharpness[0], rise, rtol=1e-3)


@slow
@pytest.mark.parametrize("few", [False, True])
def test_mapped_seeds_are_seeds_in_turn_and_each_alone(small, outcomes, monkeypatch, few):
    """An accelerator has them batched, and large networks one after the other."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(devices, "SMALL", 0 if few else 2**24)
    chosen = some(small, "sgd", "rsam")
    (sgd, _) = training.Training(chosen, devices.choose(1)).runners
    assert len(sgd.states) == 1 + few
    found = tasks.run(chosen)
    for name, outcome in found.items():
        close(outcome.curves, {k: outcomes[name].curves[k] for k in outcome.curves}, 1e-4)
        close(outcome.variables, outcomes[name].variables, 1e-4)
        np.testing.assert_allclose(outcome.sharpness, outcomes[name].sharpness, rtol=1e-3)


@slow
def test_a_long_epoch_goes_by_in_stretches(small, outcomes, monkeypatch):
    """With a look at the clock after each, which changes nothing."""
    monkeypatch.setattr(runner, "STRETCH", 0.0)
    listener = tasks.Silent()
    found = tasks.run(some(small, "rsam"), listener=listener)["rsam"]
    equal(found.variables, outcomes["rsam"].variables)
    assert listener.pieces["rsam"] == pytest.approx(EPOCHS)


def test_cost_is_the_median_ratio_of_steps_after_the_warm_up():
    runner = lambda seconds, steps=1: SimpleNamespace(seconds=seconds, steps=steps)
    for ours, base, cost in (
        (runner([9, 4, 6, 60]), runner([1, 2, 2, 3]), 3),
        (runner([3]), runner([2]), 1.5),
        (runner([9, 4], steps=2), runner([1, 1]), 2),
    ):
        assert training.relative_cost(ours, base) == pytest.approx(cost)


@slow
def test_neither_blocks_nor_devices_that_share_them_change_the_measures(
    small, outcomes, monkeypatch
):
    monkeypatch.setattr(measures, "BLOCK", 7)
    found = measures.Evaluation(devices.Source(small, devices.choose(2)))
    expected = outcomes["rsam"]
    each = [jax.tree.map(lambda leaf: leaf[None], of) for of in expected.variables.values()]
    assert len(found._train[0]) == 6  # of 40 examples
    for name, values in found.after_epoch(each).items():
        np.testing.assert_allclose(values, expected.curves[name][-1], rtol=1e-5)
    np.testing.assert_allclose(found.sharpness(each), expected.sharpness, rtol=1e-3)


@slow
def test_what_has_diverged_is_nan_and_not_trained_on(small):
    sam = small.entries["sam"]
    hot = dataclasses.replace(sam, recipe=dataclasses.replace(sam.recipe, lr=1e38))
    listener = tasks.Silent()
    entries = {"sgd": small.entries["sgd"], "sam": hot}
    found = tasks.run(dataclasses.replace(small, entries=entries), listener=listener)
    lost, kept = (found[name].curves["train_loss"] for name in ("sam", "sgd"))
    assert lost.shape == (EPOCHS, 2)
    assert (np.isnan(lost).all(), np.isfinite(kept).all()) == (True, True)
    assert listener.pieces["sam"] == pytest.approx(1)


# Devices.


@slow
@pytest.mark.parametrize(("m", "counts"), [(16, (1, 4)), (8, (1, 2))])
def test_the_number_of_devices_changes_nothing_but_rounding(m, counts):
    """Batch statistics, augmentation, mixup and groups are of the whole batch."""
    options = {"crop": 1, "mixup": 0.3, "label_noise": 0.2, "m": m}
    one, several = (
        tasks.run(tasks.make(tasks.images(), "sam", count=count, **options), count)["sam"]
        for count in counts
    )
    close(several.variables, one.variables, 1e-4, 1e-5)
    close(several.curves, one.curves, 1e-4)
    np.testing.assert_allclose(several.sharpness, one.sharpness, rtol=1e-2)


# A step.


def first_pass(small, state, x, y, params):
    """New statistics and gradient, as a user would write them."""

    def loss_and_stats(params):
        variables = {"params": params, **state.rest}
        logits, new = small.model.apply(variables, x, train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy(logits, y).mean(), new.get("batch_stats", {})

    grads, stats = jax.jit(jax.grad(loss_and_stats, has_aux=True))(params)
    return stats, grads


def stepped(small, name, *keys):
    """State, batch as the network sees it without augmentation, and the new state for each key."""
    step, first, method_key = tasks.begin(small, name)
    state = jax.jit(first)()
    x, y = (part[:16] for part in small.dataset.train)
    data = small.dataset.train if small.entries[name].variant.method.needs_data else None
    run = jax.jit(lambda key: step(method_key, state, (x, y), key, data))
    found = [run(jax.random.key(key)) for key in keys or (7,)]
    x = augmentation.normalize(x, small.dataset.mean, small.dataset.std)
    return state, (x, jax.nn.one_hot(y, 3)), *found


PLAIN = {"weight_decay": 0.0, "lr": 0.1, "hyperparameters": {"sam.rho": (0.05,)}}


@slow
@pytest.mark.parametrize("name", ["esam", "sam_full"])
def test_gradients_of_a_method_s_own_leave_the_statistics_of_a_pass_at_the_params(name):
    small = tasks.make(tasks.images(), name, weight_decay=0.0)
    state, (x, y), new = stepped(small, name)
    stats, _ = first_pass(small, state, x, y, state.params)
    close(new.rest["batch_stats"], stats)


@slow
@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"m": 4, "mixup": 0.3, "crop": 1}])
def test_a_step_is_a_hand_written_loop_over_the_groups(options):
    """Case 20 of the collected mistakes: the second pass leaves the running statistics alone.

    Each group has its own statistics, and the running ones are their means.
    """
    groups = 16 // options.get("m", 16)
    small = tasks.make(tasks.images(), "sam", **PLAIN, **options)
    state, _, new = stepped(small, "sam")
    keys = jax.random.split(jax.random.fold_in(jax.random.key(7), 1), 4)
    x, labels = (jnp.asarray(part[:16]) for part in small.dataset.train)
    x = augmentation.crop(keys[0], x, 1) if "crop" in options else x
    x = augmentation.normalize(x, small.dataset.mean, small.dataset.std)
    y = optax.smooth_labels(jax.nn.one_hot(labels, 3), options.get("label_smoothing", 0))
    if "mixup" in options:
        x, y = augmentation.mixup(keys[3], x, y, 0.3)  # before the batch is parted
    found = []
    for i in range(groups):
        part = x[i::groups], y[i::groups]
        stats, grads = first_pass(small, state, *part, state.params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        point = jax.tree.map(lambda w, g, norm=norm: w + 0.05 * g / norm, state.params, grads)
        found.append((stats, first_pass(small, state, *part, point)[1]))
    stats, sharp = jax.tree.map(lambda *leaves: sum(leaves) / groups, *found)
    close(new.params, jax.tree.map(lambda w, g: w - 0.1 * g, state.params, sharp))
    close(new.rest["batch_stats"], stats)
    assert jax.tree.leaves(stats)


@slow
def test_augmentation_changes_with_the_step_and_is_the_same_for_both_passes():
    options = {"cutout": 4, "crop": 2, "flip": True, "mixup": 0.3, "weight_decay": 0.0}
    none = {"sam.rho": (0.0,)}
    small = tasks.make(tasks.images(), "sgd", "sam", hyperparameters=none, **options)
    _, _, *sgd = stepped(small, "sgd", 1, 1, 2)
    first, again, another = (ravel_pytree(state.params)[0] for state in sgd)
    equal(first, again)
    assert np.any(first != another)
    _, _, sam = stepped(small, "sam", 1)
    # With radius 0, if the second pass sees what the first has seen.
    close(sam.params, sgd[0].params)


# Every method.


def traced(name, **options):
    """A step traced, not run: what it computes is the library's business."""
    small = tasks.make(tasks.images(), name, **options)
    step, first, key = tasks.begin(small, name)
    state = jax.eval_shape(first)
    batch = small.dataset.train.x[:16], small.dataset.train.y[:16]
    new = jax.eval_shape(step, key, state, batch, key, small.dataset.train)
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert jax.tree.all(jax.tree.map(same, new, state))


@slow
@pytest.mark.parametrize("m", [16, 8])
@pytest.mark.parametrize("name", tasks.NAMES)
def test_every_method_trains(name, m):
    model = tasks.Flat(dtype=jnp.bfloat16)
    traced(name, m=m, crop=1, flip=True, cutout=2, label_smoothing=0.1, model=model)


@slow
@pytest.mark.parametrize(
    "recipe",
    [{"optimizer": "adam"}, {"optimizer": "adamw"}, {"optimizer": "rmsprop"}, {"momentum": 0.0}],
    ids=lambda recipe: next(iter(recipe.values())),
)
def test_every_base_optimizer_has_a_momentum_to_perturb_along(recipe):
    for name in ("momentum", "msam", "m_asam"):
        traced(name, clip=1.0, lr=0.1, **recipe)


def test_a_method_with_its_own_base_optimizer_is_told_of_the_task(data):
    """The weight decay and the number of examples to train on, as bSAM's prior needs them."""
    task = tasks.make(from_arrays(**data), "bsam", weight_decay=0.02)
    base = task.entries["bsam"].recipe.base(40)
    assert (base.weight_decay, base.examples) == (0.02, 40)


@slow
def test_sampa_has_the_batch_of_the_previous_step_as_it_was_seen():
    options = {"label_smoothing": 0.1, "weight_decay": 0.0, "lr": 0.1, "schedule": "constant"}
    options["hyperparameters"] = {"sampa.rho": (1.0,)}
    small = tasks.make(tasks.images(), "sampa", model=tasks.Flat(norm=False), **options)
    step, first, key = tasks.begin(small, "sampa")
    state, (x, y) = jax.jit(first)(), small.dataset.train
    start = state
    tx = sam_optax.simultaneous(optax.sgd(0.1, momentum=0.9), sam_optax.sam(1.0), 0.2)
    params, opt_state, before = state.params, tx.init(state.params), None
    for i in (0, 16, 32):
        batch = x[i : i + 16], y[i : i + 16]
        seen = augmentation.normalize(batch[0], small.dataset.mean, small.dataset.std)
        grad_fn = lambda p, seen=seen, y=batch[1]: first_pass(
            small, start, seen, optax.smooth_labels(jax.nn.one_hot(y, 3), 0.1), p
        )[1]
        given = {"grad_fn": grad_fn, "previous_grad_fn": before or grad_fn}
        updates, opt_state = tx.update(None, opt_state, params, **given)
        params, before = optax.apply_updates(params, updates), grad_fn
        state = jax.jit(step)(key, state, batch, jax.random.key(i), None)
        close(state.params, params)
        close(state.previous[0], seen)


def test_at_most_ten_thousand_training_examples_are_measured():
    """All of them, or else random ones that are the same in every run."""
    assert measures.measured(10_000).tolist() == [*range(10_000)]
    found = measures.measured(30_000)
    assert len({*found.tolist()}) == 10_000
    assert found.min() < 100
    assert found.max() > 29_900
    np.testing.assert_array_equal(found, measures.measured(30_000))
