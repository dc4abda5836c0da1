"""Seeing sharpness: measures, spectrum and landscape of a loss, as the papers measure them."""

from sam_optax.analysis._dataset import DatasetLoss
from sam_optax.analysis._density import SpectralDensity, spectral_density
from sam_optax.analysis._hessian import HessianEigenvalues, hessian_eigenvalues
from sam_optax.analysis._sharpness import Sharpness, adaptive_sharpness, loss_rise, sharpness

__all__ = [
    "DatasetLoss",
    "HessianEigenvalues",
    "Sharpness",
    "SpectralDensity",
    "adaptive_sharpness",
    "hessian_eigenvalues",
    "loss_rise",
    "sharpness",
    "spectral_density",
]
