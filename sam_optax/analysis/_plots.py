"""Figures of the measures: spectrum, stability and rank correlation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from sam_optax.analysis import style
from sam_optax.analysis._density import SpectralDensity
from sam_optax.analysis._rank import kendall_tau
from sam_optax.analysis._stability import GradientStability

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_spectrum(
    densities: Mapping[str, SpectralDensity], *, unit: str = "eigenvalue λ of the Hessian"
) -> Figure:
    """Plots densities of the Hessian's eigenvalues one below the other, on a logarithmic scale.

    Args:
      densities: a :class:`SpectralDensity` per name. The name of a method, such as "SAM" or
        "ASAM, ρ = 1", has this method's colour of all figures.
      unit: label of the horizontal axis.

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> density = analysis.spectral_density(lambda w: jnp.sum(w**4), jnp.arange(9.0))
      >>> figure = analysis.plot_spectrum({"a quartic": density})
    """
    figure = style.figure(7.0, 0.9 + 1.6 * len(densities))
    rows = figure.subplots(len(densities), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    values = np.concatenate([found.density for found in densities.values()])
    top = float(np.max(values, where=np.isfinite(values), initial=0)) or 1.0
    looks = style.positions(densities)
    for i, axes, (name, found) in zip(looks, rows, densities.items(), strict=True):
        density = np.maximum(found.density, 1e-7 * top)
        axes.plot(found.grid, density, color=style.colour(i), linewidth=1.2)
        axes.fill_between(found.grid, density, 1e-7 * top, color=style.colour(i), alpha=0.3)
        axes.set_yscale("log")
        axes.set_ylim(1e-6 * top, 3 * top)
        largest = float(np.max(found.nodes[found.weights != 0]))
        axes.set_title(f"{name}: largest eigenvalue {largest:.3g}", fontsize="medium", loc="right")
        style.tidy(axes)
    rows[-1].set_xlabel(unit)
    figure.supylabel("share of eigenvalues per unit of λ", fontsize="medium")
    return figure


def plot_stability(
    curves: GradientStability | Mapping[str, GradientStability], *, unit: str = "loss (nats)"
) -> Figure:
    """Plots gradient stability and perturbed loss over ρ: figures 1 and 2 of the R-SAM paper.

    Args:
      curves: the result of :func:`gradient_stability`, or one per name, for a row each. Lines are
        means over the draws; bands reach from the smallest to the largest.
      unit: the loss, with its unit.

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> curves = analysis.gradient_stability(
      ...     lambda w: jnp.sum(jnp.sin(w)), jnp.zeros(2), [0.0, 0.5, 1.0], draws=2)
      >>> figure = analysis.plot_stability(curves)
    """
    named = curves if isinstance(curves, Mapping) else {"": curves}
    figure = style.figure(9.0, 0.4 + 3.4 * len(named))
    rows = figure.subplots(len(named), 2, sharex=True, squeeze=False)
    for (left, right), (name, found) in zip(rows, named.items(), strict=True):
        for i, gamma in enumerate(np.asarray(found.gammas)):
            label = f"γ² = {gamma**2:.3g}" if gamma > 0 else "no noise"
            for axes, values in ((left, found.cosine[i]), (right, found.loss[i])):
                low, high = np.min(values, axis=0), np.max(values, axis=0)
                axes.plot(found.rhos, np.mean(values, axis=0), label=label, **style.line(i))
                band = {"color": style.colour(i), "alpha": 0.12, "linewidth": 0}
                axes.fill_between(found.rhos, low, high, **band)
        left.set_ylabel("cosine of g(ŵ) and g(ŵ + ρ g(ŵ)/‖g(ŵ)‖)")
        right.set_ylabel(f"{unit} at ŵ + ρ g(ŵ)/‖g(ŵ)‖")
        for axes in (left, right):
            axes.set_title(name, fontsize="medium")
            style.tidy(axes)
    for left in rows[1:, 0]:
        left.sharey(rows[0, 0])
    for axes in rows[-1]:
        axes.set_xlabel("radius ρ, in units of the weights")
    handles = rows[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(handles[0]), frameon=False)
    return figure


def plot_ranks(
    measures: Mapping[str, ArrayLike], gap: ArrayLike, *, unit: str = "generalization gap (nats)"
) -> Figure:
    """Plots measures against the generalization gap, with Kendall's τ: figure 2 of the ASAM paper.

    Args:
      measures: (runs,) values per name (with its unit), one panel each.
      gap: (runs,) generalization gaps.
      unit: label of the vertical axis.

    Returns:
      A matplotlib figure. Axes of positive measures that span more than a factor of 20 are
      logarithmic.

    Raises:
      ValueError: lengths differ, or values are not finite.

    Example:
      >>> from sam_optax import analysis
      >>> figure = analysis.plot_ranks({"sharpness (nats)": [1.0, 2.0, 4.0]}, [0.1, 0.3, 0.2])
    """
    figure = style.figure(3.4 * len(measures) + 0.8, 3.4)
    grid = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for i, (axes, (name, values)) in enumerate(zip(grid, measures.items(), strict=True)):
        tau = kendall_tau(values, gap)
        axes.scatter(
            values,
            gap,
            color=style.colour(i),
            marker=style.marker(i),
            s=24,
            alpha=0.75,
            linewidth=0,
        )
        if np.size(values) and np.max(values) > 20 * np.min(values) > 0:
            axes.set_xscale("log")
        axes.set_xlabel(name)
        axes.set_title(f"τ = {tau:.3f}", fontsize="medium")
        style.tidy(axes)
    grid[0].set_ylabel(unit)
    return figure
