"""Small data for the experiments' tests."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def arrays():
    """Three well separated classes: 40 training and 13 test vectors of 6 features."""
    rng = np.random.default_rng(7)
    centres = 2 * rng.normal(size=(3, 6))
    y_train, y_test = np.arange(40) % 3, np.arange(13) % 3
    return {
        "x_train": centres[y_train] + rng.normal(size=(40, 6)),
        "y_train": y_train,
        "x_test": centres[y_test] + rng.normal(size=(13, 6)),
        "y_test": y_test,
    }


@pytest.fixture(scope="session")
def archive(arrays, tmp_path_factory):
    """The path of an archive with these data."""
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, **arrays)
    return path
