"""Rank statistics: how well a measure orders trained networks by their generalization gap."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class RankStatistics(NamedTuple):
    """Rank correlation of a measure with the generalization gap, as in table 1 of the ASAM paper.

    Attributes:
      tau: Kendall's τ over all runs.
      psi: ψ_i of each hyperparameter; NaN if τ is undefined in all of its groups.
      average: Ψ, the mean of those ψ_i that are defined.
      groups: for each hyperparameter, the number of groups that its ψ_i averages.
      skipped: for each hyperparameter, the number of groups without a τ: a single run, or a measure
        or a gap that is equal for all runs.
    """

    tau: float
    psi: dict[str, float]
    average: float
    groups: dict[str, int]
    skipped: dict[str, int]


def kendall_tau(measure: ArrayLike, gap: ArrayLike) -> float:
    r"""Kendall's rank correlation τ of a measure and the generalization gap over a set of runs.

    .. math::
        \tau = \frac{1}{\binom{n}{2}} \sum_{i < j}
        \mathrm{sign}(\mu_i - \mu_j)\, \mathrm{sign}(g_i - g_j),

    in [−1, 1]. With ties the denominator is √((pairs without a tie in μ)(pairs without a tie in
    g)), SciPy's τ_b, so that perfect agreement on the pairs that can be ordered still gives 1.

    Args:
      measure: (runs,) values μ, such as sharpness.
      gap: (runs,) values g, such as test loss minus training loss.

    Returns:
      τ; NaN if there are fewer than two runs, or if all values of either are equal.

    Raises:
      ValueError: lengths that differ, or values that are not finite.

    Example:
      >>> from sam_optax import analysis
      >>> print(f"{analysis.kendall_tau([1.0, 2.0, 3.0, 4.0], [0.1, 0.3, 0.2, 0.4]):.3f}")
      0.667

    References:
      Kendall, `A New Measure of Rank Correlation <https://doi.org/10.2307/2332226>`_, 1938.
    """
    values = _checked({"measure": measure, "gap": gap})
    return _tau(values["measure"], values["gap"])


def rank_statistics(
    measure: ArrayLike,
    gap: ArrayLike,
    hyperparameters: Mapping[str, Sequence[Hashable]],
    *,
    hold: Sequence[str] = (),
) -> RankStatistics:
    r"""Computes how well a measure ranks runs by their generalization gap: τ and granulated τ.

    The granulated coefficient of hyperparameter i compares only runs that differ in nothing else,
    so that a measure gains nothing by detecting another hyperparameter:

    .. math::
        \psi_i = \frac{1}{m_i} \sum_{\theta_{-i}} \tau(\{(\mu, g) : \theta_{-i}\ \text{fixed}\}),
        \qquad \Psi = \frac{1}{n} \sum_{i=1}^n \psi_i .

    Groups in which τ is undefined (a single run, or nothing but ties in the measure or in the gap)
    are left out of the mean and counted; a ψ_i without any other group is left out of Ψ. Jiang et
    al. count such groups, and tied pairs, as 0.

    Args:
      measure: (runs,) values μ, such as sharpness.
      gap: (runs,) values g, such as test loss minus training loss.
      hyperparameters: (runs,) values per name.
      hold: names that are kept fixed within groups but get no ψ, such as ``"seed"``. It is needed
        if a setting was run more than once.

    Returns:
      :class:`RankStatistics`.

    Raises:
      ValueError: lengths that differ, values that are not finite (leave out runs that diverged),
        no hyperparameters, an unknown name in ``hold``, or two runs with the same setting.

    Example:
      >>> from sam_optax import analysis
      >>> found = analysis.rank_statistics(
      ...     measure=[1.0, 2.0, 3.0, 4.0], gap=[0.1, 0.3, 0.2, 0.4],
      ...     hyperparameters={"learning rate": [1, 1, 2, 2], "dropout": [0, 0.1, 0, 0.1]})
      >>> print(f"{found.tau:.2f}", found.psi, found.average)
      0.67 {'learning rate': 1.0, 'dropout': 1.0} 1.0

    References:
      Jiang et al., `Fantastic Generalization Measures and Where to Find Them
      <https://arxiv.org/abs/1912.02178>`_, 2019.
      Kwon et al., `ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
      Deep Neural Networks <https://arxiv.org/abs/2102.11600>`_, 2021, section 3.
    """
    values = _checked({"measure": measure, "gap": gap})
    names = [name for name in hyperparameters if name not in hold]
    unknown = sorted(set(hold) - set(hyperparameters))
    if unknown:
        raise ValueError(f"hold has {unknown}, must be among {sorted(hyperparameters)}.")
    if not names:
        raise ValueError("hyperparameters must name at least one that is not in hold.")
    for name, column in hyperparameters.items():
        if len(column) != len(values["gap"]):
            raise ValueError(
                f"hyperparameters[{name!r}] must have a value for each of the "
                f"{len(values['gap'])} runs, got {len(column)}."
            )
    settings = list(zip(*hyperparameters.values(), strict=True))
    if len(set(settings)) < len(settings):
        raise ValueError(
            "two runs have the same hyperparameters: add what tells them apart, such as "
            "hyperparameters={..., 'seed': seeds} with hold=('seed',)."
        )
    psi, groups, skipped = {}, {}, {}
    for name in names:
        position = list(hyperparameters).index(name)
        members: dict[Any, list[int]] = {}
        for run, setting in enumerate(settings):
            members.setdefault(setting[:position] + setting[position + 1 :], []).append(run)
        taus = [_tau(values["measure"][runs], values["gap"][runs]) for runs in members.values()]
        defined = [tau for tau in taus if not math.isnan(tau)]
        psi[name] = float(np.mean(defined)) if defined else math.nan
        groups[name], skipped[name] = len(defined), len(taus) - len(defined)
    coefficients = [value for value in psi.values() if not math.isnan(value)]
    average = float(np.mean(coefficients)) if coefficients else math.nan
    return RankStatistics(_tau(values["measure"], values["gap"]), psi, average, groups, skipped)


def _tau(measure: np.ndarray, gap: np.ndarray) -> float:
    from scipy import stats  # takes a second to import

    if len(measure) < 2 or np.ptp(measure) == 0 or np.ptp(gap) == 0:
        return math.nan
    return float(stats.kendalltau(measure, gap).statistic)


def _checked(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(values, np.float64) for name, values in columns.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"measure and gap must be vectors of one length, got shapes {shapes}.")
    for name, array in arrays.items():
        if not np.all(np.isfinite(array)):
            raise ValueError(
                f"{name} must be finite, got {array[~np.isfinite(array)][0]} for run "
                f"{int(np.argmin(np.isfinite(array)))}: leave out runs that diverged."
            )
    return arrays
