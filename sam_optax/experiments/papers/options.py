# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The options of ``train``."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sam_optax.experiments import methods
from sam_optax.experiments.family import METHODS
from sam_optax.experiments.papers.architectures import ARCHITECTURES
from sam_optax.experiments.papers.presets import PRESETS

SUPPORTED = {
    name: method for name, method in METHODS.items() if method.arguments is methods.Method.arguments
}
"""The methods whose step needs the batch's gradients and nothing else."""

UNGROUPED = ("sgd", "momentum", "msam", "m_asam")
"""Those that would perturb all groups of a batch alike: not at all, or along past gradients."""


def _arg(help: str, metavar: str | None = None) -> Any:
    return tyro.conf.arg(help=help, metavar=metavar)


def _setting(help: str, metavar: str) -> Any:
    """An option whose default is not known before there is a preset."""
    return tyro.conf.arg(help=help, metavar=metavar, help_behavior_hint="(default: the preset's)")


def _hyperparameter(name: str) -> Any:
    users = [m for m, method in SUPPORTED.items() if name in method.options]
    text = SUPPORTED[users[0]].options[name].help.rstrip(".")
    kind = "INT" if isinstance(SUPPORTED[users[0]].options[name].default, int) else "FLOAT"
    return Annotated[float | None, _setting(f"{text} ({', '.join(users)}).", kind)]


_NAMES = list(dict.fromkeys(name for method in SUPPORTED.values() for name in method.options))

if TYPE_CHECKING:
    Hyperparameters = Any
else:
    # --rho, --eta, …: one for all methods that have a hyperparameter of this name.
    Hyperparameters = dataclasses.make_dataclass(
        "Hyperparameters",
        [(name, _hyperparameter(name), dataclasses.field(default=None)) for name in _NAMES],
        frozen=True,
    )


@dataclasses.dataclass(frozen=True)
class Train:
    """Trains one network by one method, in the setting of a paper or in one of yours.

    A preset has the values that a paper prints; every option overrides it. The report tells for
    each setting where its value is from, and what the paper leaves open. Without options a tiny
    network learns scikit-learn's digits by SAM in a minute.
    """

    preset: Annotated[
        str | None,
        _arg(
            "A paper's experiment: " + "; ".join(f"{n} ({p.title})" for n, p in PRESETS.items()),
            "NAME",
        ),
    ] = None
    dataset: Annotated[
        str | None,
        _arg(
            "cifar10:PATH or cifar100:PATH (a published archive, binary or Python version, or the "
            "folder unpacked from it), tfds:PATH (the folder of a version that TFDS has prepared, "
            "such as ~/tensorflow_datasets/imagenet2012/5.1.0), or digits.",
            "cifar10:PATH|cifar100:PATH|tfds:PATH|digits",
        ),
    ] = None
    scale: Annotated[
        float,
        _arg(
            "Share of the epochs, examples and warm-up steps, in (0, 1]: 0.01 shows in a short "
            "time that everything works. Its accuracy is not the paper's, and the report says so."
        ),
    ] = 1.0
    model: Annotated[
        str | None,
        _setting(
            "The network: " + "; ".join(f"{n} ({a.title})" for n, a in ARCHITECTURES.items()),
            "NAME",
        ),
    ] = None
    method: Annotated[
        str | None,
        _setting("; ".join(f"{n} ({m.title})" for n, m in SUPPORTED.items()), "METHOD"),
    ] = None
    epochs: Annotated[int | None, _setting("Passes over the training set.", "INT")] = None
    batch_size: Annotated[
        int | None, _setting("Examples in a step, on all devices together.", "INT")
    ] = None
    m: Annotated[
        int | None,
        _setting(
            "Examples that share one perturbation (m-sharpness), a divisor of the batch size; the "
            "whole batch by default.",
            "INT",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        _setting(
            "The base optimizer: sgd (weight decay added to the gradient) or adamw (decoupled).",
            "STR",
        ),
    ] = None
    lr: Annotated[float | None, _setting("Learning rate, after the warm-up.", "FLOAT")] = None
    schedule: Annotated[
        str | None, _setting("What follows the warm-up: cosine (to 0) or constant.", "STR")
    ] = None
    warmup_steps: Annotated[
        int | None, _setting("Steps in which the rate rises from 0.", "INT")
    ] = None
    momentum: Annotated[float | None, _setting("Momentum of sgd; β₁ of adamw.", "FLOAT")] = None
    nesterov: Annotated[bool | None, _setting("Whether momentum is Nesterov's.", "True|False")] = (
        None
    )
    weight_decay: Annotated[float | None, _setting("Weight decay, of all params.", "FLOAT")] = None
    clip: Annotated[
        float | None, _setting("Largest norm of the sharp gradient; 0: any.", "FLOAT")
    ] = None
    label_smoothing: Annotated[
        float | None, _setting("Share of the label that all classes get.", "FLOAT")
    ] = None
    label_noise: Annotated[
        float | None, _setting("Share of the training labels made wrong.", "FLOAT")
    ] = None
    crop: Annotated[int | None, _setting("Pixels of padding before the random crop.", "INT")] = None
    flip: Annotated[
        bool | None, _setting("Whether half of the images are mirrored.", "True|False")
    ] = None
    cutout: Annotated[
        int | None, _setting("Side of the square that is cut out; 0: none.", "INT")
    ] = None
    mixup: Annotated[float | None, _setting("α of mixup; 0: none.", "FLOAT")] = None
    image_size: Annotated[
        int | None,
        _setting("Side of the images, for data sets whose images differ in size.", "INT"),
    ] = None
    hyperparameters: Annotated[Hyperparameters, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Hyperparameters()
    )
    """Hyperparameters of the method."""
    seed: int = 0
    """Of the initialization, the order of examples, augmentation, label noise and R-SAM's noise."""
    dtype: Annotated[
        str, _arg("Computation in float32 or bfloat16; params and updates stay float32.")
    ] = "float32"
    devices: Annotated[
        int | None,
        _arg("Local devices that share each batch; all by default. (Not with --distributed.)"),
    ] = None
    distributed: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _arg(
            "Train with other processes, each on its devices and its share of every batch: the "
            "same command on every host. On a TPU pod or under SLURM that is all; elsewhere set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ),
    ] = False
    out: Annotated[
        Path | None,
        _arg(
            "Directory for report.html, metrics.jsonl, results.json, params.msgpack and the "
            "checkpoint. It is created if need be.",
            "DIR",
        ),
    ] = None
    tensorboard: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, _arg("Write metrics for TensorBoard into --out, too.")
    ] = False
    checkpoint_every: Annotated[
        int, _arg("Epochs between checkpoints, with --out; 0: none.", "N")
    ] = 1
    resume: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _arg("Continue the run in the directory of --out from its checkpoint, same options."),
    ] = False
    sharpness_examples: Annotated[
        int, _arg("Training examples that sharpness is measured on at the end; 0: none.")
    ] = 1000
    sharpness_rho: Annotated[float, _arg("Radius ρ at which sharpness is measured.")] = 0.05
