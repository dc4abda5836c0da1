"""Label noise."""

import numpy as np


def corrupt(labels: np.ndarray, rate: float, classes: int, rng: np.random.Generator) -> np.ndarray:
    """A copy in which exactly ``round(rate · n)`` labels are changed to a random other class."""
    chosen = rng.choice(len(labels), round(rate * len(labels)), replace=False)
    noisy = labels.copy()
    noisy[chosen] = (labels[chosen] + rng.integers(1, classes, noisy[chosen].shape)) % classes
    return noisy
