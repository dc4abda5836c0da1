# ruff: noqa: RUF001 (the papers' Greek letters, in what is printed)
"""The papers' hyperparameters, each with the place where it is printed.

What a paper does not print is not given as if it were: it stands under ``stand_ins``, chosen here,
and every run with it says so. What this trainer does not do is listed under ``differs``.

The sources: ASAM is Kwon et al. 2021 (ICML version; *v1* is arXiv 2102.11600v1), R-SAM is Liu et
al. 2022, F-SAM is the supplement of Li et al. 2024, whose main text was not at hand.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import sam_optax

_ASAM = "ASAM, section 5.2"
_NOISE = "ASAM, section 5.4"
_V1 = "ASAM v1, appendix B"
_RSAM = "R-SAM, section 4"
_FSAM = "F-SAM, supplement A5.1"
_RSAM_DEFAULTS = {
    name: inspect.signature(sam_optax.rsam).parameters[name].default for name in ("gamma", "lmbda")
}
_RSAM_NOISE = (
    "γ and λ of the tables are not printed: they are the library's, with noise relative to each "
    "kernel and both terms of unit length, where the text prints a covariance and δ₀ + λĝ"
)


WHOLE_BATCH = "the whole batch"
"""The setting m of a run without m-sharpness, whatever its batch size."""


class Preset(NamedTuple):
    """An experiment of a paper.

    Attributes:
      title: what it is.
      data: the data set, to check what the user gives: ``"cifar10"``, ``"cifar100"`` or
        ``"imagenet2012"``.
      source: where the values of ``printed`` are printed, unless ``places`` says otherwise.
      printed: settings by name.
      places: of single settings, where they are printed.
      stand_ins: settings that the paper leaves open -> the value chosen here.
      differs: what the paper does and this trainer does not, or what stays unclear.
    """

    title: str
    data: str
    source: str
    printed: Mapping[str, Any]
    places: Mapping[str, str] = {}
    stand_ins: Mapping[str, Any] = {}
    differs: tuple[str, ...] = ()


_ASAM_COMMON = {
    "optimizer": "sgd",
    "epochs": 200,
    "batch_size": 128,
    "lr": 0.1,
    "schedule": "cosine",
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "crop": 4,
    "flip": True,
    "label_smoothing": 0.1,
    "m": WHOLE_BATCH,
}
_ASAM_DIFFERS = (
    "'random resize' is part of the augmentation, without its range: left out",
    "SGD is cited as Nesterov's (1983), but no kind of momentum is named: here it is plain, as in "
    "the authors' public code",
    "the table reports the best test accuracy of the run; the report gives the last and the best",
)


def _asam(
    title: str, data: str, method: str, places: Mapping[str, str] = {}, **changes: Any
) -> Preset:
    printed = {**_ASAM_COMMON, "model": "wrn28_10", "method": method, **changes}
    return Preset(title, data, _ASAM, printed, places, {}, _ASAM_DIFFERS)


def _imagenet(method: str, epochs: int, **hyperparameters: float) -> Preset:
    changed = {
        "model": "resnet50_imagenet",
        "method": method,
        "epochs": epochs,
        "batch_size": 512,
        "lr": 0.2,
        "weight_decay": 1e-4,
    }
    printed = {**_ASAM_COMMON, **changed, **hyperparameters}
    del printed["crop"]
    differs: tuple[str, ...] = (
        *_ASAM_DIFFERS,
        "'other hyper-parameters are the same as those of CIFAR': with padding by four pixels "
        "replaced by Inception's random crop, which images of different sizes need",
    )
    if method != "sgd":
        printed["m"] = 128
        differs += (
            "how BatchNorm sees the groups of m-sharpness is not printed: here each group is "
            "normalized by its own statistics, and the running ones are their mean",
        )
    stand_ins = {"image_size": 224, "crop": 0}
    title = f"{method.upper()}, ResNet-50 on ImageNet (table 4)"
    return Preset(title, "imagenet2012", _ASAM, printed, {}, stand_ins, differs)


def _noisy(method: str, **hyperparameters: float) -> Preset:
    printed = {
        **_ASAM_COMMON,
        "model": "resnet32",
        "method": method,
        "label_noise": 0.4,
        **hyperparameters,
    }
    differs = (
        *_ASAM_DIFFERS,
        "noise levels of 20, 40, 60 and 80 % are printed: --label-noise chooses",
        "whether symmetric noise may keep the right label is not printed: here it never does",
    )
    places = {"model": _NOISE, "label_noise": _NOISE}
    title = f"{method.upper()}, ResNet-32 on CIFAR-10 with label noise (table 6)"
    return Preset(title, "cifar10", _ASAM, printed, places, {}, differs)


def _rsam_cifar(data: str, table: int) -> Preset:
    return Preset(
        f"R-SAM, ResNet-18 on {data.upper().replace('R', 'R-')} (table {table})",
        data,
        f"{_RSAM}, table {table}",
        {
            "model": "resnet18",
            "method": "rsam",
            "optimizer": "sgd",
            "epochs": 200,
            "batch_size": 128,
        },
        {},
        {
            "lr": 0.1,
            "schedule": "cosine",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "crop": 4,
            "flip": True,
            "label_smoothing": 0.0,
            "rho": 0.05 if data == "cifar10" else 0.1,
            **_RSAM_DEFAULTS,
        },
        (
            _RSAM_NOISE,
            "'the setting of vanilla SAM' and 'basic augmentation' are all that the text says; the "
            "details are in an appendix 7.4 that was not at hand",
            "ResNet-50 and a wide ResNet (WRN-28-10 in the tables, WRN-28-20 in the text) are "
            "trained, too: --model resnet50, --model wrn28_10",
        ),
    )


def _rsam_vit(model: str, title: str) -> Preset:
    return Preset(
        f"R-SAM, {title} on ImageNet (table 3)",
        "imagenet2012",
        f"{_RSAM}.4, table 3",
        {
            "model": model,
            "method": "rsam",
            "optimizer": "adamw",
            "epochs": 300,
            "batch_size": 4096,
            "image_size": 224,
        },
        {},
        {
            "lr": 3e-3,
            "schedule": "cosine",
            "weight_decay": 0.3,
            "warmup_steps": 10_000,
            "clip": 1.0,
            "flip": True,
            "label_smoothing": 0.0,
            "rho": 0.1 if model == "vit_s16" else 0.2,
            **_RSAM_DEFAULTS,
        },
        (
            _RSAM_NOISE,
            "'the setting of [8, 18]' (two papers that were not at hand) and an appendix 7.4, not "
            "at hand either, are to have the other hyperparameters",
            "Inception-style preprocessing is the random crop of tfds:PATH and a flip",
            "table 3 also has mixup, without its α (--mixup), and RandAugment, which is left out",
        ),
    )


def _fsam(data: str, rho: float) -> Preset:
    return Preset(
        f"F-SAM, ResNet-18 on {data.upper().replace('R', 'R-')}",
        data,
        _FSAM,
        {
            "method": "fsam",
            "model": "resnet18",
            "optimizer": "sgd",
            "epochs": 200,
            "lr": 0.05,
            "schedule": "cosine",
            "momentum": 0.9,
            "weight_decay": 1e-3,
            "flip": True,
            "rho": rho,
        },
        {"model": "F-SAM, supplement A6 and A7"},
        {
            "batch_size": 128,
            "crop": 4,
            "cutout": 16 if data == "cifar10" else 8,
            "label_smoothing": 0.0,
            "sigma": 1.0,
            "lmbda": 0.9,
        },
        (
            "cropping and cutout are printed, their sizes are not; batch size, σ and λ of these "
            "experiments are not in the supplement",
            "the weight decay is that of SAM and its variants: with --method sgd the paper has "
            "5e-4 (--weight-decay 5e-4)",
            "the transfer learning of A5.1, which starts from pretrained weights, is left out",
        ),
    )


PRESETS: dict[str, Preset] = {
    "sgd-cifar10": _asam("SGD, WRN-28-10 on CIFAR-10 (table 2)", "cifar10", "sgd", epochs=400),
    "sam-cifar10": _asam("SAM, WRN-28-10 on CIFAR-10 (table 2)", "cifar10", "sam", rho=0.05),
    "asam-cifar10": _asam(
        "ASAM, WRN-28-10 on CIFAR-10 (table 2)", "cifar10", "asam", rho=0.5, eta=0.01
    ),
    "sgd-cifar100": _asam("SGD, WRN-28-10 on CIFAR-100 (table 3)", "cifar100", "sgd", epochs=400),
    "sam-cifar100": _asam("SAM, WRN-28-10 on CIFAR-100 (table 3)", "cifar100", "sam", rho=0.1),
    "asam-cifar100": _asam(
        "ASAM, WRN-28-10 on CIFAR-100 (table 3)", "cifar100", "asam", rho=1.0, eta=0.01
    ),
    "sgd-imagenet": _imagenet("sgd", 200),
    "sam-imagenet": _imagenet("sam", 100, rho=0.05),
    "asam-imagenet": _imagenet("asam", 100, rho=1.0, eta=0.01),
    "sam-noisy-cifar10": _noisy("sam", rho=0.05),
    "asam-noisy-cifar10": _noisy("asam", rho=0.5, eta=0.01),
    "sgd-correlation-cifar10": Preset(
        "the networks whose sharpness is correlated with their generalization gap, WRN-16-8",
        "cifar10",
        _V1,
        {
            "model": "wrn16_8",
            "method": "sgd",
            "epochs": 200,
            "batch_size": 256,
            "lr": 0.1,
            "schedule": "cosine",
            "weight_decay": 5e-4,
            "crop": 4,
            "flip": True,
            "label_smoothing": 0.1,
        },
        {},
        {"optimizer": "sgd", "momentum": 0.9, "cutout": 16},
        (
            _ASAM_DIFFERS[0],
            "nine weight decays are trained (1e-6, 2e-6, 5e-6, … 5e-4): --weight-decay chooses",
            "appendix B names no optimizer and no size of cutout; SGD and its momentum of 0.9 are "
            "those of section 6.2, whose other hyperparameters are said to be appendix B's",
        ),
    ),
    "rsam-cifar10": _rsam_cifar("cifar10", 1),
    "rsam-cifar100": _rsam_cifar("cifar100", 2),
    "rsam-vit-s16": _rsam_vit("vit_s16", "ViT-S/16"),
    "rsam-vit-b16": _rsam_vit("vit_b16", "ViT-B/16"),
    "fsam-cifar10": _fsam("cifar10", 0.1),
    "fsam-cifar100": _fsam("cifar100", 0.2),
}
