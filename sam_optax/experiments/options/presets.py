# ruff: noqa: RUF001 (the papers' Greek letters, in what is printed)
"""The papers' settings, each value with the place where it is printed.

A preset is one table of a paper; each method has its own row of it. What a paper does not print
stands under ``stand_ins``, chosen here, and every run with it says so. What this trainer does not
do is listed under ``differs``.

The sources: ASAM is Kwon et al. 2021 (ICML version; *v1* is arXiv 2102.11600v1), R-SAM is Liu et
al. 2022, F-SAM is the supplement of Li et al. 2024, whose main text was not at hand.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

_ASAM = "ASAM, section 5.2"
_NOISE = "ASAM, section 5.4"
_V1 = "ASAM v1, appendix B"
_RSAM = "R-SAM, section 4"
_FSAM = "F-SAM, supplement A5.1"
_RSAM_NOISE = (
    "γ and λ of the tables are not printed: they are the library's, with noise relative to each "
    "kernel and both terms of unit length, where the text prints a covariance and δ₀ + λĝ"
)


_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


class Preset(NamedTuple):
    """A table of a paper.

    Attributes:
      title: what it is.
      data: the data set: ``"cifar10"``, ``"cifar100"`` or ``"imagenet2012"``.
      method: the method that the paper proposes.
      source: where the values are printed, unless ``places`` says otherwise.
      printed: settings by name.
      rows: method -> printed settings and hyperparameters of its own, in the table's order.
      places: of single settings, where they are printed.
      stand_ins: settings that the paper leaves open -> the value chosen here.
      stand_in_rows: the same for single methods.
      differs: what the paper does and this trainer does not, or what stays unclear.
      methods: which rows are trained where nothing else is asked for; all by default.
    """

    title: str
    data: str
    method: str
    source: str
    printed: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    places: Mapping[str, str] = {}
    stand_ins: Mapping[str, Any] = {}
    stand_in_rows: Mapping[str, Mapping[str, Any]] = {}
    differs: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


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
    "m": None,  # the whole batch
}
_ASAM_DIFFERS = (
    "'random resize' is part of the augmentation, without its range: left out",
    "SGD is cited as Nesterov's (1983), but no kind of momentum is named: here it is plain, as in "
    "the authors' public code",
    "the tables report the best test accuracy of the run; the report gives the last and the best",
)


def _asam_cifar(data: str, table: int, sam: float, asam: float) -> Preset:
    rows: dict[str, dict[str, Any]] = {
        "sgd": {"epochs": 400},
        "sam": {"rho": sam},
        "asam": {"rho": asam, "eta": 0.01},
    }
    return Preset(
        f"WRN-28-10 on {_TITLES[data]}, ASAM's table {table}",
        data,
        "asam",
        _ASAM,
        {**_ASAM_COMMON, "model": "wrn28_10"},
        rows,
        differs=(
            *_ASAM_DIFFERS,
            "PyramidNet-272, with AutoAugment, CutMix and ShakeDrop, is left out",
        ),
    )


_ASAM_IMAGENET = Preset(
    "ResNet-50 on ImageNet, ASAM's table 4",
    "imagenet2012",
    "asam",
    _ASAM,
    {
        **{name: value for name, value in _ASAM_COMMON.items() if name != "crop"},
        "model": "resnet50_imagenet",
        "epochs": 100,
        "batch_size": 512,
        "lr": 0.2,
        "weight_decay": 1e-4,
        "m": 128,
    },
    {"sgd": {"epochs": 200}, "sam": {"rho": 0.05}, "asam": {"rho": 1.0, "eta": 0.01}},
    stand_ins={"image_size": 224, "crop": 0},
    differs=(
        *_ASAM_DIFFERS,
        "'other hyper-parameters are the same as those of CIFAR': with padding by four pixels "
        "replaced by Inception's random crop, which images of different sizes need",
        "how BatchNorm sees the groups of m-sharpness is not printed: here each group is "
        "normalized by its own statistics, and the running ones are their mean",
    ),
)

_ASAM_NOISE = Preset(
    "ResNet-32 on CIFAR-10 with label noise, ASAM's table 6",
    "cifar10",
    "asam",
    _ASAM,
    {**_ASAM_COMMON, "model": "resnet32", "label_noise": 0.4},
    {"sgd": {"epochs": 400}, "sam": {"rho": 0.05}, "asam": {"rho": 0.5, "eta": 0.01}},
    {"model": _NOISE, "label_noise": _NOISE},
    differs=(
        *_ASAM_DIFFERS,
        "noise levels of 20, 40, 60 and 80 % are printed: --label-noise chooses",
        "whether symmetric noise may keep the right label is not printed: here it never does",
        "the section prints no hyperparameters of its own: they are section 5.2's",
    ),
)

_ASAM_CORRELATION = Preset(
    "WRN-16-8 on CIFAR-10, whose sharpness ASAM v1 correlates with the generalization gap",
    "cifar10",
    "sgd",
    _V1,
    {
        "model": "wrn16_8",
        "epochs": 200,
        "batch_size": 256,
        "lr": 0.1,
        "schedule": "cosine",
        "weight_decay": 5e-4,
        "crop": 4,
        "flip": True,
        "label_smoothing": 0.1,
    },
    {"sgd": {}},
    stand_ins={"optimizer": "sgd", "momentum": 0.9, "cutout": 16},
    differs=(
        _ASAM_DIFFERS[0],
        "nine weight decays are trained (1e-6, 2e-6, 5e-6, … 5e-4): --weight-decay chooses",
        "appendix B names no optimizer and no size of cutout; SGD and its momentum of 0.9 are "
        "those of section 6.2, whose other hyperparameters are said to be appendix B's",
    ),
)


def _rsam_cifar(data: str, table: int, rho: float) -> Preset:
    return Preset(
        f"ResNet-18 on {_TITLES[data]}, R-SAM's table {table}",
        data,
        "rsam",
        f"{_RSAM}, table {table}",
        {"model": "resnet18", "optimizer": "sgd", "epochs": 200, "batch_size": 128},
        {"sgd": {}, "sam": {}, "rsam": {}},
        stand_ins={
            "lr": 0.1,
            "schedule": "cosine",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "crop": 4,
            "flip": True,
        },
        stand_in_rows={"sam": {"rho": rho}, "rsam": {"rho": rho}},
        differs=(
            _RSAM_NOISE,
            "'the setting of vanilla SAM' and 'basic augmentation' are all that the text says; the "
            "details are in an appendix 7.4 that was not at hand",
            "ResNet-50 and a wide ResNet (WRN-28-10 in the tables, WRN-28-20 in the text) are "
            "trained, too: --model resnet50, --model wrn28_10",
        ),
    )


def _rsam_vit(model: str, title: str, rho: float) -> Preset:
    return Preset(
        f"{title} on ImageNet, R-SAM's table 3",
        "imagenet2012",
        "rsam",
        f"{_RSAM}.4, table 3",
        {
            "model": model,
            "optimizer": "adamw",
            "epochs": 300,
            "batch_size": 4096,
            "image_size": 224,
        },
        {"sgd": {}, "sam": {}, "rsam": {}},
        stand_ins={
            "lr": 3e-3,
            "schedule": "cosine",
            "weight_decay": 0.3,
            "warmup_steps": 10_000,
            "clip": 1.0,
            "flip": True,
        },
        stand_in_rows={"sam": {"rho": rho}, "rsam": {"rho": rho}},
        differs=(
            _RSAM_NOISE,
            "'the setting of [8, 18]' (two papers that were not at hand) and an appendix 7.4, not "
            "at hand either, are to have the other hyperparameters",
            "Inception-style preprocessing is the random crop of hf: data sets and a flip",
            "table 3 also has mixup, without its α (--mixup), and RandAugment, which is left out",
            "the base optimizer alone, AdamW, is the method sgd",
        ),
    )


def _fsam(data: str, rho: float) -> Preset:
    sharp = {"rho": rho}
    return Preset(
        f"ResNet-18 on {_TITLES[data]}, F-SAM's training from scratch",
        data,
        "fsam",
        _FSAM,
        {
            "model": "resnet18",
            "optimizer": "sgd",
            "epochs": 200,
            "lr": 0.05,
            "schedule": "cosine",
            "momentum": 0.9,
            "weight_decay": 1e-3,  # of SAM and its modified variants
            "flip": True,
        },
        {
            "sgd": {"weight_decay": 5e-4},
            **dict.fromkeys(("sam", "fsam", "sam_full", "sam_db", "sam_noise"), sharp),
        },
        {"model": "F-SAM, supplement A6 and A7"},
        stand_ins={"batch_size": 128, "crop": 4, "cutout": 16 if data == "cifar10" else 8},
        stand_in_rows={"fsam": {"sigma": 1.0, "lmbda": 0.9}},
        differs=(
            "cropping and cutout are printed, their sizes are not; batch size, σ and λ of these "
            "experiments are not in the supplement",
            "the transfer learning of A5.1, which starts from pretrained weights, is left out",
        ),
        methods=("sgd", "sam", "fsam"),
    )


PRESETS: dict[str, Preset] = {
    "asam-cifar10": _asam_cifar("cifar10", 2, 0.05, 0.5),
    "asam-cifar100": _asam_cifar("cifar100", 3, 0.1, 1.0),
    "asam-imagenet": _ASAM_IMAGENET,
    "asam-noisy-cifar10": _ASAM_NOISE,
    "asam-correlation-cifar10": _ASAM_CORRELATION,
    "rsam-cifar10": _rsam_cifar("cifar10", 1, 0.05),
    "rsam-cifar100": _rsam_cifar("cifar100", 2, 0.1),
    "rsam-vit-s16": _rsam_vit("vit_s16", "ViT-S/16", 0.1),
    "rsam-vit-b16": _rsam_vit("vit_b16", "ViT-B/16", 0.2),
    "fsam-cifar10": _fsam("cifar10", 0.1),
    "fsam-cifar100": _fsam("cifar100", 0.2),
}
