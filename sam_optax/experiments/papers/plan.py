"""How much of it: examples, epochs and steps, at full size or scaled down."""

import dataclasses

import numpy as np

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers.images import ImageDataset
from sam_optax.experiments.papers.settings import Settings


@dataclasses.dataclass(frozen=True)
class Plan:
    """The extent of a run, and every random choice of examples in it.

    Attributes:
      train: the training examples in use, indices; all of them at scale 1.
      test: the test examples in use.
      shift: what label noise adds to each training example's label, modulo the classes; by index
        of the data set.
      epochs: passes over ``train``.
      batch_size: examples in a step.
      groups: equal parts of a batch, each with a perturbation of its own.
      warmup_steps: steps in which the learning rate rises.
      seed: of the order of examples.
      shrunk: what is smaller than the settings say, in words; empty at scale 1.
    """

    train: np.ndarray
    test: np.ndarray
    shift: np.ndarray
    epochs: int
    batch_size: int
    groups: int
    warmup_steps: int
    seed: int
    shrunk: tuple[str, ...]

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; what is left over of the examples stays unused in it."""
        return len(self.train) // self.batch_size

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.epochs * self.steps_per_epoch

    def order(self, epoch: int) -> np.ndarray:
        """The examples of each step of an epoch, (steps, batch_size), indices."""
        order = np.random.default_rng([self.seed, 1, epoch]).permutation(self.train)
        return order[: self.steps_per_epoch * self.batch_size].reshape(-1, self.batch_size)


def make(settings: Settings, dataset: ImageDataset, scale: float, seed: int, devices: int) -> Plan:
    """The plan of a run.

    Args:
      settings: the settings.
      dataset: the data.
      scale: share of epochs, examples and warm-up, in (0, 1].
      seed: of the order of examples and the label noise, and of which examples are left out.
      devices: how many share each group of a batch. Where the batch size exceeds the examples, the
        groups become as large as the devices can share; there are as many as before.

    Raises:
      UserError: the scale is out of range, or too small, or the devices cannot share a group.
    """
    if not 0 < scale <= 1:
        raise UserError(f"--scale {scale:g}: use a number in (0, 1].")
    train, test = (
        _some(len(images), scale, [7, i]) for i, images in enumerate((dataset.train, dataset.test))
    )
    asked = settings["batch_size"]
    if scale == 1 and asked > len(train):
        raise UserError(
            f"--batch-size {asked}: there are {len(train)} training examples; use at most as many."
        )
    groups = asked // settings["m"]
    share = devices * groups
    batch_size = asked if asked <= len(train) else max(1, len(train) // share) * share
    if batch_size > len(train):
        sharing = f"a batch of {groups} groups (--m)" if groups > 1 else "a batch"
        raise UserError(
            f"--scale {scale:g}: leaves {len(train)} training examples, fewer than the {devices} "
            f"devices that share {sharing} need; use a larger scale or --devices 1."
        )
    if batch_size % devices:
        raise UserError(
            f"--batch-size {batch_size}: {devices} devices share each batch; use a multiple of "
            f"{devices}, or fewer --devices."
        )
    m = batch_size // groups
    if m % devices:
        raise UserError(
            f"--m {m}: {devices} devices share each group of examples; use a multiple of "
            f"{devices} that divides the batch size, {batch_size}, or fewer --devices."
        )
    epochs = max(1, round(scale * settings["epochs"]))
    steps = epochs * (len(train) // batch_size)
    full = settings["epochs"] * (len(dataset.train) // min(asked, len(dataset.train)))
    warmup = settings["warmup_steps"]
    if scale < 1:  # the same share of the steps
        warmup = round(warmup * steps / full)
    extents = [
        ("epochs", epochs, settings["epochs"]),
        ("training examples", len(train), len(dataset.train)),
        ("test examples", len(test), len(dataset.test)),
        ("examples in a batch", batch_size, asked),
        ("warm-up steps", warmup, settings["warmup_steps"]),
    ]
    if groups > 1:
        extents.insert(4, ("examples that share a perturbation", m, settings["m"]))
    shrunk = tuple(f"{n:,} of {full:,} {what}" for what, n, full in extents if n != full)
    shift = _noise(len(dataset.train), train, settings["label_noise"], dataset.classes, seed)
    return Plan(train, test, shift, epochs, batch_size, groups, warmup, seed, shrunk)


def _some(examples: int, scale: float, seed: list[int]) -> np.ndarray:
    """A share of the examples, the same in every run."""
    order = np.random.default_rng(seed).permutation(examples)
    return np.sort(order[: max(1, round(scale * examples))])


def _noise(examples: int, used: np.ndarray, rate: float, classes: int, seed: int) -> np.ndarray:
    """Symmetric label noise: exactly ``round(rate · n)`` labels in use move to another class."""
    rng = np.random.default_rng([seed, 0])
    shift = np.zeros(examples, np.int32)
    chosen = rng.choice(used, round(rate * len(used)), replace=False)
    shift[chosen] = rng.integers(1, classes, len(chosen))
    return shift
