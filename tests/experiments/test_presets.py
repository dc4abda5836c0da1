"""Presets and options: what the papers print, and where each value is said to be from."""

import dataclasses
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

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.describe import describe
from sam_optax.experiments.options.options import DEFAULTS, OF_OTHERS, Compare
from sam_optax.experiments.options.presets import PRESETS
from sam_optax.experiments.options.resolve import CHOSEN_HERE, RECIPE, SHARED, resolve
from sam_optax.experiments.training.task import Recipe


def options(preset=None, **given):
    dataset = {"dataset": "hf:cifar10"} if preset else {}
    return Compare(preset=preset, **{**dataset, **given})


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


# Read off the papers: what all methods share, and the row of each.
ASAM = {
    **{"batch_size": 128, "m": 128, "momentum": 0.9, "weight_decay": 5e-4, "lr": 0.1},
    **{"schedule": "cosine", "crop": 4, "flip": True, "label_smoothing": 0.1},
    **{"optimizer": "sgd", "model": "wrn28_10", "label_noise": 0.0},
}
IMAGENET = {**ASAM, "model": "resnet50_imagenet", "batch_size": 512, "lr": 0.2, "crop": 0}
IMAGENET |= {"weight_decay": 1e-4}
RSAM = {"epochs": 200, "batch_size": 128, "m": 128, "model": "resnet18", "optimizer": "sgd"}
VIT = {"epochs": 300, "batch_size": 4096, "m": 4096, "optimizer": "adamw", "image_size": 224}
FSAM = {"epochs": 200, "lr": 0.05, "schedule": "cosine", "momentum": 0.9, "flip": True}
FSAM |= {"model": "resnet18", "optimizer": "sgd"}
TRANSFER = {"epochs": 10, "batch_size": 128, "lr": 1e-4, "weight_decay": 1e-5}
TRANSFER |= {"model": "vit_s16", "optimizer": "adamw", "image_size": 224}
FSAM_METHODS = ("sam", "fsam", "sam_full", "sam_db", "sam_noise", "sam_batches")
PRINTED = {
    "asam-cifar10": (
        {**ASAM, "epochs": 200},
        {"sgd": {"epochs": 400}, "sam": {"rho": 0.05}, "asam": {"rho": 0.5, "eta": 0.01}},
    ),
    "asam-cifar100": (
        {**ASAM, "epochs": 200},
        {"sgd": {"epochs": 400}, "sam": {"rho": 0.1}, "asam": {"rho": 1.0, "eta": 0.01}},
    ),
    "asam-imagenet": (
        {**IMAGENET, "epochs": 100},
        {
            "sgd": {"epochs": 200, "m": 512},
            "sam": {"rho": 0.05, "m": 128},
            "asam": {"rho": 1.0, "eta": 0.01, "m": 128},
        },
    ),
    "asam-noisy-cifar10": (
        {**ASAM, "model": "resnet32", "label_noise": 0.4, "epochs": 200},
        {"sgd": {"epochs": 400}, "sam": {"rho": 0.05}, "asam": {"rho": 0.5}},
    ),
    "asam-correlation-cifar10": (
        {**ASAM, "model": "wrn16_8", "epochs": 200, "batch_size": 256, "m": 256},
        {"sgd": {}},
    ),
    "rsam-cifar10": (RSAM, {"sgd": {}, "sam": {}, "rsam": {}}),
    "rsam-cifar100": (RSAM, {"sgd": {}, "sam": {}, "rsam": {}}),
    "rsam-vit-s16": ({**VIT, "model": "vit_s16"}, {"sgd": {}, "sam": {}, "rsam": {}}),
    "rsam-vit-b16": ({**VIT, "model": "vit_b16"}, {"sgd": {}, "sam": {}, "rsam": {}}),
    "fsam-cifar10": (
        {**FSAM, "weight_decay": 1e-3},
        {"sgd": {"weight_decay": 5e-4}, **{name: {"rho": 0.1} for name in FSAM_METHODS}},
    ),
    "fsam-cifar100": (
        {**FSAM, "weight_decay": 1e-3},
        {"sgd": {"weight_decay": 5e-4}, **{name: {"rho": 0.2} for name in FSAM_METHODS}},
    ),
    "fsam-transfer": (TRANSFER, {"sgd": {}, **{name: {"rho": 0.075} for name in FSAM_METHODS}}),
}


