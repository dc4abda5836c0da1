"""Measures of sharpness: Hessian spectrum, landscape and sharpness of a loss, as in the papers."""

from sam_optax.analysis._alignment import Alignment, alignment
from sam_optax.analysis._dataset import DatasetLoss
from sam_optax.analysis._density import SpectralDensity, spectral_density
from sam_optax.analysis._directions import (
    between,
    filter_normalized,
    gradient_direction,
    random_direction,
)
from sam_optax.analysis._hessian import HessianEigenvalues, hessian_eigenvalues
from sam_optax.analysis._landscape import LossLine, LossPlane, loss_line, loss_plane
from sam_optax.analysis._plots import plot_ranks, plot_spectrum, plot_stability
from sam_optax.analysis._rank import RankStatistics, kendall_tau, rank_statistics
from sam_optax.analysis._rise import loss_rise
from sam_optax.analysis._sharpness import Sharpness, adaptive_sharpness, sharpness
from sam_optax.analysis._slice_plots import plot_lines, plot_planes
from sam_optax.analysis._stability import GradientStability, gradient_stability
from sam_optax.analysis._toy import toy_loss, toy_trajectory
from sam_optax.analysis._toy_plots import plot_regions, plot_trajectories

__all__ = [
    "Alignment",
    "DatasetLoss",
    "GradientStability",
    "HessianEigenvalues",
    "LossLine",
    "LossPlane",
    "RankStatistics",
    "Sharpness",
    "SpectralDensity",
    "adaptive_sharpness",
    "alignment",
    "between",
    "filter_normalized",
    "gradient_direction",
    "gradient_stability",
    "hessian_eigenvalues",
    "kendall_tau",
    "loss_line",
    "loss_plane",
    "loss_rise",
    "plot_lines",
    "plot_planes",
    "plot_ranks",
    "plot_regions",
    "plot_spectrum",
    "plot_stability",
    "plot_trajectories",
    "random_direction",
    "rank_statistics",
    "sharpness",
    "spectral_density",
    "toy_loss",
    "toy_trajectory",
]
