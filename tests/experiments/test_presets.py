"""Presets and options: what the papers print, and where each value is said to be from."""

import itertools
import math
import pathlib
import re
import typing

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tasks

from sam_optax.__main__ import main
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import registry
from sam_optax.experiments.named import short
from sam_optax.experiments.options import presets
from sam_optax.experiments.options.describe import describe
from sam_optax.experiments.options.options import DEFAULTS, Compare
from sam_optax.experiments.options.presets import CHOSEN_HERE, PRESETS
from sam_optax.experiments.options.resolve import resolve
from sam_optax.experiments.training.task import Recipe


@pytest.fixture(autouse=True)
def _where_the_presets_find_methods(monkeypatch):
    monkeypatch.chdir(tasks.FILE.parents[1])


def options(preset=None, **given):
    needed = {"dataset": "hf:cifar10"} if preset else {}
    if preset and PRESETS[preset].give:
        needed["model"] = "net.py:net"
    return Compare(preset=preset, **{**needed, **given})


def resolved(preset=None, **given):
    """The methods by name, each with all its settings as ``(value, source)``."""
    run = resolve(options(preset, **given))
    return {
        row["name"]: {
            **row,
            "settings": {
                k: (*of.values(),) for k, of in (run["settings"] | row["settings"]).items()
            },
        }
        for row in run["methods"]
    }


NETS, MORE = "notebooks/networks.py", "notebooks/methods.py"
# Read off the papers: (preset, method, some of its values).
OF_PAPERS = [
    ("asam-cifar10", "sgd", {"epochs": 400, "batch_size": 128, "lr": 0.1, "weight_decay": 5e-4}),
    ("asam-cifar10", "sam", {"epochs": 200, "rho": 0.05, "label_smoothing": 0.1, "crop": 4}),
    ("asam-cifar10", "asam", {"rho": 0.5, "eta": 0.01, "model": f"{NETS}:wrn28_10", "flip": True}),
    ("asam-cifar100", "asam", {"rho": 1.0, "eta": 0.01, "schedule": "cosine"}),
    ("asam-imagenet", "sam", {"rho": 0.05, "m": 128, "lr": 0.2, "epochs": 100}),
    ("asam-imagenet", "sgd", {"epochs": 200, "batch_size": 512, "weight_decay": 1e-4}),
    ("asam-noisy-cifar10", "asam", {"rho": 0.5, "label_noise": 0.4, "model": f"{NETS}:resnet32"}),
    ("asam-correlation-cifar10", "sgd", {"batch_size": 256, "model": f"{NETS}:wrn16_8"}),
    ("rsam-cifar10", "rsam", {"epochs": 200, "batch_size": 128, "model": f"{NETS}:resnet18"}),
    ("rsam-vit-b16", "rsam", {"epochs": 300, "batch_size": 4096, "optimizer": "adamw"}),
    ("fsam-cifar10", "sgd", {"weight_decay": 5e-4, "lr": 0.05, "momentum": 0.9}),
    ("fsam-cifar10", f"{MORE}:sam_noise", {"weight_decay": 1e-3, "rho": 0.1}),
    ("fsam-cifar100", "fsam", {"weight_decay": 1e-3, "rho": 0.2}),
    ("fsam-transfer", f"{MORE}:sam_db", {"rho": 0.075, "lr": 1e-4, "epochs": 10}),
    ("fsam-transfer", "fsam", {"weight_decay": 1e-5}),
]


