"""Presets and options: what the papers print, and where each value is said to be from."""

import dataclasses
import inspect
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import optimizer, plan, presets, settings
from sam_optax.experiments.papers.images import ArrayImages, ImageDataset
from sam_optax.experiments.papers.options import Hyperparameters, Train

PRESETS = presets.PRESETS


def resolve(preset=None, dataset="digits", **options):
    hyperparameters = {k: options.pop(k) for k in list(options) if hasattr(Hyperparameters(), k)}
    some = Hyperparameters(**hyperparameters)
    given = None if preset is None and dataset == "digits" else dataset
    return settings.resolve(Train(preset=preset, dataset=given, hyperparameters=some, **options))


# Read off the papers: epochs, batch size, learning rate, weight decay, rho.
PRINTED = {
    "sgd-cifar10": (400, 128, 0.1, 5e-4, None),
    "sam-cifar10": (200, 128, 0.1, 5e-4, 0.05),
    "asam-cifar10": (200, 128, 0.1, 5e-4, 0.5),
    "sam-cifar100": (200, 128, 0.1, 5e-4, 0.1),
    "asam-cifar100": (200, 128, 0.1, 5e-4, 1.0),
    "asam-imagenet": (100, 512, 0.2, 1e-4, 1.0),
    "sam-imagenet": (100, 512, 0.2, 1e-4, 0.05),
    "fsam-cifar10": (200, None, 0.05, 1e-3, 0.1),
    "fsam-cifar100": (200, None, 0.05, 1e-3, 0.2),
    "rsam-cifar10": (200, 128, None, None, None),
    "rsam-vit-s16": (300, 4096, None, None, None),
    "rsam-vit-b16": (300, 4096, None, None, None),
}


@pytest.mark.parametrize(("name", "values"), PRINTED.items(), ids=PRINTED)
def test_printed_values(name, values):
    names = ("epochs", "batch_size", "lr", "weight_decay", "rho")
    for setting, value in zip(names, values, strict=True):
        assert PRESETS[name].printed.get(setting) == value
        if value is not None:
            found = resolve(name).table[setting]
            assert found.value == value
            assert found.source in (PRESETS[name].source, *PRESETS[name].places.values())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_complete_and_says_what_is_not_printed(name):
    preset = PRESETS[name]
    found = resolve(name)
    assert not preset.printed.keys() & preset.stand_ins.keys()
    assert (preset.printed.keys() | preset.stand_ins.keys()) <= found.table.keys()
    assert preset.places.keys() <= preset.printed.keys()
    for setting in preset.stand_ins:
        assert found.table[setting].source == "not printed; chosen here"
    from_defaults = [s for s, v in found.table.items() if v.source.startswith("default of")]
    assert not from_defaults  # what a method needs is printed or chosen, never left to chance


def test_the_documentation_lists_every_preset():
    page = pathlib.Path(__file__).parents[3] / "docs" / "experiments.md"
    named = set(re.findall(r"`(\w+(?:-\w+)*-(?:cifar100?|imagenet|[sb]16))`", page.read_text()))
    assert named == set(PRESETS)


def test_options_override_a_preset():
    found = resolve("asam-cifar10", lr=0.05, rho=2.0, cutout=8)
    assert found.table["lr"] == (0.05, "given; the paper's is 0.1")
    assert found.table["rho"] == (2.0, "given; the paper's is 0.5")
    assert found.table["cutout"] == (8, "given")
    assert found.hyperparameters == {"rho": 2.0, "eta": 0.01}


def test_another_method_does_not_inherit_the_preset_s_radius():
    found = resolve("asam-cifar10", method="sam")
    assert found.table["rho"] == (0.05, "default of sam_optax.sam")
    assert found.table["lr"].value == 0.1


def test_defaults_are_a_demonstration():
    found = resolve()
    sources = {name: setting.source for name, setting in found.table.items()}
    assert sources.pop("m") == "default (the whole batch)"
    assert set(sources.values()) == {"default"}
    assert found["method"] == "sam"


