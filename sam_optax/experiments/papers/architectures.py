# ruff: noqa: RUF001 (multiplication signs, in what is printed)
"""The networks of the papers, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers.resnet import Bottleneck, ResNet
from sam_optax.experiments.papers.vit import VisionTransformer
from sam_optax.experiments.papers.wide_resnet import WideResNet


class Architecture(NamedTuple):
    """A network: how it is made, and what it is."""

    make: Callable[..., nn.Module]
    title: str


ARCHITECTURES = {
    "resnet20": Architecture(
        partial(ResNet, stages=(3, 3, 3), width=16, projection=False),
        "ResNet-20 for 32×32 images (shortcuts without params)",
    ),
    "resnet32": Architecture(
        partial(ResNet, stages=(5, 5, 5), width=16, projection=False),
        "ResNet-32 for 32×32 images (shortcuts without params)",
    ),
    "resnet18": Architecture(
        partial(ResNet, stages=(2, 2, 2, 2)), "ResNet-18 with the stem for 32×32 images"
    ),
    "resnet50": Architecture(
        partial(ResNet, stages=(3, 4, 6, 3), block=Bottleneck),
        "ResNet-50 with the stem for 32×32 images",
    ),
    "resnet50_imagenet": Architecture(
        partial(ResNet, stages=(3, 4, 6, 3), block=Bottleneck, stem="imagenet"),
        "ResNet-50 with ImageNet's stem",
    ),
    "wrn16_8": Architecture(partial(WideResNet, depth=16, widen=8), "WRN-16-8"),
    "wrn28_10": Architecture(partial(WideResNet, depth=28, widen=10), "WRN-28-10"),
    "vit_s16": Architecture(partial(VisionTransformer, width=384, depth=12, heads=6), "ViT-S/16"),
    "vit_b16": Architecture(partial(VisionTransformer, width=768, depth=12, heads=12), "ViT-B/16"),
    "tiny": Architecture(
        partial(ResNet, stages=(1, 1), width=8), "a ResNet of two blocks, to try things out"
    ),
}


def build(name: str, classes: int, size: int, dtype: Any = jnp.float32) -> nn.Module:
    """The network for square images.

    Args:
      name: a key of ``ARCHITECTURES``.
      classes: number of classes.
      size: pixels of an image's side.
      dtype: of the computation; params are float32.

    Raises:
      UserError: an unknown name, or images that cannot be cut into patches.
    """
    if name not in ARCHITECTURES:
        raise UserError(f"--model {name}: unknown network; use one of {', '.join(ARCHITECTURES)}.")
    model = ARCHITECTURES[name].make(classes=classes, dtype=dtype)
    if isinstance(model, VisionTransformer) and size % model.patch:
        raise UserError(
            f"--model {name}: images of {size}×{size} cannot be cut into patches of "
            f"{model.patch}×{model.patch}; give --image-size a multiple of {model.patch}."
        )
    return model
