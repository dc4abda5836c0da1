"""NumPy transcriptions of the wider family's formulas, in float64, on the tree as one vector.

As in ``references``: as plainly as the papers print them, sharing nothing with the library. Each
function returns ``gradient_of(t, w, grad)``: what the base optimizer is handed at step t.
"""

from collections.abc import Callable, Sequence

import numpy as np

Vector = np.ndarray
Grad = Callable[[Vector], Vector]
GradientOf = Callable[[int, Vector, Grad], Vector]


def train(
    w: Vector, gradients: Sequence[Grad], gradient_of: GradientOf, lr: float, momentum: float
) -> list[Vector]:
    """SGD with momentum, driven by a method: w after each step."""
    velocity, points = np.zeros_like(w), []
    for t, grad in enumerate(gradients):
        velocity = momentum * velocity + gradient_of(t, w, grad)
        w = w - lr * velocity
        points.append(w)
    return points


def unit(g: Vector) -> Vector:
    """g/‖g‖, 0 for 0."""
    length = np.sqrt(np.sum(g**2))
    return g / length if length > 0 else g


def project(a: Vector, b: Vector) -> Vector:
    """The part of a along b."""
    return np.dot(a, b) / np.dot(b, b) * b


def sam(rho: float) -> GradientOf:
    return lambda t, w, grad: grad(w + rho * unit(grad(w)))


def fisher_step(g: Vector, f: Vector, rho: float, eta: float) -> Vector:
    """Fisher SAM: γ F⁻¹g/√(gᵀF⁻¹g) with F = I + η diag(f)."""
    inverse = 1 / (1 + eta * f)
    return rho * inverse * g / np.sqrt(np.sum(g * inverse * g))


def vasso(rho: float, theta: float) -> GradientOf:
    """VaSSO: d_t = (1 − θ) d_{t−1} + θ g_t from d_0 = 0, ε = ρ d/‖d‖."""
    past: list[Vector] = []

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        past.append(grad(w))
        weights = theta * (1 - theta) ** np.arange(len(past))[::-1]
        return grad(w + rho * unit(weights @ np.stack(past)))

    return gradient_of


def momentum_ascent(rho: float, decay: float, sign: float = 1.0) -> GradientOf:
    """Ascent along the average of the gradients that past steps have seen."""
    seen: list[Vector] = []

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        ages = np.arange(len(seen))[::-1]
        m = sum((1 - decay) * decay**age * g for age, g in zip(ages, seen, strict=True))
        g = grad(w + sign * rho * unit(m)) if seen else grad(w)
        seen.append(g)
        return g

    return gradient_of


def sam_noise(rho: float, full: Sequence[Vector]) -> GradientOf:
    """F-SAM supplement A5: ascent along Proj⊥ of the gradient on the full one."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        g = grad(w)
        return grad(w + rho * unit(g - project(g, full[t])))

    return gradient_of


def top(scores: Vector, count: int) -> Vector:
    """Marks the ``count`` largest."""
    marked = np.zeros(scores.shape, bool)
    marked[np.argsort(scores)[::-1][:count]] = True
    return marked
