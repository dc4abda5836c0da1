"""Keys of the measures: an integer seed is the key of that seed."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from sam_optax import analysis

PARAMS = {"a": jnp.arange(1.0, 4.0)}
MEASURES = {
    "sharpness": lambda loss, key: analysis.sharpness(
        loss, PARAMS, 0.1, restarts=2, steps=2, key=key
    ),
    "gradient_stability": lambda loss, key: analysis.gradient_stability(
        loss, PARAMS, [0.1], [0.1], draws=2, key=key
    ),
    "random_direction": lambda loss, key: analysis.random_direction(PARAMS, key=key),
}


def loss(w):
    return jnp.sum(w["a"] ** 3)


@pytest.mark.parametrize("name", MEASURES)
def test_a_seed_is_the_key_of_that_seed(name):
    measure = MEASURES[name]
    assert_same(measure(loss, 5), measure(loss, jax.random.key(5)))
    with pytest.raises(TypeError, match=r"key must be an integer seed or one PRNG key.*True"):
        measure(loss, True)
