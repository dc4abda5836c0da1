# ruff: noqa: RUF001 (the papers' Greek letters, in what is printed)
"""The settings of the papers, each value with the place where it is printed.

A preset is one table of a paper, with one row per method. Values that a paper does not print are
chosen here and listed in ``stand_ins``, and every run with them reports it. Differences of this
trainer from the paper are listed in ``differs``.

The sources: ASAM is Kwon et al. 2021 (ICML version; *v1* is arXiv 2102.11600v1), R-SAM is Liu et
al. 2022, F-SAM is the supplement of Li et al. 2024, whose main text we could not obtain.
"""

from typing import Any

from sam_optax.experiments.options.preset import Preset
from sam_optax.experiments.types import Record

_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet2012": "ImageNet"}
_COSINE_SGD = {"optimizer": "sgd", "lr": 0.1, "schedule": "cosine", "momentum": 0.9}
_CIFAR = {"crop": 4, "flip": True, "weight_decay": 5e-4}
_SMOOTHED = {**_CIFAR, "epochs": 200, "label_smoothing": 0.1}
_RESIZE = "'random resize' is part of the augmentation, but its range is not printed: left out"


def _asam(
    title: str, data: str, model: str, sam: float, asam: float, *differs: str, **changes: Any
) -> Preset:
    """ASAM's section 5.2, in which SGD is trained twice as long as the others."""
    printed: Record = {**_COSINE_SGD, **_SMOOTHED, "batch_size": 128, "m": None, "model": model}
    printed |= changes.pop("printed", {})
    stand_ins = changes.get("stand_ins", {})
    return Preset(
        title,
        data,
        "asam",
        "ASAM, section 5.2",
        {name: value for name, value in printed.items() if name not in stand_ins},
        {
            "sgd": {"epochs": 2 * printed["epochs"]},
            "sam": {"rho": sam},
            "asam": {"rho": asam, "eta": 0.01},
        },
        differs=(
            _RESIZE,
            "SGD is cited as Nesterov's (1983), but no kind of momentum is named: here it is "
            "plain, as in the authors' public code",
            "the tables report the best test accuracy of the run; the report gives the last and "
            "the best",
            *differs,
        ),
        **changes,
    )


def _asam_cifar(data: str, table: int, sam: float, asam: float) -> Preset:
    title = f"WRN-28-10 on {_TITLES[data]}, ASAM's table {table}"
    left_out = "PyramidNet-272, with AutoAugment, CutMix and ShakeDrop, is left out"
    others = (
        "DenseNet-121, ResNet-20, ResNet-56, VGG19-BN, ResNeXt29-32x4d and WRN-28-2 are "
        "trained too: --model densenet121, resnet20, resnet56, vgg19_bn, resnext29_32x4d or wrn28_2"
    )
    return _asam(title, data, "wrn28_10", sam, asam, others, left_out)


_ASAM_IMAGENET = _asam(
    "ResNet-50 on ImageNet, ASAM's table 4",
    "imagenet2012",
    "resnet50_imagenet",
    0.05,
    1.0,
    "'other hyper-parameters are the same as those of CIFAR': with padding by four pixels replaced "
    "by Inception's random crop, which images of different sizes need",
    "how BatchNorm sees the groups of m-sharpness is not printed: here each group is normalized by "
    "its own statistics, and the running ones are their mean",
    printed={"epochs": 100, "batch_size": 512, "lr": 0.2, "weight_decay": 1e-4, "m": 128},
    stand_ins={"image_size": 224, "crop": 0},
)
_ASAM_NOISE = _asam(
    "ResNet-32 on CIFAR-10 with label noise, ASAM's table 6",
    "cifar10",
    "resnet32",
    0.05,
    0.5,
    "noise levels of 20, 40, 60 and 80 % are printed: --label-noise chooses",
    "whether symmetric noise may keep the right label is not printed: here it never does",
    "the section prints no hyperparameters: they are those of section 5.2",
    printed={"label_noise": 0.4},
    places=dict.fromkeys(("model", "label_noise"), "ASAM, section 5.4"),
)
_ASAM_CORRELATION = Preset(
    "WRN-16-8 on CIFAR-10, whose sharpness ASAM v1 correlates with the generalization gap",
    "cifar10",
    "sgd",
    "ASAM v1, appendix B",
    {**_SMOOTHED, "model": "wrn16_8", "batch_size": 256, "lr": 0.1, "schedule": "cosine"},
    {"sgd": {}},
    stand_ins={"optimizer": "sgd", "momentum": 0.9, "cutout": 16},
    differs=(
        _RESIZE,
        "nine weight decays are trained (1e-6, 2e-6, 5e-6, … 5e-4): --weight-decay chooses",
        "appendix B names no optimizer and no size of cutout; SGD and its momentum of 0.9 are "
        "those of section 6.2, whose other hyperparameters are said to be appendix B's",
    ),
)