def test_m_is_the_paper_s_and_else_the_whole_batch():
    """ASAM, section 5.2: 'm = 128 for both SAM and ASAM' on ImageNet, not employed on CIFAR."""
    printed = {
        name: preset.printed["m"] for name, preset in PRESETS.items() if "m" in preset.printed
    }
    assert {name for name, m in printed.items() if m != presets.WHOLE_BATCH} == {
        "sam-imagenet",
        "asam-imagenet",
    }
    source = "ASAM, section 5.2"
    assert resolve("asam-imagenet").table["m"] == (128, source)
    assert resolve("sam-imagenet", batch_size=256).table["m"] == (128, source)
    assert resolve("asam-cifar10").table["m"] == (128, f"{source} (the whole batch)")
    assert resolve("asam-cifar10", batch_size=96).table["m"].value == 96
    assert resolve("rsam-vit-s16").table["m"] == (
        4096,
        "not mentioned; default (the whole batch)",
    )
    given = resolve("asam-cifar10", m=32).table["m"]
    assert given == (32, "given; the paper's is the whole batch")
    assert resolve("asam-imagenet", m=64).table["m"] == (64, "given; the paper's is 128")


def test_methods_without_groups_do_not_inherit_the_preset_s():
    found = resolve("asam-imagenet", method="momentum", rho=0.1, decay=0.9)
    text = "the paper's is 128, but momentum has no groups (the whole batch)"
    assert found.table["m"] == (512, text)
    assert resolve(method="sgd", m=64).table["m"] == (64, "given")  # the whole batch


