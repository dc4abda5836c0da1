"""Sharpness-aware minimization for JAX, as optax gradient transformations."""

from sam_optax._combinators.alternating import AlternatingState, alternating
from sam_optax._combinators.eval_params import eval_params
from sam_optax._combinators.first_pass import FirstPassState, pop_first_pass
from sam_optax._combinators.lookbehind import LookbehindState, lookbehind
from sam_optax._combinators.repeat_batches import repeat_batches
from sam_optax._combinators.sharpness_aware import SharpnessAwareState, sharpness_aware
from sam_optax._combinators.simultaneous import SimultaneousState, simultaneous
from sam_optax._combinators.step_info import StepInfo
from sam_optax._descent.away_from_eigenvector import away_from_eigenvector
from sam_optax._descent.match_ascent_norm import match_ascent_norm
from sam_optax._descent.mix_gradients import decoupled_sharpness, mix_gradients
from sam_optax._descent.reuse_orthogonal import ReuseOrthogonalState, reuse_orthogonal
from sam_optax._descent.scale_by_precision import scale_by_precision
from sam_optax._descent.surrogate_gap import surrogate_gap
from sam_optax._descent.toward_maximum import TowardMaximumState, toward_maximum
from sam_optax._gradients.accumulate import accumulate
from sam_optax._gradients.part_of_batch import part_of_batch
from sam_optax._gradients.reweighted_ascent import reweighted_ascent
from sam_optax._gradients.rising_samples import rising_samples
from sam_optax._gradients.sharp_loss import sharp_loss
from sam_optax._internal.biases import bias_leaves
from sam_optax._internal.devices import local
from sam_optax._internal.hyperparameters import ScheduleState
from sam_optax._internal.start_state import StartState
from sam_optax._perturbations.asam import asam
from sam_optax._perturbations.bsam import BsamState, bsam
from sam_optax._perturbations.fisher_sam import fisher_sam
from sam_optax._perturbations.fsam import fsam
from sam_optax._perturbations.limit_rise import limit_rise
from sam_optax._perturbations.low_pass import low_pass
from sam_optax._perturbations.momentum_start import MomentumStartState, momentum_start
from sam_optax._perturbations.perturb_only import perturb_only
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation
from sam_optax._perturbations.perturbation_survival import (
    PerturbationSurvival,
    perturbation_survival,
)
from sam_optax._perturbations.project_out import project_out
from sam_optax._perturbations.random_mask import RandomMaskState, random_mask
from sam_optax._perturbations.random_start import RandomStartState, random_start
from sam_optax._perturbations.remove_full_gradient import FullGradientState, remove_full_gradient
from sam_optax._perturbations.rsam import rsam
from sam_optax._perturbations.sam import sam
from sam_optax._perturbations.smooth_gradient import SmoothGradientState, smooth_gradient
from sam_optax._perturbations.sparsify import SparsifyState, sparsify
from sam_optax._perturbations.stochastic_rounding import (
    StochasticRoundingState,
    stochastic_rounding,
)
from sam_optax._perturbations.zscore_filter import zscore_filter
from sam_optax._schedules.above_average import AboveAverageState, above_average
from sam_optax._schedules.rho_from_learning_rate import rho_from_learning_rate
from sam_optax._schedules.when import GradNormWhen, RandomWhen, after, bernoulli, every

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022
    # Combinators and their companions.
    "alternating",
    "eval_params",
    "lookbehind",
    "pop_first_pass",
    "repeat_batches",
    "sharpness_aware",
    "simultaneous",
    # Methods: perturbations with a name in a paper.
    "asam",
    "bsam",
    "fisher_sam",
    "fsam",
    "low_pass",
    "rsam",
    "sam",
    # Pieces that compose or wrap perturbations.
    "Perturbation",
    "as_perturbation",
    "bias_leaves",
    "limit_rise",
    "momentum_start",
    "perturb_only",
    "perturbation_survival",
    "project_out",
    "random_mask",
    "random_start",
    "remove_full_gradient",
    "smooth_gradient",
    "sparsify",
    "stochastic_rounding",
    "zscore_filter",
    # Transformations of the sharp gradient, for descent=.
    "away_from_eigenvector",
    "decoupled_sharpness",
    "match_ascent_norm",
    "mix_gradients",
    "reuse_orthogonal",
    "scale_by_precision",
    "surrogate_gap",
    "toward_maximum",
    # Gradient functions.
    "accumulate",
    "local",
    "part_of_batch",
    "reweighted_ascent",
    "rising_samples",
    "sharp_loss",
    # Schedules of the radius, and of the steps that perturb.
    "GradNormWhen",
    "RandomWhen",
    "above_average",
    "after",
    "bernoulli",
    "every",
    "rho_from_learning_rate",
    # States, and other records of a step.
    "AboveAverageState",
    "AlternatingState",
    "BsamState",
    "FirstPassState",
    "FullGradientState",
    "LookbehindState",
    "MomentumStartState",
    "PerturbationSurvival",
    "RandomMaskState",
    "RandomStartState",
    "ReuseOrthogonalState",
    "ScheduleState",
    "SharpnessAwareState",
    "SimultaneousState",
    "SmoothGradientState",
    "SparsifyState",
    "StartState",
    "StepInfo",
    "StochasticRoundingState",
    "TowardMaximumState",
]
