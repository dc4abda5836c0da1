"""The built-in networks: two small ones that train in seconds on a CPU."""

import flax.linen as nn
import jax

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import suggest


class MLP(nn.Module):
    """Hidden layers, two of 256 units if nothing else is said, on the flattened input."""

    classes: int
    width: int = 256
    depth: int = 2

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.classes)(x)


class CNN(nn.Module):
    """Two 3×3 convolutions of 16 and 32 channels with stride 2, and a linear layer."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for channels in (16, 32):
            # Strides instead of pooling make the step five times as fast on a CPU.
            x = nn.relu(nn.Conv(channels, (3, 3), strides=(2, 2))(x))
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(self.classes)(x)


NETWORKS = {"mlp": MLP, "cnn": CNN}


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A built-in network for examples of shape (features,) or (height, width, channels)."""
    if name not in NETWORKS:
        raise UserError(
            f"--model {name}: unknown; {suggest(name, NETWORKS)} More are in "
            "notebooks/networks.py, given as FILE.py:NAME."
        )
    if name == "cnn" and len(shape) < 3:
        raise UserError(
            f"--model cnn: the examples are vectors of {shape[0]} features, but this network needs "
            "images; use --model mlp."
        )
    return NETWORKS[name](classes)
