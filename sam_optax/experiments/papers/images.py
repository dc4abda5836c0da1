"""Sets of labelled images, in memory or on disk."""

from typing import NamedTuple, Protocol

import numpy as np


class Images(Protocol):
    """Images with labels."""

    def __len__(self) -> int:
        """The number of examples."""

    def batch(
        self, indices: np.ndarray, seed: tuple[int, ...] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Some of the examples.

        Args:
          indices: which.
          seed: of random crops that have to be taken while decoding; ``None`` for evaluation.

        Returns:
          Images, uint8, (len(indices), size, size, 3), and labels, int32.
        """


class ArrayImages:
    """Images of one size in memory.

    Args:
      images: uint8, (examples, size, size, 3).
      labels: integers, (examples,).
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.labels = labels.astype(np.int32)

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.labels)

    def batch(
        self, indices: np.ndarray, seed: tuple[int, ...] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`Images`; nothing is random here."""
        del seed
        return self.images[indices], self.labels[indices]


class ImageDataset(NamedTuple):
    """Training and test images.

    Attributes:
      name: as given on the command line.
      train: for training.
      test: for testing.
      classes: number of classes.
      size: pixels of an image's side.
      mean: of each channel, in [0, 1].
      std: of each channel, in [0, 1].
      sha256: digest of what the examples are.
    """

    name: str
    train: Images
    test: Images
    classes: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str


def statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, in [0, 1], without a copy of the images in floats."""
    values = np.arange(256) / 255
    counts = [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
    shares = np.array([count / count.sum() for count in counts])
    mean = shares @ values
    std = np.sqrt(shares @ values**2 - mean**2)
    return tuple(map(float, mean)), tuple(float(s) or 1.0 for s in std)
