"""Seeing sharpness: measures, spectrum and landscape of a loss, as the papers measure them."""

from sam_optax.analysis._alignment import Alignment, alignment
from sam_optax.analysis._dataset import DatasetLoss
from sam_optax.analysis._density import SpectralDensity, spectral_density
from sam_optax.analysis._hessian import HessianEigenvalues, hessian_eigenvalues
from sam_optax.analysis._rank import RankStatistics, kendall_tau, rank_statistics
from sam_optax.analysis._sharpness import Sharpness, adaptive_sharpness, loss_rise, sharpness
from sam_optax.analysis._stability import GradientStability, gradient_stability

__all__ = [
    "Alignment",
    "DatasetLoss",
    "GradientStability",
    "HessianEigenvalues",
    "RankStatistics",
    "Sharpness",
    "SpectralDensity",
    "adaptive_sharpness",
    "alignment",
    "gradient_stability",
    "hessian_eigenvalues",
    "kendall_tau",
    "loss_rise",
    "rank_statistics",
    "sharpness",
    "spectral_density",
]
