"""Seeing sharpness: measures, spectrum and landscape of a loss, as the papers measure them."""

from sam_optax.analysis._dataset import DatasetLoss
from sam_optax.analysis._sharpness import Sharpness, adaptive_sharpness, loss_rise, sharpness

__all__ = ["DatasetLoss", "Sharpness", "adaptive_sharpness", "loss_rise", "sharpness"]
