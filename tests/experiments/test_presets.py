"""Presets and options: what the papers print, and where each value is said to be from."""

import dataclasses
import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.data.images import Examples
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.describe import describe
from sam_optax.experiments.options.hyperparameters import Hyperparameters
from sam_optax.experiments.options.options import DEFAULTS, OF_OTHERS, Compare
from sam_optax.experiments.options.presets import PRESETS
from sam_optax.experiments.options.resolve import CHOSEN_HERE, RECIPE, SHARED, resolve
from sam_optax.experiments.training.task import Recipe


def options(preset=None, hyperparameters=None, **given):
    """As from the command line; hyperparameters as ``{"sam": {"rho": (0.1,)}}``."""
    none = Hyperparameters()
    groups = {
        name: dataclasses.replace(getattr(none, name), **values)
        for name, values in (hyperparameters or {}).items()
    }
    dataset = {"dataset": "hf:cifar10"} if preset else {}
    return Compare(preset=preset, hyperparameters=Hyperparameters(**groups), **{**dataset, **given})


def row(preset, method, **given):
    """The settings of a method, with its hyperparameters."""
    found = resolve(options(preset, methods=(method,), **given))
    (one,) = found.rows.values()
    values = {name: setting.value for name, setting in {**found.shared, **one.settings}.items()}
    return {**values, **one.variant.hyperparameters}


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


def test_every_preset_is_checked_here():
    assert set(PRINTED) == set(PRESETS)
    assert {name: set(rows) for name, rows in PRINTED.items()} == {
        name: set(preset.rows) for name, preset in PRESETS.items()
    }


@pytest.mark.parametrize(
    ("preset", "method", "values"),
    [
        (preset, method, values)
        for preset, rows in PRINTED.items()
        for method, values in rows.items()
    ],
)
def test_a_method_has_its_row_of_the_papers_table(preset, method, values):
    found = row(preset, method)
    assert {name: found[name] for name in values} == values


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_says_where_and_what_is_not_says_so(name):
    preset, found = PRESETS[name], resolve(options(name))
    places = {preset.source, *preset.places.values()}
    assert not preset.printed.keys() & preset.stand_ins.keys()
    assert preset.places.keys() <= preset.printed.keys()
    assert (preset.printed.keys() | preset.stand_ins.keys()) <= {*RECIPE, *SHARED}
    assert tuple(found.rows) == (preset.methods or tuple(preset.rows))
    for method, one in found.rows.items():
        printed = {**preset.printed, **preset.rows[method]}
        for setting, (value, source) in {**found.shared, **one.settings}.items():
            if setting == "dataset":
                assert source == f"given; the paper's is {preset.data or 'not printed'}"
            elif setting in printed:
                assert source.split(", but ")[0].removesuffix(" (the whole batch)") in places
                assert value == printed[setting] or setting == "m"
            elif setting in preset.stand_ins:
                assert (value, source) == (preset.stand_ins[setting], "not printed; chosen here")
            else:
                assert source.startswith("not mentioned; default")
        for option, source in one.sources.items():
            if option not in printed and not source.startswith("default of sam_optax"):
                assert source == "not printed; chosen here"
                assert option in preset.stand_in_rows[method]


def test_a_method_that_is_not_in_the_table_has_its_own_defaults_in_the_papers_setting():
    found = resolve(options("asam-cifar10", methods=("rsam", "sgd")))
    assert found.rows["rsam"].settings["epochs"] == (200, "ASAM, section 5.2")
    assert found.rows["sgd"].settings["epochs"].value == 400
    assert found.rows["rsam"].variant.hyperparameters["rho"] == 0.05
    assert found.rows["rsam"].sources["rho"] == "default of sam_optax.rsam"
    theta = {"vasso": {"theta": (0.4,), "rho": (0.1,)}}
    vasso = row("fsam-cifar10", "vasso", hyperparameters=theta)
    assert vasso["weight_decay"] == 1e-3  # that of SAM's variants