def _rsam(
    title: str, data: str, place: str, rho: float, printed: Any, stand_ins: Any, *differs: str
) -> Preset:
    return Preset(
        title,
        data,
        "rsam",
        f"R-SAM, section 4{place}",
        printed,
        {"sgd": {}, "sam": {}, "rsam": {}},
        stand_ins=stand_ins,
        stand_in_rows={name: {"rho": rho} for name in ("sam", "rsam")},
        differs=(
            "γ and λ of the tables are not printed: they are the library's, with noise relative to "
            "each kernel and both terms of unit length, where the text prints a covariance and "
            "δ₀ + λĝ",
            *differs,
        ),
    )


def _rsam_cifar(data: str, table: int, rho: float) -> Preset:
    return _rsam(
        f"ResNet-18 on {_TITLES[data]}, R-SAM's table {table}",
        data,
        f", table {table}",
        rho,
        {"model": "resnet18", "optimizer": "sgd", "epochs": 200, "batch_size": 128},
        {"lr": 0.1, "schedule": "cosine", "momentum": 0.9, **_CIFAR},
        "'the setting of vanilla SAM' and 'basic augmentation' are all that the text says; the "
        "details are in an appendix 7.4 that we could not obtain",
        "ResNet-50 and a wide ResNet (WRN-28-10 in the tables, WRN-28-20 in the text) are "
        "trained, too: --model resnet50, --model wrn28_10",
    )


_VIT = {"optimizer": "adamw", "epochs": 300, "batch_size": 4096, "image_size": 224}
_VIT_STAND_INS = {"lr": 3e-3, "schedule": "cosine", "weight_decay": 0.3, "warmup_steps": 10_000}


def _rsam_vit(model: str, title: str, rho: float) -> Preset:
    return _rsam(
        f"{title} on ImageNet, R-SAM's table 3",
        "imagenet2012",
        ".4, table 3",
        rho,
        {**_VIT, "model": model},
        {**_VIT_STAND_INS, "clip": 1.0, "flip": True},
        "the other hyperparameters are in 'the setting of [8, 18]' (two papers) and an appendix "
        "7.4, which we could not obtain",
        "Inception-style preprocessing is the random crop of hf: data sets and a flip",
        "table 3 also has mixup, without its α (--mixup), and RandAugment, which is left out",
        "the base optimizer alone, AdamW, is the method sgd",
    )


_FSAM_SHARP = ("sam", "fsam", "sam_full", "sam_db", "sam_noise", "sam_batches")
_FSAM_CHOSEN: Record = {"fsam": {"sigma": 1.0, "lmbda": 0.9}, "sam_batches": {"batches": 2}}