@pytest.mark.parametrize(("name", "method", "values"), OF_PAPERS)
def test_values_are_those_of_the_paper(name, method, values):
    row = resolved(name, methods=(method,))[short(method)]
    found = {k: value for k, (value, _) in row["settings"].items()} | row["hyperparameters"]
    assert {**found, **values} == found


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_and_says_where_its_values_are_from(name, capsys):
    preset = PRESETS[name]
    assert preset.shared.keys() <= DEFAULTS.keys()
    by_source = presets._extended(name)["shared"].values()
    assert sum(map(len, by_source)) == len(preset.shared)  # each value has one source
    for method, row in preset.rows.items():
        assert row.keys() <= {*DEFAULTS, *registry.get(method).options}
    data = ["--dataset", "hf:nowhere", *(["--model", "f.py:f"] if preset.give else [])]
    assert main(["compare", "--preset", name, *data, "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    rows = [preset.shared, *(preset.rows[of] for of in preset.methods if of in preset.rows)]
    found = [of for row in rows for of in row.values()]
    for part in (*(of.source for of in found), *preset.differs, *preset.methods):
        assert part in text
    assert preset.shared["dataset"].value in text
    chosen = any(of.source == CHOSEN_HERE for of in found)
    assert (CHOSEN_HERE in text) == ("Not printed in the paper, chosen here: " in text) == chosen


def test_a_method_that_is_not_in_the_table_has_the_papers_setting_and_needs_a_radius():
    """Case 83 of the collected mistakes: its other hyperparameters have defaults."""
    given = {"looksam.rho": (1,)}
    found = resolved("asam-cifar10", methods=("looksam",), hyperparameters=given)["looksam"]
    assert found["settings"]["epochs"] == (200, "ASAM, section 5.2")
    assert found["hyperparameters"] == {"rho": 1, "k": 5, "alpha": 0.7}
    assert found["sources"] == {"rho": "given", "k": CHOSEN_HERE, "alpha": CHOSEN_HERE}


M_SOURCE = "ASAM, section 5.2"
WHOLE = " (the whole batch)"
GROUPS = [  # ASAM: 'm = 128 for both SAM and ASAM' on ImageNet, not employed on CIFAR
    ("asam-imagenet", "asam", {}, 128, M_SOURCE),
    ("asam-imagenet", "sam", {"batch_size": 256}, 128, M_SOURCE),
    ("asam-imagenet", "sgd", {}, 512, f"{M_SOURCE}, but sgd has no groups{WHOLE}"),
    ("asam-imagenet", "asam", {"m": 64}, 64, "given; the paper's is 128"),
    ("asam-cifar10", "asam", {"batch_size": 96}, 96, M_SOURCE + WHOLE),
    ("asam-cifar10", "asam", {"m": 32}, 32, "given; the paper's is the whole batch"),
    ("rsam-vit-s16", "rsam", {}, 4096, f"not mentioned; default{WHOLE}"),
    (None, "sam", {}, 100, f"default{WHOLE}"),
]


@pytest.mark.parametrize(("preset", "method", "given", "m", "source"), GROUPS)
def test_m_is_the_papers_and_else_the_whole_batch(preset, method, given, m, source):
    found = resolved(preset, methods=(method,), **given)
    assert found[method]["settings"]["m"] == (m, source)


def test_what_is_given_overrides_the_paper_and_says_what_the_papers_is():
    found = resolved(
        "asam-cifar10", lr=0.05, cutout=8, epochs=7, hyperparameters={"asam.rho": (2.0,)}
    )
    asam = found["asam"]
    assert asam["settings"]["cutout"] == (8, "given")
    assert asam["hyperparameters"] == {"rho": 2.0, "eta": 0.01}
    assert asam["sources"] == {"rho": "given; the paper's is 0.5", "eta": "ASAM, section 5.2"}
    for row in found.values():  # whatever their rows say
        assert row["settings"]["lr"] == (0.05, "given; the paper's is 0.1")
        assert row["settings"]["epochs"] == (7, "given; the paper's is 400")


def test_without_a_preset_the_default_is_a_demonstration_on_digits():
    found = resolved()
    assert [*found] == ["sgd", "sam", "asam", "rsam", "fsam"]
    for name, row in found.items():
        decay = registry.get(name).weight_decay or DEFAULTS["weight_decay"]
        expected = {**DEFAULTS, "m": 100, "weight_decay": decay}
        assert {k: row["settings"][k][0] for k in DEFAULTS} == expected
        assert row["hyperparameters"] == registry.get(name).variant().hyperparameters
        assert {*row["sources"].values()} <= {"default, chosen on digits"}


def test_every_number_has_a_range():
    kinds = typing.get_type_hints(Compare)
    for name, wrong in {int: (-1, 2**31), float: (-1.0, math.nan, math.inf)}.items():
        names = [k for k, kind in kinds.items() if kind in (name, name | None)]
        assert len(names) > 5
        for field, value in itertools.product(names, wrong):
            with pytest.raises(UserError, match=f"^--{field.replace('_', '-')} .*: use a"):
                options(**{field: value})


def test_labels_of_a_user_s_data_are_not_changed_by_default():
    noise = lambda dataset: resolved(dataset=dataset)["sam"]["settings"]["label_noise"][0]
    assert (noise(None), noise("mnist5k")) == (0.4, 0.4)
    assert noise("npz:mine.npz") == noise("hf:mine") == 0.0


@pytest.mark.parametrize("preset", [None, "rsam-cifar10"])
def test_another_optimizer_needs_a_learning_rate(preset):
    """Case 83 of the collected mistakes: 0.1 was chosen for SGD."""
    with pytest.raises(UserError, match=r"--optimizer adamw: .* 0.1, was chosen for sgd; give --l"):
        resolve(options(preset, optimizer="adamw"))
    assert resolve(options(preset, optimizer="adamw", lr=1e-3))
    assert resolve(options(preset, optimizer="sgd"))
    assert resolve(options("rsam-vit-s16", optimizer="adamw"))


def test_the_documentation_lists_every_preset():
    page = pathlib.Path(__file__).parents[2] / "docs" / "experiments.md"
    named = re.findall(r"`(\w+(?:-\w+)*-(?:cifar100?|imagenet|[sb]16|transfer))`", page.read_text())
    assert {*named} == {*PRESETS}


# What the data add: whether they can be shared, and notes.


@pytest.fixture(scope="module")
def data():
    return tasks.images()


def described(data, devices=1, preset=None, **given):
    given = {"methods": ("sam",), "dataset": data.name, "batch_size": 16, **given}
    chosen = options(preset, **given)
    return describe(chosen, resolve(chosen), data, devices)


def test_a_description_counts_steps_and_examples(data):
    found = described(data, 4, m=8, epochs=7)
    (method,) = found["methods"]
    assert (method["epochs"], method["steps_per_epoch"], method["batch_size"]) == (7, 3, 16)
    assert found["dataset"]["train_examples"] == 48
    more = described(data, preset="asam-cifar10", methods=("sgd", "sam"))
    assert "epochs" not in more["settings"]  # where methods differ, each says its own
    assert [of["settings"]["epochs"]["value"] for of in more["methods"]] == [400, 200]
    resized = described(data, preset="asam-imagenet", m=16)["settings"]["image_size"]
    assert resized["value"] == 224  # asked for by nobody, of data that need no resizing


def test_radii_that_were_chosen_on_digits_are_said_to_be_on_other_data(data):
    """Case 48 of the collected mistakes: the radii of other data are to be found first."""
    digits = {"dataset": "digits"}
    assert described(data, **digits)["notes"] == []
    for task in ({}, {**digits, "label_noise": 0.2}, {**digits, "model": "cnn"}):
        (note,) = described(data, **task)["notes"]
        assert re.fullmatch(
            "The radii and weight decays of sam were chosen on digits with 40 % wrong labels, for "
            ".*: add --tune, which chooses .*, or give them.",
            note,
        )
    (note,) = described(data, tune=True)["notes"]
    assert note.startswith("--tune: radii, weight decays and stopping epochs are chosen")
    (note,) = described(data, tune=True, tune_lr=True)["notes"]
    assert note.startswith("--tune: radii, learning rates, weight decays and stopping epochs are")
    assert described(data, hyperparameters={"sam.rho": (0.2,)})["notes"] == []
    assert described(data, methods=("sgd",))["notes"] == []


# What a recipe is.


def recipe(**given):
    values = {name: DEFAULTS[name] for name in Recipe.__dataclass_fields__}
    return Recipe(**{**values, "epochs": 1, "batch_size": 1, "m": 1, **given})


def test_the_learning_rate_rises_and_falls():
    rate = recipe(lr=0.3, warmup_steps=20).base(100).learning_rate
    for step, value in {0: 0.0, 10: 0.15, 20: 0.3, 60: 0.15, 100: 0.0}.items():
        np.testing.assert_allclose(rate(step), value, atol=1e-7)
    assert recipe(lr=0.3, schedule="constant").base(100).learning_rate(99) == np.float32(0.3)


DECAY = optax.add_decayed_weights(0.5)
BASES = {
    "adamw": ({}, optax.adamw(0.1, b1=0.8, weight_decay=0.5)),
    "adam": ({"beta2": 0.98}, optax.chain(DECAY, optax.adam(0.1, b1=0.8, b2=0.98))),
    "rmsprop": ({}, optax.chain(DECAY, optax.rmsprop(0.1, momentum=0.8))),
    "sgd": (
        {"nesterov": True, "clip": 1.0},
        optax.chain(
            optax.clip_by_global_norm(1.0), DECAY, optax.sgd(0.1, momentum=0.8, nesterov=True)
        ),
    ),
}


@pytest.mark.parametrize("name", BASES)
def test_base_optimizers_are_those_of_optax(name):
    """For some steps on ½ w²."""

    def trained(tx):
        w = jnp.array([3.0, -1.0])
        state = tx.init(w)
        for _ in range(3):
            updates, state = tx.update(w, state, w)
            w = optax.apply_updates(w, updates)
        return w

    given, expected = BASES[name]
    ours = {"lr": 0.1, "schedule": "constant", "momentum": 0.8, "weight_decay": 0.5, **given}
    base = recipe(optimizer=name, **ours).base(10)
    np.testing.assert_array_equal(trained(base.tx), trained(expected))


def test_what_goes_along_the_momentum_averages_gradients_where_the_optimizer_does_not():
    def decay(**given):
        return recipe(**given).base(10).decay

    assert decay(optimizer="sgd") is decay(optimizer="adam", momentum=0.0) is None
    assert decay(optimizer="adamw") is None
    assert decay(optimizer="sgd", momentum=0.0) == 0.0
    assert decay(optimizer="rmsprop", momentum=0.8) == 0.8