def test_m_is_the_papers_and_else_the_whole_batch():
    """ASAM, section 5.2: 'm = 128 for both SAM and ASAM' on ImageNet, not employed on CIFAR."""

    def m(preset, method, **given):
        found = resolve(options(preset, methods=(method,), **given))
        return found.rows[method].settings["m"]

    source = "ASAM, section 5.2"
    assert m("asam-imagenet", "asam") == (128, source)
    assert m("asam-imagenet", "sam", batch_size=256) == (128, source)
    text = f"{source}, but sgd has no groups (the whole batch)"
    assert m("asam-imagenet", "sgd") == (512, text)
    assert m("asam-cifar10", "asam") == (128, f"{source} (the whole batch)")
    assert m("asam-cifar10", "asam", batch_size=96).value == 96
    assert m("rsam-vit-s16", "rsam") == (4096, "not mentioned; default (the whole batch)")
    assert m("asam-cifar10", "asam", m=32) == (32, "given; the paper's is the whole batch")
    assert m("asam-imagenet", "asam", m=64) == (64, "given; the paper's is 128")
    assert m(None, "sam") == (100, "default (the whole batch)")


def test_what_is_given_overrides_the_paper_and_says_what_the_papers_is():
    chosen = options(
        "asam-cifar10", lr=0.05, cutout=8, hyperparameters={"asam": {"rho": (2.0,)}, "sam": {}}
    )
    found = resolve(chosen)
    asam = found.rows["asam"]
    assert asam.settings["lr"] == (0.05, "given; the paper's is 0.1")
    assert asam.settings["cutout"] == (8, "given")
    assert asam.variant.hyperparameters == {"rho": 2.0, "eta": 0.01}
    assert asam.sources["rho"] == "given; the paper's is 0.5"
    assert asam.sources["eta"] == "ASAM, section 5.2"
    for method in found.rows.values():  # of all methods, whatever their rows say
        assert method.settings["lr"].value == 0.05
    found = resolve(options("asam-cifar10", epochs=7))
    assert found.rows["sgd"].settings["epochs"] == (7, "given; the paper's is 400")
    assert found.rows["sam"].settings["epochs"] == (7, "given; the paper's is 200")


def test_without_a_preset_the_default_is_a_demonstration_on_digits():
    found = resolve(options())
    assert tuple(found.rows) == ("sgd", "sam", "asam", "rsam", "fsam")
    for name, one in found.rows.items():
        settings = {**found.shared, **one.settings}
        decay = METHODS[name].weight_decay or DEFAULTS["weight_decay"]
        expected = {**DEFAULTS, "m": 100, "weight_decay": decay}
        assert {k: s.value for k, s in settings.items()} == expected
        sources = {"default", "default (the whole batch)", "default, chosen on digits"}
        assert {s.source for s in settings.values()} <= sources
        assert set(one.sources.values()) <= {"default, chosen on digits"}
        assert one.variant == METHODS[name].variant()


def test_several_values_are_rows_of_their_own():
    rho, gamma = (0.1, 0.2), (0.3, 0.4)
    given = {"rsam": {"rho": rho, "gamma": gamma}, "sam": {"rho": (0.7,)}}
    found = resolve(options(methods=("sam", "rsam"), hyperparameters=given))
    assert list(found.rows) == [
        "sam",
        "rsam rho 0.1 gamma 0.3",
        "rsam rho 0.1 gamma 0.4",
        "rsam rho 0.2 gamma 0.3",
        "rsam rho 0.2 gamma 0.4",
    ]
    last = found.rows["rsam rho 0.2 gamma 0.4"]
    assert last.variant.hyperparameters == {"rho": 0.2, "gamma": 0.4, "lmbda": 2.0}
    assert last.sources == {"rho": "given", "gamma": "given", "lmbda": "default, chosen on digits"}