def test_every_preset_is_checked_here():
    assert {*PRINTED} == {*PRESETS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_method_has_its_row_of_the_papers_table(name):
    common, rows = PRINTED[name]
    found = resolved(name, methods=tuple(PRESETS[name].rows))
    assert found.keys() == rows.keys()
    for method, row in found.items():
        values = {k: value for k, (value, _) in row["settings"].items()} | row["hyperparameters"]
        assert {**values, **common, **rows[method]} == values


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_says_where_and_what_is_not_says_so(name):
    preset, found = PRESETS[name], resolved(name)
    places = {preset.source, *preset.places.values()}
    assert not preset.printed.keys() & preset.stand_ins.keys()
    assert preset.places.keys() <= preset.printed.keys()
    assert (preset.printed.keys() | preset.stand_ins.keys()) <= {*RECIPE, *SHARED}
    assert [*found] == [*(preset.methods or preset.rows)]
    for method, row in found.items():
        printed = {**preset.printed, **preset.rows[method]}
        for setting in (*RECIPE, *SHARED):
            value, source = row["settings"][setting]
            if setting == "dataset":
                assert source == f"given; the paper's is {preset.data}"
            elif setting in printed:
                assert source.split(", but ")[0].removesuffix(" (the whole batch)") in places
                assert value == printed[setting] or setting == "m"
            elif setting in preset.stand_ins:
                assert (value, source) == (preset.stand_ins[setting], CHOSEN_HERE)
            else:
                assert source.startswith("not mentioned; default")
        for option, source in row["sources"].items():
            if option not in printed and not source.startswith("default of sam_optax"):
                assert source == CHOSEN_HERE
                assert option in preset.stand_in_rows[method]


def test_a_method_that_is_not_in_the_table_has_its_own_defaults_in_the_papers_setting():
    found = resolved("asam-cifar10", methods=("rsam", "sgd"))
    assert found["rsam"]["settings"]["epochs"] == (200, "ASAM, section 5.2")
    assert found["sgd"]["settings"]["epochs"][0] == 400
    assert found["rsam"]["hyperparameters"]["rho"] == 0.05
    assert found["rsam"]["sources"]["rho"] == "default of sam_optax.rsam"
    # All but the radius, which is to be given.
    found = resolved(
        "asam-cifar10", methods=("looksam",), hyperparameters={"looksam": {"rho": (1,)}}
    )
    assert found["looksam"]["hyperparameters"] == {"rho": 1, "k": 5, "alpha": 0.7}
    assert found["looksam"]["sources"] == {"rho": "given", "k": CHOSEN_HERE, "alpha": CHOSEN_HERE}


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
        "asam-cifar10", lr=0.05, cutout=8, epochs=7, hyperparameters={"asam": {"rho": (2.0,)}}
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
        decay = METHODS[name].weight_decay or DEFAULTS["weight_decay"]
        expected = {**DEFAULTS, "m": 100, "weight_decay": decay}
        assert {k: row["settings"][k][0] for k in DEFAULTS} == expected
        sources = {"default", "default (the whole batch)", "default, chosen on digits"}
        assert {source for _, source in row["settings"].values()} <= sources
        assert {*row["sources"].values()} <= {"default, chosen on digits"}
        assert row["hyperparameters"] == METHODS[name].variant().hyperparameters


def test_several_values_are_rows_of_their_own():
    given = {"rsam": {"rho": (0.1, 0.2), "gamma": (0.3, 0.4)}, "sam": {"rho": (0.7,)}}
    found = resolved(methods=("sam", "rsam"), hyperparameters=given)
    assert [*found] == [
        "sam",
        "rsam rho 0.1 gamma 0.3",
        "rsam rho 0.1 gamma 0.4",
        "rsam rho 0.2 gamma 0.3",
        "rsam rho 0.2 gamma 0.4",
    ]
    last = found["rsam rho 0.2 gamma 0.4"]
    assert last["hyperparameters"] == {"rho": 0.2, "gamma": 0.4, "lmbda": 2.0}
    chosen = "default, chosen on digits"
    assert last["sources"] == {"rho": "given", "gamma": "given", "lmbda": chosen}


@pytest.mark.parametrize("preset", [None, "asam-cifar10"])
def test_what_has_no_default_is_passed_on_where_it_is_given(preset):
    assert "p" not in resolved(preset, methods=("asam",))["asam"]["hyperparameters"]
    given = {"asam": {"p": (2.0, math.inf), "normalize_biases": (True,)}}
    found = resolved(preset, methods=("asam",), hyperparameters=given)
    assert [*found] == ["asam p 2", "asam p inf"]
    values = found["asam p inf"]["hyperparameters"]  # plain data have no infinity
    assert (values["p"], values["normalize_biases"], values["eta"]) == ("inf", True, 0.01)
    assert "normalization" not in values


FIELDS = {field.name: field for field in dataclasses.fields(Compare)}


def test_every_setting_is_an_option_with_its_help():
    assert {*RECIPE, *SHARED} == set(DEFAULTS) <= FIELDS.keys()
    texts = [of.metadata["help"] for name, of in FIELDS.items() if name != "hyperparameters"]
    assert all(text.endswith(".") for text in texts)


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
    assert noise("npz:mine.npz") == noise("hf:mine") == OF_OTHERS["label_noise"] == 0.0


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


def test_groups_and_devices_share_a_batch_evenly(data):
    found = described(data, 4, m=8, epochs=7)
    assert (found["settings"]["batch_size"]["value"], found["settings"]["m"]["value"]) == (16, 8)
    (method,) = found["methods"]
    assert (method["epochs"], method["steps_per_epoch"], method["batch_size"]) == (7, 3, 16)
    assert found["dataset"]["train_examples"] == 48
    more = described(data, preset="asam-cifar10", methods=("sgd", "sam"))
    assert "epochs" not in more["settings"]  # where methods differ, each says its own
    assert [of["settings"]["epochs"]["value"] for of in more["methods"]] == [400, 200]


def test_radii_that_were_chosen_on_digits_are_said_to_be_on_other_data(data):
    """Case 48 of the collected mistakes: the radii of other data are to be found first."""
    digits = {"dataset": "digits"}
    assert described(data, **digits)["notes"] == []
    for task in ({}, {**digits, "label_noise": 0.2}, {**digits, "model": "cnn"}):
        (note,) = described(data, **task)["notes"]
        assert re.fullmatch(
            "The radii and weight decays of sam were chosen on digits with 40 % wrong labels, for "
            ".*: add --tune, which chooses .*, or give them, as in --sam.rho 0.25.",
            note,
        )
    (note,) = described(data, tune=True)["notes"]
    assert note.startswith("--tune: radii, weight decays and stopping epochs are chosen")
    assert described(data, hyperparameters={"sam": {"rho": (0.2,)}})["notes"] == []
    assert described(data, methods=("sgd",))["notes"] == []


@pytest.mark.parametrize("method", ["asam", "gsam", "f_asam", "low_pass", "ssam_f"])
def test_the_value_that_the_note_suggests_can_be_given(data, method):
    (note,) = described(data, methods=("sgd", method))["notes"]
    group, option, value = re.search(r"in --([\w-]+)\.([\w-]+) ([\d.]+)\.$", note).groups()
    name, option = group.replace("-", "_"), option.replace("-", "_")
    assert option in METHODS[name].radius
    assert resolved(methods=(method,), hyperparameters={name: {option: (float(value),)}})


def test_a_preset_says_what_is_chosen_here_and_what_differs(data):
    notes = described(data, preset="fsam-cifar10", methods=None)["notes"]
    assert notes[0] == (
        "Not printed in the paper, chosen here: crop 4, cutout 16, fsam's sigma 1, fsam's lmbda "
        "0.9."
    )
    assert set(PRESETS["fsam-cifar10"].differs) <= set(notes)
    assert not any("digits" in note for note in notes)


# What a recipe is.


def recipe(**given):
    values = {name: DEFAULTS[name] for name in RECIPE}
    return Recipe(**{**values, "m": 100, **given})


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
