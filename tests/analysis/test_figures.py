"""Figures draw what they are given, with axes that say what they are."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from nets import quadratic

from sam_optax import analysis
from sam_optax.analysis import style

ALPHAS = jnp.linspace(-1, 1, 9)


def line():
    return analysis.loss_line(quadratic([2.0]), jnp.zeros(1), jnp.ones(1), ALPHAS)


def plane(top=2.0):
    axes = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
    return analysis.loss_plane(quadratic([top, 1.0]), jnp.zeros(2), *axes, ALPHAS, ALPHAS)


def density(*eigenvalues):
    return analysis.spectral_density(quadratic(eigenvalues), jnp.ones(len(eigenvalues)))


def stability():
    loss = lambda w: jnp.sum(jnp.sin(w))
    return analysis.gradient_stability(loss, jnp.ones(3), [0.0, 0.5, 1.0], [0.0, 0.1], draws=2)


def spectra():
    return {"a": density(3.0, 1.0, 1.0, -0.5), "b": density(4.0, 2.0)}


FIGURES = {
    "lines": lambda: analysis.plot_lines({"a": line(), "b": line()}),
    "planes": lambda: analysis.plot_planes({"a": plane(), "b": plane(5.0)}),
    "spectrum": lambda: analysis.plot_spectrum(spectra()),
    "stability": lambda: analysis.plot_stability({"a": stability(), "b": stability()}),
    "ranks": lambda: analysis.plot_ranks({"a": [1.0, 2.0, 90.0], "b": [1.0, 3.0, 2.0]}, [1, 2, 3]),
    "regions": analysis.plot_regions,
    "trajectories": lambda: analysis.plot_trajectories(steps=20),
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.slow
def test_figures_are_labelled_and_drawn(name):
    """Warnings are errors here: no missing glyph, no layout that failed."""
    figure = FIGURES[name]()
    assert isinstance(figure, Figure)
    assert 5 <= figure.get_figwidth() <= 12
    assert figure._repr_png_().startswith(b"\x89PNG")
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    bottom = [axes for axes in panels if axes.xaxis.get_tick_params()["labelbottom"]]
    assert figure.get_supxlabel() or all(axes.get_xlabel() for axes in bottom)
    assert figure.get_supylabel() or panels[0].get_ylabel() or figure.texts


def test_lines_are_the_values():
    axes = analysis.plot_lines({"a": line()}).axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), line().values)


def test_planes_share_one_scale():
    figure = analysis.plot_planes({"flat": plane(), "steep": plane(8.0)}, levels=10)
    for axes in figure.axes[:2]:
        assert axes.collections[0].levels[[0, -1]] == pytest.approx([0, 4.5])


def test_ranks_show_tau_and_scale():
    figure = FIGURES["ranks"]()
    assert [axes.get_title() for axes in figure.axes] == ["τ = 1.000", "τ = 0.333"]
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "linear"]


@pytest.mark.slow
def test_regions_touch_the_contour_of_the_largest_loss():
    """What figure 1 shows: adaptive regions around w and w' reach the same loss, spheres do not."""
    figure = analysis.plot_regions(rho=0.3)
    for axes, adaptive in zip(figure.axes, (False, True, True), strict=True):
        crosses = [drawn for drawn in axes.lines if drawn.get_marker() == "x"]
        first, second = (float(np.prod(drawn.get_xydata())) for drawn in crosses)
        assert (abs(first - second) < 0.01 * first) == adaptive


@pytest.mark.parametrize(
    "figure",
    [
        # Along an axis without length there is no common scale of both.
        lambda: analysis.plot_planes({"a": plane()._replace(second=jnp.zeros(9))}),
        lambda: analysis.plot_ranks({"a": []}, []),
        lambda: analysis.plot_spectrum({"a": density(1e20, -1e20)}),
        *(
            lambda value=value: analysis.plot_planes(
                {"a": plane()._replace(values=jnp.full((9, 9), value))}
            )
            for value in (jnp.nan, 1000.0, -1e30)
        ),
    ],
)
def test_drawn_all_the_same(figure):
    assert figure()._repr_png_()


def test_errors():
    with pytest.raises(ValueError, match="rho must be in"):
        analysis.plot_regions(rho=1.5)


def test_a_spectrum_that_is_not_finite_leaves_the_others_their_scale():
    broken, found = spectra().values()
    broken = broken._replace(density=np.full_like(broken.density, np.inf))
    figure = analysis.plot_spectrum({"a": broken, "b": found})
    assert figure._repr_png_()
    assert figure.axes[0].get_ylim() == analysis.plot_spectrum({"b": found}).axes[0].get_ylim()


def test_a_method_looks_the_same_in_every_figure():
    assert style.positions(["ASAM", "SGD", "SAM, ρ = 0.05"]) == [2, 0, 1]
    assert style.positions(["mine", "R-SAM", "sam", "SAM, ρ = 0.5"]) == [0, 3, 1, 2]
    lines = analysis.plot_lines({"other": line(), "SAM": line()}).axes[0].lines
    assert [of.get_color() for of in lines] == [style.colour(0), style.colour(1)]


# Machado et al., A Physiologically-based Model for Simulation of Color Vision Deficiency, 2009.
VISION = {
    "all cones": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart(vision):
    """Distances in the CIELAB colour space, in which about 2 is what is just noticeable."""
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in style.COLOURS])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.transpose(VISION[vision]), 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(np.maximum(seen @ to_xyz.T / [0.9505, 1, 1.089], 0.008856)).T
    lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)
    distances = np.linalg.norm(lab[:, None] - lab, axis=-1) + 1e3 * np.eye(len(lab))
    assert distances.min() >= 16
