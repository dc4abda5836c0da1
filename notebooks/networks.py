"""Networks of your own for the command: those of the papers' tables.

Each is a function of the number of classes, and is named on the command line with this file:

    python -m sam_optax compare --model notebooks/networks.py:resnet18 --dataset hf:cifar10

They are Flax Linen modules. Those for 32×32 images take any images; ``train`` tells training from
evaluation, and random draws are from the key "dropout", which both passes of a step share.
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from randaugment import RandAugment
from resnet import Bottleneck, ResNet, wide
from vit import VisionTransformer

# ResNets with the stem for 32×32 images, and one with ImageNet's; wide ones; vision transformers.
resnet20 = partial(ResNet, stages=(3, 3, 3), width=16, projection=False)
resnet32 = partial(ResNet, stages=(5, 5, 5), width=16, projection=False)
resnet56 = partial(ResNet, stages=(9, 9, 9), width=16, projection=False)
resnet18 = partial(ResNet, stages=(2, 2, 2, 2))
resnet50 = partial(ResNet, stages=(3, 4, 6, 3), block=Bottleneck)
resnet50_imagenet = partial(resnet50, stem="imagenet")
wrn16_8 = wide(depth=16, widen=8)
wrn28_2 = wide(depth=28, widen=2)
wrn28_10 = wide(depth=28, widen=10)
vit_s16 = partial(VisionTransformer, width=384, depth=12, heads=6)
vit_b16 = partial(VisionTransformer, width=768, depth=12, heads=12)
tiny = partial(ResNet, stages=(1, 1), width=8)  # for quick trials

he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


def conv(channels, size, stride=1, **options):
    """A convolution that pads (size − 1)/2 zeros on each side."""
    options = {"use_bias": False, "kernel_init": he_normal, **options}
    return nn.Conv(channels, (size, size), stride, (size - 1) // 2, **options)


def batch_norm(train):
    return partial(
        nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5
    )


class ShakeDrop(nn.Module):
    """Multiplies a branch by b + α − bα, and its gradient by b + β − bβ (Yamada et al. 2019).

    b is 1 with probability ``keep``, else 0, α ∈ [−1, 1] and β ∈ [0, 1] are uniform, each drawn for
    every image. In evaluation the branch is multiplied by its expectation, ``keep``.
    """

    keep: float

    @nn.compact
    def __call__(self, x, train):
        if not train:
            return self.keep * x
        keys = jax.random.split(self.make_rng("dropout"), 3)
        shape = (len(x), 1, 1, 1)
        b = jax.random.bernoulli(keys[0], self.keep, shape)
        forward = jnp.where(b, 1, jax.random.uniform(keys[1], shape, minval=-1))
        backward = jnp.where(b, 1, jax.random.uniform(keys[2], shape))
        return backward * x + jax.lax.stop_gradient((forward - backward) * x)


class PyramidBlock(nn.Module):
    """A bottleneck without a first ReLU; pooling and zero channels fit the shortcut to it."""

    channels: int
    stride: int
    keep: float

    @nn.compact
    def __call__(self, x, train):
        norm = batch_norm(train)
        y = conv(self.channels, 1)(norm()(x))
        y = conv(self.channels, 3, self.stride)(nn.relu(norm()(y)))
        y = conv(4 * self.channels, 1)(nn.relu(norm()(y)))
        y = ShakeDrop(self.keep)(norm()(y), train)
        if self.stride > 1:
            x = nn.avg_pool(x, (2, 2), (2, 2), "SAME", count_include_pad=False)
        return y + jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, y.shape[-1] - x.shape[-1])))


class PyramidNet(nn.Module):
    """Channels grow by α in all, a little in each of three groups of blocks (Han et al. 2017).

    The l-th of L blocks is kept with probability 1 − l/(2L). As in SAM's public code, numbers of
    channels are rounded, where the paper cuts them.
    """

    classes: int
    depth: int = 272
    alpha: int = 200

    @nn.compact
    def __call__(self, x, *, train):
        norm, group = batch_norm(train), (self.depth - 2) // 9
        blocks = 3 * group
        x = norm()(conv(16, 3)(x))
        for i in range(blocks):
            channels = round(16 + self.alpha * (i + 1) / blocks)
            stride = 2 if i in (group, 2 * group) else 1
            x = PyramidBlock(channels, stride, 1 - (i + 1) / (2 * blocks))(x, train)
        return nn.Dense(self.classes)(jnp.mean(nn.relu(norm()(x)), (1, 2)))


def pyramidnet272(classes):
    """PyramidNet-272, α = 200, of ASAM's tables 2 and 3.

    Printed are ``--lr 0.05 --batch-size 256 --m 32 --sam.rho 0.05 --asam.rho 1``, with 900 epochs
    of SAM and ASAM and 1800 of SGD, AutoAugment and CutMix, which the command does not have.
    """
    return PyramidNet(classes)


pyramidnet29 = partial(PyramidNet, depth=29, alpha=24)  # a small one, for trials


# The other networks of ASAM's tables 2 and 3, and of F-SAM's figure A1.


class DenseNet(nn.Module):
    """DenseNet-BC with the stem for 32×32 images (Huang et al. 2017, arXiv 1608.06993).

    ``blocks`` lists the layers per block, and each adds ``growth`` channels; between blocks,
    channels and resolution are halved.
    """

    classes: int
    blocks: Sequence[int] = (6, 12, 24, 16)
    growth: int = 32

    @nn.compact
    def __call__(self, x, *, train):
        norm = batch_norm(train)
        x = conv(2 * self.growth, 3)(x)
        for block, layers in enumerate(self.blocks):
            if block:
                x = conv(x.shape[-1] // 2, 1)(nn.relu(norm()(x)))
                x = nn.avg_pool(x, (2, 2), (2, 2), "SAME", count_include_pad=False)
            for _ in range(layers):
                y = conv(4 * self.growth, 1)(nn.relu(norm()(x)))
                y = conv(self.growth, 3)(nn.relu(norm()(y)))
                x = jnp.concatenate([x, y], axis=-1)
        return nn.Dense(self.classes)(jnp.mean(nn.relu(norm()(x)), (1, 2)))


class ResNeXt(nn.Module):
    """Bottlenecks with grouped convolutions (Xie et al. 2017, arXiv 1611.05431).

    Blocks have ``groups`` × ``width`` channels inside and 256 outside, and twice as many in each
    further stage.
    """

    classes: int
    stages: Sequence[int] = (3, 3, 3)
    groups: int = 32
    width: int = 4

    @nn.compact
    def __call__(self, x, *, train):
        norm = batch_norm(train)
        x = nn.relu(norm()(conv(64, 3)(x)))
        for stage, blocks in enumerate(self.stages):
            inner, outer = self.groups * self.width * 2**stage, 256 * 2**stage
            for i in range(blocks):
                stride = 2 if stage and not i else 1
                y = nn.relu(norm()(conv(inner, 1)(x)))
                y = nn.relu(
                    norm()(conv(inner, 3, stride, feature_group_count=self.groups)(y))
                )
                y = norm()(conv(outer, 1)(y))
                x = nn.relu(y + (x if i else norm()(conv(outer, 1, stride)(x))))
        return nn.Dense(self.classes)(jnp.mean(x, (1, 2)))


class VGG(nn.Module):
    """VGG with BatchNorm (Simonyan & Zisserman 2015, arXiv 1409.1556).

    The head is that of F-SAM's public code: two layers of 512 units, each after a dropout, of 0.5
    there.
    """

    classes: int
    stages: Sequence[int]
    width: int = 64
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, *, train):
        norm, widest = batch_norm(train), 8 * self.width
        for stage, layers in enumerate(self.stages):
            for _ in range(layers):
                channels = min(self.width * 2**stage, widest)
                x = nn.relu(norm()(conv(channels, 3, use_bias=True)(x)))
            x = nn.max_pool(x, (2, 2), (2, 2), "SAME")
        x = jnp.mean(x, (1, 2))  # a single pixel for 32×32 images
        for _ in range(2):
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
            x = nn.relu(nn.Dense(widest)(x))
        return nn.Dense(self.classes)(x)


densenet121 = DenseNet
resnext29_32x4d = ResNeXt
vgg16_bn = partial(VGG, stages=(2, 2, 3, 3, 3))
vgg16_bn_dropout = partial(VGG, stages=(2, 2, 3, 3, 3), dropout=0.5)
vgg19_bn = partial(VGG, stages=(2, 2, 4, 4, 4))


class Dropout(nn.Module):
    """Drops outputs of some layers of any network.

    ``layers`` are the ends of their paths, such as ``("Dense_0",)``; ``nn.tabulate`` prints paths.
    """

    network: nn.Module
    rate: float
    layers: Sequence[str]

    @nn.compact
    def __call__(self, x, *, train):
        def drop(layer, args, kwargs, context):
            y = layer(*args, **kwargs)
            chosen = "/".join(context.module.path).endswith(tuple(self.layers))
            if not (train and chosen and context.method_name == "__call__"):
                return y
            kept = jax.random.bernoulli(
                self.make_rng("dropout"), 1 - self.rate, y.shape
            )
            return jnp.where(kept, y / (1 - self.rate), 0)

        with nn.intercept_methods(drop):
            return self.network(x, train=train)


def wrn16_8_dropout(classes):
    """WRN-16-8 with dropout between the convolutions of a block, as its authors place it.

    ASAM's table 1 varies the rate and does not print it; 0.3 is theirs for CIFAR.
    """
    return Dropout(wrn16_8(classes), 0.3, ("BatchNorm_1",))


def vit_s16_randaugment(classes, network=vit_s16):
    """ViT-S/16 with RandAugment of R-SAM's table 3, on images normalized as ImageNet's.

    n and the magnitude are not printed; 2 and 15 are those of Chen et al. 2022, whom it follows.
    """
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return RandAugment(network(classes), 2, 15, mean, std)


vit_b16_randaugment = partial(vit_s16_randaugment, network=vit_b16)
