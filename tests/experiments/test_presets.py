"""Presets and options: what the papers print, and where each value is said to be from."""

import dataclasses
import math
import pathlib
import re

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
IMAGENET |= {"weight_decay": 1e-4, "m": 512}
RSAM = {"epochs": 200, "batch_size": 128, "m": 128, "model": "resnet18", "optimizer": "sgd"}
VIT = {"epochs": 300, "batch_size": 4096, "m": 4096, "optimizer": "adamw", "image_size": 224}
FSAM = {"epochs": 200, "lr": 0.05, "schedule": "cosine", "momentum": 0.9, "flip": True}
FSAM |= {"model": "resnet18", "optimizer": "sgd"}
TRANSFER = {"epochs": 10, "batch_size": 128, "lr": 1e-4, "weight_decay": 1e-5}
TRANSFER |= {"model": "vit_s16", "optimizer": "adamw", "image_size": 224}
FSAM_METHODS = ("sam", "fsam", "sam_full", "sam_db", "sam_noise", "sam_batches")
PRINTED = {
    "asam-cifar10": {
        "sgd": {**ASAM, "epochs": 400},
        "sam": {**ASAM, "epochs": 200, "rho": 0.05},
        "asam": {**ASAM, "epochs": 200, "rho": 0.5, "eta": 0.01},
    },
    "asam-cifar100": {
        "sgd": {**ASAM, "epochs": 400},
        "sam": {**ASAM, "epochs": 200, "rho": 0.1},
        "asam": {**ASAM, "epochs": 200, "rho": 1.0, "eta": 0.01},
    },
    "asam-imagenet": {
        "sgd": {**IMAGENET, "epochs": 200},
        "sam": {**IMAGENET, "epochs": 100, "rho": 0.05, "m": 128},
        "asam": {**IMAGENET, "epochs": 100, "rho": 1.0, "eta": 0.01, "m": 128},
    },
    "asam-noisy-cifar10": {
        "sgd": {**ASAM, "model": "resnet32", "label_noise": 0.4, "epochs": 400},
        "sam": {**ASAM, "model": "resnet32", "label_noise": 0.4, "epochs": 200, "rho": 0.05},
        "asam": {**ASAM, "model": "resnet32", "label_noise": 0.4, "epochs": 200, "rho": 0.5},
    },
    "asam-correlation-cifar10": {
        "sgd": {**ASAM, "model": "wrn16_8", "epochs": 200, "batch_size": 256, "m": 256}
    },
    "rsam-cifar10": {"sgd": RSAM, "sam": RSAM, "rsam": RSAM},
    "rsam-cifar100": {"sgd": RSAM, "sam": RSAM, "rsam": RSAM},
    "rsam-vit-s16": {m: {**VIT, "model": "vit_s16"} for m in ("sgd", "sam", "rsam")},
    "rsam-vit-b16": {m: {**VIT, "model": "vit_b16"} for m in ("sgd", "sam", "rsam")},
    "fsam-cifar10": {
        "sgd": {**FSAM, "weight_decay": 5e-4},
        **{m: {**FSAM, "weight_decay": 1e-3, "rho": 0.1} for m in FSAM_METHODS},
    },
    "fsam-transfer": {m: {**TRANSFER, "rho": 0.075} for m in FSAM_METHODS} | {"sgd": TRANSFER},
    "fsam-cifar100": {
        "sgd": {**FSAM, "weight_decay": 5e-4},
        **{m: {**FSAM, "weight_decay": 1e-3, "rho": 0.2} for m in FSAM_METHODS},
    },
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_method_has_its_row_of_the_papers_table(name):
    assert PRINTED[name].keys() == PRESETS[name].rows.keys()
    for method, values in PRINTED[name].items():
        (row,) = resolved(name, methods=(method,)).values()
        found = {k: value for k, (value, _) in row["settings"].items()} | row["hyperparameters"]
        assert {k: found[k] for k in values} == values


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


WRONG = {
    "no data": ({"preset": "asam-cifar10", "dataset": None}, "asam-cifar10: needs the data; give"),
    "groups": ({"batch_size": 60, "m": 25}, "--m 25: does not divide the batch size, 60; .* as 20"),
    "large groups": ({"m": 10**9}, "--m 10+: does not divide the batch size, 100; .*, such as 100"),
    "no value": (
        {"preset": "asam-cifar10", "methods": ("gsam",)},
        "--preset asam-cifar10: has no value of rho_max for gsam; give --gsam.rho-max",
    ),
    "unused": (
        {"methods": ("sgd",), "hyperparameters": {"f_asam": {"eta": (0.1,)}}},
        "--f-asam.eta: f_asam is not trained; name it in --methods, or leave",
    ),
    "twice": ({"hyperparameters": {"sam": {"rho": (0.1, 0.1)}}}, "--sam.rho 0.1 0.1: .* twice"),
    "none": ({"hyperparameters": {"sam": {"rho": ()}}}, "--sam.rho: no value is given; give one"),
    "seeds": ({"seeds": 0}, "--seeds 0: use an integer of at least 1, below"),
    "offset": ({"seed_offset": -1}, "--seed-offset -1: use an integer of at least 0"),
    "batch": ({"batch_size": 0}, "--batch-size 0: use an integer of at least 1"),
    "no examples": ({"m": 0}, "--m 0: use an integer of at least 1"),
    "crop": ({"crop": -1}, "--crop -1: use an integer of at least 0"),
    "noise": ({"label_noise": math.nan}, r"--label-noise nan: use a number in \[0, 1\)"),
    "rate": ({"lr": math.inf}, "--lr inf: use a number above 0"),
    "momentum": ({"momentum": 1.0}, r"--momentum 1: use a number in \[0, 1\)"),
    "smoothing": ({"label_smoothing": 1.0}, r"--label-smoothing 1: use a number in \[0, 1\)"),
    "decay": ({"weight_decay": -1.0}, "--weight-decay -1: use a number of at least 0"),
    "clip": ({"clip": math.nan}, "--clip nan: use a number of at least 0"),
    "mixup": ({"mixup": math.inf}, "--mixup inf: use a number of at least 0"),
    "radius": ({"sharpness_rho": 0.0}, "--sharpness-rho 0: use a number above 0"),
    "optimizer": ({"optimizer": "x"}, "--optimizer x: unknown; use one of sgd, rmsprop, adam, a"),
    "schedule": ({"schedule": "x"}, "--schedule x: unknown; use one of cosine, con"),
    "dtype": ({"dtype": "float8"}, "--dtype float8: unknown; did you mean float32"),
    "preset": ({"preset": "x"}, "--preset x: unknown; use one of asam-cifar10, "),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_told(given, message):
    with pytest.raises(UserError, match=message):
        resolve(options(**given))


def test_every_setting_is_an_option_with_its_help():
    fields = {field.name: field.metadata for field in dataclasses.fields(Compare)}
    assert {*RECIPE, *SHARED} == set(DEFAULTS) <= fields.keys()
    assert all(of["help"].endswith(".") for name, of in fields.items() if name != "hyperparameters")


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


UNSUITED = {
    "batch": ({"batch_size": 49}, 1, "--batch-size 49: there are 48 training examples; use at mo"),
    "devices": ({"batch_size": 12}, 8, "--batch-size 12: 8 devices share each batch; use a mul"),
    "groups": ({"m": 4}, 8, "--m 4: 8 devices share each group .* multiple of 8"),
    "size": ({"image_size": 64}, 1, "--image-size 64: needs --dataset hf:NAME_OR_PATH, not images"),
    "beta2": ({"beta2": 0.9}, 1, "--beta2 0.9: is for --optimizer adam and adamw, not sgd; leave"),
    "nesterov": (
        {"optimizer": "adam", "lr": 0.1, "nesterov": True},
        1,
        "--nesterov True: is for --optimizer sgd and rmsprop, not adam; leave it out",
    ),
    "pretrained": ({"preset": "fsam-transfer"}, 1, "--preset fsam-transfer: .* give --init FILE"),
}


@pytest.mark.parametrize(("given", "devices", "message"), UNSUITED.values(), ids=UNSUITED)
def test_what_does_not_suit_the_data_is_told(data, given, devices, message):
    with pytest.raises(UserError, match=message):
        described(data, devices, **given)


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


BASES = {
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.3},
        optax.adamw(0.1, b1=0.8, weight_decay=0.3),
    ),
    "adam": (
        {"optimizer": "adam", "beta2": 0.98, "weight_decay": 0.3},
        optax.chain(optax.add_decayed_weights(0.3), optax.adam(0.1, b1=0.8, b2=0.98)),
    ),
    "rmsprop": (
        {"optimizer": "rmsprop", "weight_decay": 0.5},
        optax.chain(optax.add_decayed_weights(0.5), optax.rmsprop(0.1, momentum=0.8)),
    ),
    "sgd": (
        {"optimizer": "sgd", "nesterov": True, "weight_decay": 0.5, "clip": 1.0},
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.add_decayed_weights(0.5),
            optax.sgd(0.1, momentum=0.8, nesterov=True),
        ),
    ),
}


@pytest.mark.parametrize(("given", "expected"), BASES.values(), ids=BASES)
def test_base_optimizers_are_those_of_optax(given, expected):
    """For some steps on ½ w²."""

    def trained(tx):
        w = jnp.array([3.0, -1.0])
        state = tx.init(w)
        for _ in range(3):
            updates, state = tx.update(w, state, w)
            w = optax.apply_updates(w, updates)
        return w

    base = recipe(lr=0.1, schedule="constant", momentum=0.8, **given).base(10)
    np.testing.assert_array_equal(trained(base.tx), trained(expected))


def test_what_goes_along_the_momentum_averages_gradients_where_the_optimizer_does_not():
    def decay(**given):
        return recipe(**given).base(10).decay

    assert decay(optimizer="sgd") is decay(optimizer="adam", momentum=0.0) is None
    assert decay(optimizer="adamw") is None
    assert decay(optimizer="sgd", momentum=0.0) == 0.0
    assert decay(optimizer="rmsprop", momentum=0.8) == 0.8