def test_what_has_no_default_is_passed_on_where_it_is_given():
    assert "p" not in resolve(options(methods=("asam",))).rows["asam"].variant.hyperparameters
    given = {"asam": {"p": (2.0, math.inf), "normalize_biases": (True,)}}
    for preset in (None, "asam-cifar10"):
        found = resolve(options(preset, methods=("asam",), hyperparameters=given))
        assert list(found.rows) == ["asam p 2", "asam p inf"]
        values = found.rows["asam p inf"].variant.hyperparameters
        assert (values["p"], values["normalize_biases"], values["eta"]) == (math.inf, True, 0.01)
        assert "normalization" not in values


def test_a_preset_lacks_nothing_but_the_radius_of_a_method_that_its_paper_does_not_have():
    given = {"looksam": {"rho": (0.1,)}}
    found = resolve(options("asam-cifar10", methods=("looksam",), hyperparameters=given))
    (row,) = found.rows.values()
    assert row.variant.hyperparameters == {"rho": 0.1, "k": 5, "alpha": 0.7}
    assert row.sources == {"rho": "given", "k": CHOSEN_HERE, "alpha": CHOSEN_HERE}


WRONG = {
    "no data": ({"preset": "asam-cifar10", "dataset": None}, "asam-cifar10: needs the data; give"),
    "groups": ({"batch_size": 60, "m": 25}, "--m 25: does not divide the batch size, 60; .* as 20"),
    "large groups": ({"m": 10**9}, "--m 10+: does not divide the batch size, 100; .*, such as 100"),
    "no value": (
        {"preset": "asam-cifar10", "methods": ("gsam",)},
        "--preset asam-cifar10: has no value of rho_max for gsam; give --gsam.rho-max",
    ),
    "no radius": (
        {"preset": "asam-cifar10", "methods": ("looksam",)},
        "--preset asam-cifar10: has no value of rho for looksam; give --looksam.rho",
    ),
    "unused": (
        {"methods": ("sgd",), "hyperparameters": {"f_asam": {"eta": (0.1,)}}},
        "--f-asam.eta: f_asam is not trained; name it in --methods, or leave",
    ),
    "twice": (
        {"hyperparameters": {"sam": {"rho": (0.1, 0.1)}}},
        "--sam.rho: sam rho 0.1 is given twice",
    ),
    "none": ({"hyperparameters": {"sam": {"rho": ()}}}, "--sam.rho: no value is given; give one"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_told(given, message):
    with pytest.raises(UserError, match=message):
        resolve(options(**given))


OUT_OF_RANGE = {
    "--seeds 0: use an integer of at least 1, below": {"seeds": 0},
    "--seed-offset -1: use an integer of at least 0": {"seed_offset": -1},
    "--batch-size 0: use an integer of at least 1": {"batch_size": 0},
    "--m 0: use an integer of at least 1": {"m": 0},
    "--crop -1: use an integer of at least 0": {"crop": -1},
    r"--label-noise -0.1: use a number in \[0, 1\)": {"label_noise": -0.1},
    "--label-noise nan: use a number in": {"label_noise": math.nan},
    "--lr inf: use a number above 0": {"lr": math.inf},
    r"--momentum 1: use a number in \[0, 1\)": {"momentum": 1.0},
    r"--label-smoothing 1: use a number in \[0, 1\)": {"label_smoothing": 1.0},
    "--weight-decay -1: use a number of at least 0": {"weight_decay": -1.0},
    "--clip nan: use a number of at least 0": {"clip": math.nan},
    "--mixup inf: use a number of at least 0": {"mixup": math.inf},
    "--sharpness-rho 0: use a number above 0": {"sharpness_rho": 0.0},
    "--optimizer x: unknown; use one of sgd, rmsprop, adam, adamw.": {"optimizer": "x"},
    "--schedule x: unknown; use one of cosine, con": {"schedule": "x"},
    "--dtype float8: unknown; did you mean float32": {"dtype": "float8"},
    "--preset x: unknown; use one of asam-cifar10, ": {"preset": "x"},
}


@pytest.mark.parametrize(("message", "given"), OUT_OF_RANGE.items(), ids=OUT_OF_RANGE)
def test_values_out_of_range_are_refused_with_what_to_use(message, given):
    with pytest.raises(UserError, match=f"^{message}"):
        options(**given)


def test_every_setting_is_an_option_with_its_help():
    fields = {field.name: field.metadata for field in dataclasses.fields(Compare)}
    assert {*RECIPE, *SHARED} == set(DEFAULTS) <= fields.keys()
    assert all(of["help"].endswith(".") for name, of in fields.items() if name != "hyperparameters")


def test_labels_of_a_user_s_data_are_not_changed_by_default():
    noise = lambda dataset: resolve(options(dataset=dataset)).shared["label_noise"].value
    assert (noise(None), noise("mnist5k")) == (0.4, 0.4)
    assert noise("npz:mine.npz") == noise("hf:mine") == OF_OTHERS["label_noise"] == 0.0


@pytest.mark.parametrize("preset", [None, "rsam-cifar10"])
def test_another_optimizer_needs_a_learning_rate(preset):
    """Case 83 of the collected mistakes: 0.1 was chosen for SGD."""
    with pytest.raises(
        UserError, match=r"--optimizer adamw: .* 0.1, was chosen for sgd; give --lr"
    ):
        resolve(options(preset, optimizer="adamw"))
    assert resolve(options(preset, optimizer="adamw", lr=1e-3))
    assert resolve(options(preset, optimizer="sgd"))
    assert resolve(options("rsam-vit-s16", optimizer="adamw"))


def test_the_documentation_lists_every_preset():
    page = pathlib.Path(__file__).parents[2] / "docs" / "experiments.md"
    named = set(
        re.findall(r"`(\w+(?:-\w+)*-(?:cifar100?|imagenet|[sb]16|transfer))`", page.read_text())
    )
    assert named == set(PRESETS)


# How much of it: --scale, --m and devices.


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    train, test = (
        Examples(rng.random((n, 2, 2, 1), np.float32), rng.integers(0, 5, n, np.int32))
        for n in (1000, 100)
    )
    return Dataset("x", train, test, 5, None, None, "")


def described(data, devices=1, **given):
    chosen = options(**{"methods": ("sam",), **given})
    full = {"train": len(data.train.y), "test": len(data.test.y)}
    return describe(chosen, resolve(chosen), data.some(chosen.scale), full, devices)


def test_at_full_size_nothing_is_said_to_be_scaled(data):
    found = described(data, batch_size=64, epochs=7)
    (method,) = found["methods"]
    assert (method["epochs"], method["steps_per_epoch"], method["batch_size"]) == (7, 15, 64)
    assert not any("scaled" in setting["source"] for setting in found["settings"].values())
    assert not any("Scaled" in note for note in found["notes"])
    assert found["dataset"]["train_examples"] == 1000


def test_a_run_that_is_scaled_down_says_so(data):
    given = {"batch_size": 64, "epochs": 200, "warmup_steps": 300, "scale": 0.05}
    found = described(data, 8, **given)
    # 10 epochs of one step of 48, the largest multiple of 8 devices in 50 examples; the warm-up is
    # a tenth of the steps, as 300 of 200 · 15 are.
    assert {name: found["settings"][name] for name in ("epochs", "batch_size", "warmup_steps")} == {
        "epochs": {"value": 10, "source": "given; scaled down from 200"},
        "batch_size": {"value": 48, "source": "given; scaled down from 64"},
        "warmup_steps": {"value": 1, "source": "given; scaled down from 300"},
    }
    assert found["notes"][0] == (
        "Scaled down (--scale 0.05): 50 of 1,000 training examples, 5 of 100 test examples. Do "
        "not compare the accuracy with the paper's."
    )
    assert found["dataset"]["train_examples"] == 50


def test_methods_are_scaled_from_their_own_rows(data):
    found = described(data, preset="asam-cifar10", methods=None, scale=0.1)
    assert [method["epochs"] for method in found["methods"]] == [40, 20, 20]
    assert "epochs" not in found["settings"]  # where methods differ, each says its own
    assert found["methods"][0]["settings"]["epochs"] == {
        "value": 40,
        "source": "ASAM, section 5.2; scaled down from 400",
    }


def test_groups_and_devices_share_a_batch_evenly(data):
    found = described(data, 8, batch_size=64, m=16)
    assert (found["settings"]["batch_size"]["value"], found["settings"]["m"]["value"]) == (64, 16)
    # 50 examples for 4 groups on 4 devices: 3 of each device in a group.
    found = described(data, 4, batch_size=64, m=16, epochs=20, scale=0.05)
    assert found["settings"]["batch_size"]["value"] == 48
    assert found["settings"]["m"] == {"value": 12, "source": "given; scaled down from 16"}


TOO_SMALL = {
    "batch": ({"batch_size": 1001}, 1, "--batch-size 1001: there are 1000 training examples; use"),
    "devices": ({"batch_size": 60}, 8, "--batch-size 60: 8 devices share each batch; use a mul"),
    "groups": ({"batch_size": 64, "m": 4}, 8, "--m 4: 8 devices share each group .* multiple of 8"),
    "scale": ({"scale": 0.001}, 8, "--scale 0.001: leaves 1 training examples, too few for 8 dev"),
    "scaled groups": ({"batch_size": 64, "m": 8, "scale": 0.05}, 8, "leaves 50 .* 8 groups"),
}


@pytest.mark.parametrize(("given", "devices", "message"), TOO_SMALL.values(), ids=TOO_SMALL)
def test_what_cannot_be_shared_is_told(data, given, devices, message):
    with pytest.raises(UserError, match=message):
        described(data, devices, **given)


# Notes: what a reader of the results should know.


def test_radii_that_were_chosen_on_digits_are_said_to_be_on_other_data(data):
    """Case 48 of the collected mistakes: the radii of other data are to be found first."""
    digits = dataclasses.replace(data, name="digits")
    assert described(digits)["notes"] == []
    for task in ((data, {}), (digits, {"label_noise": 0.2}), (digits, {"model": "cnn"})):
        (note,) = described(task[0], **task[1])["notes"]
        assert note.startswith(
            "The radii and weight decays of sam were chosen on digits with 40 % wrong labels, for "
        )
        assert note.endswith(
            "add --tune, which chooses them on held-out examples, or give them, "
            "as in --sam.rho 0.25."
        )
    (note,) = described(data, tune=True)["notes"]
    assert note.startswith("--tune: radii, weight decays and stopping epochs are chosen")
    assert described(data, hyperparameters={"sam": {"rho": (0.2,)}})["notes"] == []
    asam = {"methods": ("asam",), "hyperparameters": {"asam": {"rho": (0.2,)}}}
    assert described(data, **asam)["notes"] == []
    assert described(data, methods=("sgd",))["notes"] == []


@pytest.mark.parametrize("method", ["asam", "gsam", "f_asam", "low_pass", "ssam_f"])
def test_the_value_that_the_note_suggests_can_be_given(data, method):
    (note,) = described(data, methods=("sgd", method))["notes"]
    group, option, value = re.search(r"in --([\w-]+)\.([\w-]+) ([\d.]+)\.$", note).groups()
    name, option = group.replace("-", "_"), option.replace("-", "_")
    assert option in METHODS[name].radius
    found = options(hyperparameters={name: {option: (float(value),)}})
    assert len(resolve(dataclasses.replace(found, methods=(method,))).rows) == 1


def test_a_preset_says_what_is_chosen_here_and_what_differs(data):
    notes = described(data, preset="fsam-cifar10", methods=None, batch_size=100)["notes"]
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
