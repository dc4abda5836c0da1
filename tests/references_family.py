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


def gsam(rho: float | Callable[[int], float], alpha: float) -> GradientOf:
    """GSAM, algorithm 1: ∇f_p − α ∇f_⊥, with ∇f = ∇f_∥ + ∇f_⊥ along and across ∇f_p."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        radius = rho(t) if callable(rho) else rho
        f = grad(w)
        f_p = grad(w + radius * unit(f))
        across = f - project(f, f_p)
        return f_p - alpha * across

    return gradient_of


def gsam_radius(lr: float, rho_min: float, rho_max: float, lr_min: float, lr_max: float) -> float:
    """GSAM, algorithm 1, line 3, within [ρ_min, ρ_max]."""
    rho = rho_min + (rho_max - rho_min) * (lr - lr_min) / (lr_max - lr_min)
    return min(max(rho, rho_min), rho_max)


def looksam(rho: float, k: int, alpha: float) -> GradientOf:
    """LookSAM, algorithm 1."""
    g_v = np.zeros(0)

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        nonlocal g_v
        g = grad(w)
        if t % k == 0:
            g_s = grad(w + rho * unit(g))
            g_v = g_s - project(g_s, g)
            return g_s
        return g + alpha * np.linalg.norm(g) / np.linalg.norm(g_v) * g_v

    return gradient_of


def fisher_step(g: Vector, f: Vector, rho: float, eta: float) -> Vector:
    """Fisher SAM: γ F⁻¹g/√(gᵀF⁻¹g) with F = I + η diag(f)."""
    inverse = 1 / (1 + eta * f)
    return rho * inverse * g / np.sqrt(np.sum(g * inverse * g))


def fisher_sam(rho: float, eta: float) -> GradientOf:
    return lambda t, w, grad: grad(w + fisher_step(grad(w), grad(w) ** 2, rho, eta))


def vasso(rho: float, theta: float, *, from_zero: bool = False) -> GradientOf:
    """VaSSO: d_t = (1 − θ) d_{t−1} + θ g_t from d_1 = g_1 or from d_0 = 0, ε = ρ d/‖d‖."""
    past: list[Vector] = []

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        past.append(grad(w))
        weights = theta * (1 - theta) ** np.arange(len(past))[::-1]
        if not from_zero:
            weights[0] /= theta
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


def mixed(rho: float, alpha: float) -> GradientOf:
    """(1 − α) ∇L(w) + α ∇L(w + ε)."""
    return lambda t, w, grad: (1 - alpha) * grad(w) + alpha * sam(rho)(t, w, grad)


def wsam_decoupled(
    w: Vector, gradients: Sequence[Grad], rho: float, gamma: float, lr: float, momentum: float
) -> list[Vector]:
    """WSAM, decoupled: momentum of the plain gradient, and −η γ/(1−γ) (g_s − g) beside it."""
    velocity, points = np.zeros_like(w), []
    for t, grad in enumerate(gradients):
        g, g_s = grad(w), sam(rho)(t, w, grad)
        velocity = momentum * velocity + g
        w = w - lr * (velocity + gamma / (1 - gamma) * (g_s - g))
        points.append(w)
    return points


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


def ssam_fisher(rho: float, sparsity: float, every: int, mask_log: list[Vector]) -> GradientOf:
    """SSAM-F: the mask of the largest squared gradients, anew every so many steps."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        g = grad(w)
        if t % every == 0:
            mask_log.append(top(g**2, round((1 - sparsity) * g.size)))
        return grad(w + rho * unit(g) * mask_log[-1])

    return gradient_of