WRONG = {
    "preset": ({"preset": "x"}, "--preset x: unknown preset; use one of sgd-cifar10"),
    "data": (
        {"preset": "asam-cifar10", "dataset": None},
        "needs the data; give --dataset cifar10:",
    ),
    "photographs": ({"preset": "rsam-vit-s16", "dataset": None}, r"give --dataset tfds:PATH"),
    "model": ({"model": "x"}, "--model x: unknown; use one of resnet20"),
    "method": ({"method": "esam"}, "--method esam: unknown; use one of sgd, sam"),
    "optimizer": ({"optimizer": "x"}, "--optimizer x: unknown; use one of sgd, adamw"),
    "epochs": ({"epochs": 0}, "--epochs 0: use a number of at least 1"),
    "rate": ({"lr": 0.0}, "--lr 0: use a number above 0"),
    "noise": ({"label_noise": 1.0}, r"--label-noise 1: use a number in \[0, 1\)"),
    "mixup": ({"mixup": float("nan")}, "--mixup nan: use a number of at least 0"),
    "hyperparameter": ({"method": "sam", "eta": 0.1}, "--eta 0.1: sam has no such hyperparameter"),
    "groups": ({"batch_size": 60, "m": 25}, "--m 25: does not divide the batch size, 60; .* as 20"),
    "no groups": ({"m": 0}, "--m 0: does not divide the batch size, 64; .*, such as 1"),
    "large groups": ({"m": 10**12}, "--m 10+: does not divide the batch size, 64; .*, such as 64"),
    "none to perturb": ({"method": "sgd", "m": 8}, "--m 8: sgd would perturb all groups"),
    "half": ({"method": "every", "k": 2.5, "rho": 0.1}, "--k 2.5: use an integer below 2"),
    "not a number": ({"method": "every", "k": float("nan"), "rho": 0.1}, "--k nan: use an integer"),
    "wide": (
        {"method": "every", "k": 2.0**31, "rho": 0.1},
        "--k 2.14748e.09: use an int",
    ),
    "no value": ({"method": "gsam"}, "--method gsam: has no value for rho_max; give --rho-max"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        resolve(**options)


def test_every_setting_is_an_option():
    names = {field.name for field in dataclasses.fields(Train)}
    assert settings._SETTINGS[0] == "dataset"
    assert set(settings._SETTINGS) <= names


def test_options_are_documented():
    source = inspect.getsource(Train)
    for field in dataclasses.fields(Train):
        part = source[source.index(f"    {field.name}: ") :]
        assert re.search(r"_arg\(|_setting\(", part[:300]) or '"""' in part[:300], field.name


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    train, test = (
        ArrayImages(rng.integers(0, 256, (n, 4, 4, 3), np.uint8), rng.integers(0, 5, n))
        for n in (1000, 100)
    )
    return ImageDataset("x", train, test, 5, 4, (0.5,) * 3, (0.2,) * 3, "")


def test_a_batch_of_more_examples_than_there_are(data):
    message = "--batch-size 1001: there are 1000 training examples; use at most as many"
    with pytest.raises(UserError, match=message):
        plan.make(resolve(batch_size=1001), data, 1.0, 0, 1)


def test_full_size(data):
    found = plan.make(resolve(batch_size=64, epochs=7), data, 1.0, 0, 1)
    assert found.shrunk == ()
    assert (found.epochs, found.steps_per_epoch, found.steps) == (7, 15, 105)
    np.testing.assert_array_equal(found.train, np.arange(1000))
    orders = [found.order(epoch) for epoch in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert np.any(orders[0] != orders[2])
    assert len(np.unique(orders[0])) == 960


def test_scaled_down_and_said_so(data):
    found = plan.make(resolve(batch_size=64, epochs=200, warmup_steps=300), data, 0.05, 0, 8)
    # 10 epochs of one step of 48, the largest multiple of 8 devices in 50 examples; the warm-up is
    # a tenth of the steps, as 300 of 200 · 15 are.
    assert (found.epochs, len(found.train), len(found.test)) == (10, 50, 5)
    assert (found.batch_size, found.warmup_steps) == (48, 1)
    assert found.shrunk == (
        "10 of 200 epochs",
        "50 of 1,000 training examples",
        "5 of 100 test examples",
        "48 of 64 examples in a batch",
        "1 of 300 warm-up steps",
    )


def test_groups(data):
    found = plan.make(resolve(batch_size=64, m=16), data, 1.0, 0, 8)
    assert (found.groups, found.batch_size, found.shrunk) == (4, 64, ())
    # 50 examples for 4 groups on 4 devices: 3 of each device in a group.
    found = plan.make(resolve(batch_size=64, m=16, epochs=20), data, 0.05, 0, 4)
    assert (found.groups, found.batch_size) == (4, 48)
    assert found.shrunk[3:] == (
        "48 of 64 examples in a batch",
        "12 of 16 examples that share a perturbation",
    )
    with pytest.raises(UserError, match=r"--m 4: 8 devices share each group .* a multiple of 8"):
        plan.make(resolve(batch_size=64, m=4), data, 1.0, 0, 8)
    with pytest.raises(UserError, match=r"leaves 50 .* 8 devices that share a batch of 8 groups"):
        plan.make(resolve(batch_size=64, m=8), data, 0.05, 0, 8)


def test_scales_that_are_none(data):
    for scale in (0.0, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"--scale .*: use a number in \(0, 1\]"):
            plan.make(resolve(), data, scale, 0, 1)
    with pytest.raises(UserError, match="leaves 1 training examples, fewer than the 8 devices"):
        plan.make(resolve(), data, 0.001, 0, 8)
    with pytest.raises(UserError, match="--batch-size 60: 8 devices share each batch"):
        plan.make(resolve(batch_size=60), data, 1.0, 0, 8)


def test_label_noise_makes_exactly_its_share_wrong(data):
    found = plan.make(resolve(label_noise=0.4), data, 1.0, 3, 1)
    assert np.count_nonzero(found.shift % 5) == 400
    assert found.shift.max() < 5
    again = plan.make(resolve(label_noise=0.4), data, 1.0, 3, 1)
    other = plan.make(resolve(label_noise=0.4), data, 1.0, 4, 1)
    np.testing.assert_array_equal(found.shift, again.shift)
    assert np.any(found.shift != other.shift)


def test_learning_rate(data):
    chosen = resolve(batch_size=100, epochs=10, warmup_steps=20, lr=0.3)
    rate = optimizer.schedule(chosen, plan.make(chosen, data, 1.0, 0, 1))
    expected = {0: 0.0, 10: 0.15, 20: 0.3, 60: 0.15, 100: 0.0}
    for step, value in expected.items():
        np.testing.assert_allclose(rate(step), value, atol=1e-7)
    flat = resolve(batch_size=100, epochs=10, schedule="constant", lr=0.3)
    assert optimizer.schedule(flat, plan.make(flat, data, 1.0, 0, 1))(99) == np.float32(0.3)


def test_base_optimizers(data):
    """Against optax's own, for some steps on ½ w²."""

    def trained(tx):
        w = jnp.array([3.0, -1.0])
        state = tx.init(w)
        for _ in range(3):
            updates, state = tx.update(w, state, w)
            w = optax.apply_updates(w, updates)
        return w

    common = {"lr": 0.1, "schedule": "constant", "momentum": 0.8}
    cases = [
        ({"optimizer": "adamw", "weight_decay": 0.3}, optax.adamw(0.1, b1=0.8, weight_decay=0.3)),
        (
            {"optimizer": "sgd", "nesterov": True, "weight_decay": 0.5, "clip": 1.0},
            optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.add_decayed_weights(0.5),
                optax.sgd(0.1, momentum=0.8, nesterov=True),
            ),
        ),
    ]
    for options, expected in cases:
        chosen = resolve(**common, **options)
        base = optimizer.base(chosen, plan.make(chosen, data, 1.0, 0, 1))
        np.testing.assert_array_equal(trained(base.tx), trained(expected))
