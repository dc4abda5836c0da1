"""The networks that the comparison trains, in Flax."""

import flax.linen as nn
import jax

from sam_optax.experiments.errors import UserError


class MLP(nn.Module):
    """Two hidden layers of 256 units on the flattened input."""

    classes: int
    width: int = 256

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch."""
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.classes)(x)


class CNN(nn.Module):
    """Two 3×3 convolutions of 16 and 32 channels with stride 2, and a linear layer."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        for channels in (16, 32):
            # A stride in place of pooling makes the step five times as fast on a CPU.
            x = nn.relu(nn.Conv(channels, (3, 3), strides=(2, 2))(x))
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(self.classes)(x)


MODELS: dict[str, type[nn.Module]] = {"mlp": MLP, "cnn": CNN}


def build(name: str, example_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network for examples of a shape.

    Raises:
      UserError: an unknown name, or a convolutional network for vectors.
    """
    if name not in MODELS:
        raise UserError(f"--model {name}: unknown model; use one of {', '.join(MODELS)}.")
    if name == "cnn" and len(example_shape) < 3:
        raise UserError(
            f"--model cnn: the examples are vectors of {example_shape[0]} features, a "
            "convolutional network needs images; use --model mlp."
        )
    return MODELS[name](classes=classes)
