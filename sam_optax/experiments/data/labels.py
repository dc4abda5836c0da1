"""Label noise."""

import numpy as np


def corrupt(labels: np.ndarray, rate: float, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Symmetric label noise: a share of the labels moves to another class, uniformly.

    Args:
      labels: integers, (examples,).
      rate: share of the labels that becomes wrong, in [0, 1); exactly ``round(rate · n)`` of
        them do.
      classes: number of classes, at least 2.
      rng: source of the draw.

    Returns:
      A corrupted copy.
    """
    chosen = rng.choice(len(labels), round(rate * len(labels)), replace=False)
    noisy = labels.copy()
    noisy[chosen] = (labels[chosen] + rng.integers(1, classes, len(chosen))) % classes
    return noisy
