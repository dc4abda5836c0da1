"""The networks, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from sam_optax.experiments import named
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks import own
from sam_optax.experiments.networks.resnet import Bottleneck, ResNet, wide
from sam_optax.experiments.networks.small import CNN, MLP
from sam_optax.experiments.networks.vit import VisionTransformer


class Architecture(NamedTuple):
    """A network: ``make(classes=, dtype=)``, and its title."""

    make: Callable[..., nn.Module]
    title: str


_cifar = partial(ResNet, width=16, projection=False)
_resnet50 = partial(ResNet, stages=(3, 4, 6, 3), block=Bottleneck)
_imagenet = partial(_resnet50, stem="imagenet")
_small = partial(ResNet, stages=(1, 1), width=8)
_vit = partial(VisionTransformer, depth=12)
_stem = "with the stem for 32×32 images"

ARCHITECTURES = {
    "mlp": Architecture(MLP, "two hidden layers of 256 units"),
    "cnn": Architecture(CNN, "two convolutions of 16 and 32 channels"),
    "resnet20": Architecture(partial(_cifar, stages=(3, 3, 3)), "ResNet-20 for 32×32 images"),
    "resnet32": Architecture(partial(_cifar, stages=(5, 5, 5)), "ResNet-32 for 32×32 images"),
    "resnet56": Architecture(partial(_cifar, stages=(9, 9, 9)), "ResNet-56 for 32×32 images"),
    "resnet18": Architecture(partial(ResNet, stages=(2, 2, 2, 2)), f"ResNet-18 {_stem}"),
    "resnet50": Architecture(_resnet50, f"ResNet-50 {_stem}"),
    "resnet50_imagenet": Architecture(_imagenet, "ResNet-50 with ImageNet's stem"),
    "wrn16_8": Architecture(wide(depth=16, widen=8), "WRN-16-8"),
    "wrn28_2": Architecture(wide(depth=28, widen=2), "WRN-28-2"),
    "wrn28_10": Architecture(wide(depth=28, widen=10), "WRN-28-10"),
    "vit_s16": Architecture(partial(_vit, width=384, heads=6), "ViT-S/16"),
    "vit_b16": Architecture(partial(_vit, width=768, heads=12), "ViT-B/16"),
    "tiny": Architecture(_small, "a ResNet of two blocks, for quick trials"),
}


def build(name: str, shape: tuple[int, ...], classes: int, dtype: DTypeLike = jnp.float32) -> Any:
    """The network for examples of shape (features,) or (height, width, channels).

    It is called as ``module.apply(variables, x, train=...)`` and computes in ``dtype``, with params
    and logits in float32. A user's, named as ``FILE.py:NAME`` or ``package.module:NAME``, computes
    as it likes.
    """
    if named.is_spec(name):
        return own.adapted(named.find(name), name, classes)[0]
    if name not in ARCHITECTURES:
        raise UserError(
            f"--model {name}: unknown model; use FILE.py:NAME for yours, or one of "
            f"{', '.join(ARCHITECTURES)}."
        )
    model = ARCHITECTURES[name].make(classes=classes, dtype=dtype)
    if len(shape) < 3 and not isinstance(model, MLP):
        raise UserError(
            f"--model {name}: the examples are vectors of {shape[0]} features, but this network "
            "needs images; use --model mlp."
        )
    if isinstance(model, VisionTransformer) and any(side % model.patch for side in shape[:2]):
        raise UserError(
            f"--model {name}: images of {shape[0]}×{shape[1]} cannot be cut into patches of "
            f"{model.patch}×{model.patch}; give --image-size a multiple of {model.patch}."
        )
    return model
