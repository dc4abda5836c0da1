"""Sharpness-aware minimization for JAX, as optax gradient transformations."""

from sam_optax._alternating import AlternatingState, alternating, eval_params
from sam_optax._asam import asam
from sam_optax._examples import part_of_batch, reweighted_ascent, rising_samples
from sam_optax._fisher_sam import fisher_sam
from sam_optax._fsam import FullGradientState, fsam, remove_full_gradient
from sam_optax._hyperparameters import ScheduleState
from sam_optax._info import StepInfo
from sam_optax._looksam import ReuseOrthogonalState, looksam, reuse_orthogonal
from sam_optax._low_pass import low_pass
from sam_optax._mix_gradients import decoupled_sharpness, mix_gradients
from sam_optax._momentum_start import momentum_start
from sam_optax._parallel import accumulate, local
from sam_optax._passes import FirstPassState, pop_first_pass
from sam_optax._perturb_only import perturb_only
from sam_optax._perturbation import (
    MomentumStartState,
    Perturbation,
    RandomStartState,
    as_perturbation,
)
from sam_optax._precision import PerturbationSurvival, perturbation_survival
from sam_optax._project_out import project_out
from sam_optax._random_mask import RandomMaskState, random_mask
from sam_optax._rounding import StochasticRoundingState, stochastic_rounding
from sam_optax._rsam import random_start, rsam
from sam_optax._sam import sam
from sam_optax._sharpness_aware import SharpnessAwareState, sharpness_aware
from sam_optax._smooth_gradient import SmoothGradientState, smooth_gradient
from sam_optax._sparsify import SparsifyState, sparsify
from sam_optax._surrogate_gap import rho_from_learning_rate, surrogate_gap
from sam_optax._when import RandomWhen, after, bernoulli, every

__version__ = "0.1.0"

__all__ = [
    "AlternatingState",
    "FirstPassState",
    "FullGradientState",
    "MomentumStartState",
    "Perturbation",
    "PerturbationSurvival",
    "RandomMaskState",
    "RandomStartState",
    "RandomWhen",
    "ReuseOrthogonalState",
    "ScheduleState",
    "SharpnessAwareState",
    "SmoothGradientState",
    "SparsifyState",
    "StepInfo",
    "StochasticRoundingState",
    "accumulate",
    "after",
    "alternating",
    "as_perturbation",
    "asam",
    "bernoulli",
    "decoupled_sharpness",
    "eval_params",
    "every",
    "fisher_sam",
    "fsam",
    "local",
    "looksam",
    "low_pass",
    "mix_gradients",
    "momentum_start",
    "part_of_batch",
    "perturb_only",
    "perturbation_survival",
    "pop_first_pass",
    "project_out",
    "random_mask",
    "random_start",
    "remove_full_gradient",
    "reuse_orthogonal",
    "reweighted_ascent",
    "rho_from_learning_rate",
    "rising_samples",
    "rsam",
    "sam",
    "sharpness_aware",
    "smooth_gradient",
    "sparsify",
    "stochastic_rounding",
    "surrogate_gap",
]