def _fsam(data: str, rho: float) -> Preset:
    changed = {"lr": 0.05, "weight_decay": 1e-3}  # of SAM and its modified variants
    return Preset(
        f"ResNet-18 on {_TITLES[data]}, F-SAM's training from scratch",
        data,
        "fsam",
        "F-SAM, supplement A5.1",
        {**_COSINE_SGD, "model": "resnet18", "epochs": 200, "flip": True, **changed},
        {"sgd": {"weight_decay": 5e-4}} | {name: {"rho": rho} for name in _FSAM_SHARP},
        {"model": "F-SAM, supplement A6 and A7"},
        stand_ins={"batch_size": 128, "crop": 4, "cutout": 16 if data == "cifar10" else 8},
        stand_in_rows=_FSAM_CHOSEN,
        differs=(
            "cropping and cutout are printed, their sizes are not; batch size, σ and λ of these "
            "experiments are not in the supplement",
            "figure A1 also has VGG16-BN on CIFAR-100: --model vgg16_bn",
        ),
        methods=("sgd", "sam", "fsam"),
    )


_FSAM_TRANSFER = Preset(
    "DeiT-small fine-tuned, F-SAM's transfer learning",
    None,
    "fsam",
    "F-SAM, supplement A5.1",
    {"model": "vit_s16", "optimizer": "adamw", "epochs": 10, "batch_size": 128, "lr": 1e-4}
    | {"weight_decay": 1e-5, "image_size": 224},
    {"sgd": {}} | {name: {"rho": 0.075} for name in _FSAM_SHARP},
    stand_ins={"schedule": "cosine"},
    stand_in_rows=_FSAM_CHOSEN,
    differs=(
        "images are 'resized to 224×224 without extra augmentations'; here those that do not fit "
        "into memory are cropped at random as in Inception",
        "pixels are normalized by the training set, not by ImageNet, and GELU is approximate",
        "the base optimizer alone, AdamW, is the method sgd",
    ),
    methods=("sgd", "sam", "fsam"),
    init="DeiT-small in .safetensors",
    give="hf:NAME_OR_PATH",
)
_ASAM_TRANSLATION = Preset(
    "a transformer on IWSLT'14 DE-EN, ASAM's table 5",
    "IWSLT'14 DE-EN",
    "asam",
    "ASAM, section 5.3",
    {"optimizer": "adam", "lr": 5e-4, "momentum": 0.9, "beta2": 0.98, "weight_decay": 1e-4}
    | {"label_smoothing": 0.1},
    {"sgd": {}, "sam": {"rho": 0.1}, "asam": {"rho": 0.2}},
    stand_ins={"model": "transformer_base", "epochs": 50, "batch_size": 128}
    | {"schedule": "cosine", "warmup_steps": 4000},
    stand_in_rows={"asam": {"eta": 0.01}},
    differs=(
        "the paper's is the encoder and decoder of Vaswani et al. (2017); here one stack of 12 "
        "layers reads the source and writes the target, in bytes",
        "the dropout of 0.3 is left out",
        "weight decay is added to the gradient; the text does not say whether it was decoupled "
        "(--optimizer adamw)",
        "the last tenth of the pairs is the test set; the table's measure is --bleu",
        "the base optimizer alone, Adam, is the method sgd",
    ),
    give="pairs:PATH, a file of lines source<TAB>target",
)
PRESETS: dict[str, Preset] = {
    "asam-cifar10": _asam_cifar("cifar10", 2, 0.05, 0.5),
    "asam-cifar100": _asam_cifar("cifar100", 3, 0.1, 1.0),
    "asam-imagenet": _ASAM_IMAGENET,
    "asam-noisy-cifar10": _ASAM_NOISE,
    "asam-correlation-cifar10": _ASAM_CORRELATION,
    "asam-iwslt14": _ASAM_TRANSLATION,
    "rsam-cifar10": _rsam_cifar("cifar10", 1, 0.05),
    "rsam-cifar100": _rsam_cifar("cifar100", 2, 0.1),
    "rsam-vit-s16": _rsam_vit("vit_s16", "ViT-S/16", 0.1),
    "rsam-vit-b16": _rsam_vit("vit_b16", "ViT-B/16", 0.2),
    "fsam-cifar10": _fsam("cifar10", 0.1),
    "fsam-cifar100": _fsam("cifar100", 0.2),
    "fsam-transfer": _FSAM_TRANSFER,
}
