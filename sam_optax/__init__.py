"""Sharpness-aware minimization for JAX, as optax gradient transformations."""

from sam_optax._alternating import AlternatingState, alternating, eval_params
from sam_optax._asam import asam
from sam_optax._fsam import FullGradientState, fsam, remove_full_gradient
from sam_optax._hyperparameters import ScheduleState
from sam_optax._parallel import accumulate, local
from sam_optax._passes import FirstPassState, pop_first_pass
from sam_optax._perturb_only import perturb_only
from sam_optax._perturbation import Perturbation, RandomStartState, as_perturbation
from sam_optax._precision import PerturbationSurvival, perturbation_survival
from sam_optax._rounding import StochasticRoundingState, stochastic_rounding
from sam_optax._rsam import random_start, rsam
from sam_optax._sam import sam
from sam_optax._sharpness_aware import SharpnessAwareState, sharpness_aware
from sam_optax._when import after, every

__version__ = "0.1.0"

__all__ = [
    "AlternatingState",
    "FirstPassState",
    "FullGradientState",
    "Perturbation",
    "PerturbationSurvival",
    "RandomStartState",
    "ScheduleState",
    "SharpnessAwareState",
    "StochasticRoundingState",
    "accumulate",
    "after",
    "alternating",
    "as_perturbation",
    "asam",
    "eval_params",
    "every",
    "fsam",
    "local",
    "perturb_only",
    "perturbation_survival",
    "pop_first_pass",
    "random_start",
    "remove_full_gradient",
    "rsam",
    "sam",
    "sharpness_aware",
    "stochastic_rounding",
]
