"""m-sharpness: what a group is, what its step computes, and what it leaves to the devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import prepare, train

import sam_optax
from sam_optax import MomentumStartState
from sam_optax.experiments.collectives import collectives
from sam_optax.experiments.papers import architectures, feed, optimizer, step
from sam_optax.experiments.papers.loop import Training
from sam_optax.experiments.papers.options import SUPPORTED, UNGROUPED

pytestmark = pytest.mark.slow


class Dense(nn.Module):
    """Without BatchNorm."""

    classes: int
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, *, train):
        return nn.Dense(self.classes)(nn.tanh(nn.Dense(8)(x.reshape(len(x), -1))))


@pytest.fixture(autouse=True)
def dense(monkeypatch):
    """``--model dense``."""
    known = architectures.Architecture(Dense, "for tests")
    monkeypatch.setitem(architectures.ARCHITECTURES, "dense", known)


def compiled(images, count, **options):
    problem, extent, place, state = prepare(images, count, **options)
    return Training(problem, extent, place, state)._step.as_text()


@pytest.mark.parametrize("model", ["dense", "flat"])
def test_a_step_is_a_hand_written_loop_over_the_groups(model, images):
    """With ``flat``, each group has its own BatchNorm statistics; all images mix before that."""
    groups = 4
    problem, extent, place, state = prepare(
        images, model=model, m=4, weight_decay=0.0, mixup=0.3, crop=1
    )
    assert extent.groups == groups
    batch = next(feed.training(extent, problem.dataset, place, 0))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), 0)
    x, y = step.augmented(problem, key, batch.images, batch.labels)

    @jax.jit
    def value_and_grad(params, x, y, labels):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = problem.model.apply(variables, x, train=True, mutable=["batch_stats"])
            accuracy = jnp.mean(logits.argmax(-1) == labels)
            loss = optax.softmax_cross_entropy(logits, y).mean()
            return loss, (new.get("batch_stats", {}), accuracy)

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    found = []
    for i in range(groups):
        part = tuple(array[i::groups] for array in (x, y, batch.labels))
        (loss, (stats, accuracy)), grads = value_and_grad(state.params, *part)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        perturbed = jax.tree.map(lambda w, g, n=norm: w + 0.05 * g / n, state.params, grads)
        found.append((value_and_grad(perturbed, *part)[1], stats, loss, accuracy))
    sharp, stats, loss, accuracy = jax.tree.map(lambda *leaves: sum(leaves) / groups, *found)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, state.params, sharp)

    run = jax.jit(step.train_step(problem, 0, groups))
    new, metrics = run(state, batch.images, batch.labels)
    np.testing.assert_allclose(metrics["train_loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["train_accuracy"], accuracy, rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)
    jax.tree.map(close, new.params, expected)
    jax.tree.map(close, new.batch_stats, stats)
    assert bool(new.batch_stats) == (model == "flat")


@pytest.mark.parametrize("m", [4, 8])
def test_the_number_of_devices_changes_nothing_but_rounding(m, images):
    options = {"crop": 1, "mixup": 0.3, "label_noise": 0.2, "m": m}
    (one, a), (four, b) = (train(images, count, **options) for count in (1, 4))
    for x, y in zip(jax.tree.leaves(one.state), jax.tree.leaves(four.state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(a[-1]["train_loss"], b[-1]["train_loss"], rtol=1e-5)


def test_no_example_travels(images):
    """What devices exchange is what they do without groups: gradients, BatchNorm's, mixup's."""
    whole, groups = (collectives(compiled(images, 4, crop=1, mixup=0.3, m=m)) for m in (None, 4))
    assert groups == whole
    assert groups["all-gather"] == 0 < groups["all-reduce"]


def test_one_group_is_the_step_without_groups(images):
    """To the letter: a hand-made optimizer, which knows of none, makes the same program."""

    def program(m, by_hand=False):
        problem, extent, _, state = prepare(images, trace=True, m=m)
        if by_hand:
            base = optimizer.base(problem.settings, extent).tx
            state = state.replace(tx=sam_optax.sharpness_aware(base, sam_optax.sam(0.05)))
        batch = jnp.zeros((16, 8, 8, 3), jnp.uint8), jnp.zeros(16, jnp.int32)
        run = jax.jit(step.train_step(problem, 0, extent.groups))
        return run.lower(state, *batch).as_text()

    assert program(None, by_hand=True) == program(None) == program(16) != program(8)


def test_another_m_is_another_training(images):
    (_, one), (_, two) = (train(images, m=m) for m in (None, 4))
    assert one[-1]["train_loss"] != pytest.approx(two[-1]["train_loss"], rel=1e-3)


def options_of(method):
    options = {name: float(option.default) for name, option in SUPPORTED[method].options.items()}
    return {"method": method, "rho": options.pop("rho", None), "hyperparameters": options}


@pytest.mark.parametrize("method", [m for m in SUPPORTED if m not in UNGROUPED])
def test_every_other_method_takes_groups(method, images):
    problem, extent, _, state = prepare(images, m=8, trace=True, **options_of(method))
    batch = jnp.zeros((16, 8, 8, 3), jnp.uint8), jnp.zeros(16, jnp.int32)
    new, metrics = jax.eval_shape(step.train_step(problem, 0, extent.groups), state, *batch)
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert jax.tree.all(jax.tree.map(same, new, state))
    assert metrics["train_loss"].shape == ()


def test_methods_without_groups_are_those_that_would_perturb_them_alike(images):
    alike = set()
    for method in SUPPORTED:
        opt_state = prepare(images, trace=True, **options_of(method))[-1].opt_state
        starts = jax.tree.leaves(opt_state, is_leaf=lambda s: isinstance(s, MomentumStartState))
        if not isinstance(opt_state, sam_optax.SharpnessAwareState) or any(
            isinstance(start, MomentumStartState) for start in starts
        ):
            alike.add(method)
    assert alike == set(UNGROUPED)
