"""Data sets as TFDS (tensorflow-datasets) prepares them, read without TensorFlow.

``tfds build cifar10`` leaves a folder such as ``~/tensorflow_datasets/cifar10/3.0.2`` with
``features.json`` and TFRecord files of ``image`` (PNG or JPEG) and ``label``. Images of one small
size are kept in memory. Others, such as ImageNet's, are decoded when their turn comes: a random
crop in the style of Inception for training, a central one for testing.
"""

import concurrent.futures
import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import example, records
from sam_optax.experiments.papers.images import ArrayImages, ImageDataset, Images, statistics

IMAGENET_MEAN: tuple[float, ...] = (0.485, 0.456, 0.406)
IMAGENET_STD: tuple[float, ...] = (0.229, 0.224, 0.225)
"""What images of different sizes are normalized by, as is usual for ImageNet."""
_CENTRAL = 0.875
"""The share of the shorter side that the central crop has: 224 of 256 pixels."""


def load(path: Path, size: int) -> ImageDataset:
    """A prepared data set: the split ``train``, and ``validation`` (or else ``test``) for testing.

    Args:
      path: the folder with ``features.json``.
      size: pixels of the side that images of different sizes are brought to.

    Raises:
      UserError: there is no such folder, it is malformed, or it is of another kind.
    """
    spec = f"--dataset tfds:{path}"
    try:
        features = json.loads((path / "features.json").read_text())["featuresDict"]["features"]
        shape = features["image"].get("image", {}).get("shape", {}).get("dimensions", [])
        sides = [int(side) for side in shape if int(side) > 0]
        classes = int(features["label"]["classLabel"]["numClasses"])
    except FileNotFoundError as error:
        raise UserError(
            f"{spec}: there is no features.json; give the folder of a version that TFDS has "
            "prepared, such as ~/tensorflow_datasets/cifar10/3.0.2."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{spec}: features.json has no image and class label.") from error
    found = {split: sorted(path.glob(f"*-{split}.*-of-*")) for split in _SPLITS}
    test = "validation" if found["validation"] else "test"
    if not (found["train"] and found[test]):
        raise UserError(
            f"{spec}: there are no files of the split {'test' if found['train'] else 'train'}."
        )
    for split in ("train", test):
        _check_complete(found[split], spec)
    digest = hashlib.sha256((path / "features.json").read_bytes())
    for file in (*found["train"], *found[test]):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
    promised = _promised(path)
    splits: list[Images] = []
    small = len(sides) == 3 and sides[0] == sides[1] <= _SMALL
    for split in ("train", test):
        images = RecordImages(found[split], classes, size, spec)
        for file, there, wanted in zip(
            found[split], images.lengths, promised.get(split, images.lengths), strict=False
        ):
            if there != wanted:
                raise UserError(
                    f"{spec}: {file.name} has {there} of {wanted} records; prepare the data set "
                    "again."
                )
        splits.append(images.in_memory() if small else images)
    train_images, test_images = splits
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if isinstance(train_images, ArrayImages):
        mean, std = statistics(train_images.images)
        size = sides[0]
    return ImageDataset(
        f"tfds:{path}", train_images, test_images, classes, size, mean, std, digest.hexdigest()
    )


def _check_complete(files: list[Path], spec: str) -> None:
    """Whether the files of a split are all there: each name says how many they are."""
    stem, _, count = files[0].name.rpartition("-of-")
    names = {file.name for file in files if file.stat().st_size}
    width = len(stem) - len(stem.rstrip("0123456789"))
    expected = {f"{stem[:-width]}{i:0{width}}-of-{count}" for i in range(int(count))}
    if missing := sorted(expected - names):
        raise UserError(f"{spec}: {missing[0]} is missing or empty; prepare the data set again.")


def _promised(path: Path) -> dict[str, list[int]]:
    """How many records each file of a split should have; empty for what is not known."""
    try:
        info = json.loads((path / "dataset_info.json").read_text())
        return {split["name"]: [int(n) for n in split["shardLengths"]] for split in info["splits"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


_SPLITS = ("train", "validation", "test")
_SMALL = 64


class RecordImages:
    """Images in TFRecord files; see :class:`~sam_optax.experiments.papers.images.Images`.

    Args:
      files: the files of a split.
      classes: number of classes.
      size: pixels of the side of what :meth:`batch` returns.
      spec: the option that named the data set, for messages.
    """

    def __init__(self, files: list[Path], classes: int, size: int, spec: str) -> None:
        self._files = files
        self._classes = classes
        self._size = size
        self._spec = spec
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        places = list(self._pool.map(records.index, files))
        self.lengths = [len(p) for p in places]
        """Records in each file."""
        shards = np.repeat(np.arange(len(files)), self.lengths)
        self._places = np.column_stack([shards, np.concatenate(places)])
        if not len(self._places):
            raise UserError(f"{spec}: a split has no examples.")

    def __len__(self) -> int:
        """The number of examples."""
        return len(self._places)

    def batch(
        self, indices: np.ndarray, seed: tuple[int, ...] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decoded images, cropped and brought to one size; threads read and decode them."""

        def one(index: int) -> tuple[np.ndarray, int]:
            rng = None if seed is None else np.random.default_rng([*seed, index])
            image, label = self._example(index)
            return _cropped(image, self._size, rng), label

        return _stack(self._pool.map(one, map(int, indices)))

    def in_memory(self) -> ArrayImages:
        """All of them as they are, if they have one size."""

        def one(index: int) -> tuple[np.ndarray, int]:
            image, label = self._example(index)
            return np.asarray(image), label

        try:
            return ArrayImages(*_stack(self._pool.map(one, range(len(self)))))
        except ValueError as error:
            raise UserError(f"{self._spec}: images differ in size.") from error

    def _example(self, index: int) -> tuple[Any, int]:
        """An image of Pillow's and its label."""
        from PIL import Image

        shard, offset, length = self._places[index]
        try:
            found = example.parse(records.read(self._files[shard], offset, length))
            content, label = found["image"], found["label"]
            if isinstance(content, int) or not isinstance(label, int):
                raise TypeError("image or label of another type")
            image = Image.open(io.BytesIO(content)).convert("RGB")
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"{self._spec}: record {index} ({self._files[shard].name}) has no image and label."
            ) from error
        if not 0 <= label < self._classes:
            raise UserError(
                f"{self._spec}: record {index} ({self._files[shard].name}) has the label {label}, "
                f"outside 0 … {self._classes - 1}."
            )
        return image, label


def _stack(examples: Iterable[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*examples, strict=True)
    return np.stack(images), np.array(labels, np.int32)


def _cropped(image: Any, size: int, rng: np.random.Generator | None) -> np.ndarray:
    """A random or central part of an image, brought to a size."""
    from PIL import Image

    width, height = image.size
    if rng is None:
        side = _CENTRAL * min(width, height)
        w = h = side
        left, top = (width - side) / 2, (height - side) / 2
    else:
        # Inception's crop (Szegedy et al. 2015): 8 to 100 % of the area, sides of 3:4 to 4:3.
        for _ in range(10):
            area = rng.uniform(0.08, 1.0) * width * height
            ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
            if w <= width and h <= height:
                break
        else:
            w, h = float(width), float(height)
        left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    box = (left, top, left + w, top + h)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
