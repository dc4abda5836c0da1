"""Training states and steps for Flax, Linen and NNX; needs the ``flax`` extra."""

from sam_optax.training._nnx import nnx_grad_fn
from sam_optax.training._train_state import TrainState

__all__ = ["TrainState", "nnx_grad_fn"]
