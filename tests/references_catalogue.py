"""NumPy transcriptions of the catalogue's methods, in float64, on the tree as one vector.

As in ``references_family``, whose ``GradientOf`` most of them return; the others, whose step is not
that of SGD with momentum, return w after each step.
"""

from collections.abc import Callable, Sequence

import numpy as np
from references_family import Grad, GradientOf, Vector, project, sam, unit

Leaves = Sequence[Vector]
OfVector = Callable[[Vector], Vector]
Losses = Sequence[Callable[[Vector], float]]


def asam(rho: float, eta: float) -> GradientOf:
    """ASAM, elementwise: ε = ρ T² g/‖T g‖ with T = |w| + η for every leaf."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        scale = np.abs(w) + eta
        return grad(w + rho * scale * unit(scale * grad(w)))

    return gradient_of


def f_sam(rho: float, sigma: float, lmbda: float) -> GradientOf:
    """F-SAM in the paper's order: the average that contains g is subtracted."""
    m = np.zeros(9)

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        nonlocal m
        m = lmbda * m + (1 - lmbda) * grad(w)
        return grad(w + rho * unit(grad(w) - sigma * m))

    return gradient_of


def le_sam(rho: float, tau: float) -> GradientOf:
    """LE-SAM: ρ_t = min(τ/‖g‖, ρ)."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        g = grad(w)
        return grad(w + min(tau / np.linalg.norm(g), rho) * unit(g))

    return gradient_of


def ae_sam(rho: float, c: Callable[[int], float], decay: float, log: list[bool]) -> GradientOf:
    """AE-SAM, equations (7) and (8): SAM where ‖g‖² ≥ μ + c σ."""
    mean = variance = 0.0

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        nonlocal mean, variance
        square = float(np.sum(grad(w) ** 2))
        mean = decay * mean + (1 - decay) * square
        variance = decay * variance + (1 - decay) * (square - mean) ** 2
        log.append(square >= mean + c(t) * np.sqrt(variance))
        return sam(rho)(t, w, grad) if log[-1] else grad(w)

    return gradient_of


def zsharp(rho: float, quantile: float, cut: Callable[[Vector], Leaves]) -> GradientOf:
    """ZSharp: layer by layer the largest |z|; leaves with fewer than two axes stay whole."""

    def filtered(layer: Vector) -> Vector:
        if layer.ndim < 2:
            return layer
        z = np.abs((layer - layer.mean()) / layer.std())
        return np.where(z > np.quantile(z, quantile), layer, 0)

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        layers = [filtered(layer).ravel() for layer in cut(grad(w))]
        return grad(w + rho * unit(np.concatenate(layers)))

    return gradient_of


def gc_sam(rho: float, cut: Callable[[Vector], Leaves]) -> GradientOf:
    """GC-SAM: both gradients without their means over all axes but the last."""

    def centred(g: Vector) -> Vector:
        layers = cut(g)
        means = [
            x.mean(tuple(range(x.ndim - 1)), keepdims=True) if x.ndim > 1 else 0 * x for x in layers
        ]
        return np.concatenate([(x - m).ravel() for x, m in zip(layers, means, strict=True)])

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        return centred(grad(w + rho * unit(centred(grad(w)))))

    return gradient_of


def x_sam(rho: float, alpha: float, eigenvector: Callable[[Vector], Vector]) -> GradientOf:
    """X-SAM: g/‖g‖ − α sign(⟨g, v⟩) ⟨g, v⟩ v with g the perturbed gradient."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        g_s, v = sam(rho)(t, w, grad), eigenvector(w)
        along = np.dot(g_s, v) * v
        return unit(g_s) - alpha * np.sign(np.dot(g_s, v)) * along

    return gradient_of


def gam(rho: float, alpha: float, hessian: Callable[[Vector], Vector]) -> GradientOf:
    """GAM: ∇L(w) + α ρ ∇‖∇L‖ at w + ρ f/‖f‖, with f = ∇‖∇L‖(w)."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        f = hessian(w) @ unit(grad(w))
        point = w + rho * unit(f)
        return grad(w) + alpha * rho * hessian(point) @ unit(grad(point))

    return gradient_of


def of_two_losses(rho: float, ascent: Grad, sharp: Grad, plain: Grad) -> GradientOf:
    """sharp(w + ε) + plain(w), with ε along ``ascent``: M-SAM and FGSAM."""
    return lambda t, w, grad: sharp(w + rho * unit(ascent(w))) + plain(w)


def esam(rho: float, kept: int, losses: Callable[[Vector], Vector], grads: Grad) -> GradientOf:
    """ESAM's selection (with all weights perturbed): the examples whose loss rises most."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        point = w + rho * unit(np.mean(grads(w), axis=0))
        risen = np.argsort(losses(point) - losses(w))[::-1][:kept]
        return np.mean(grads(point)[risen], axis=0)

    return gradient_of


def async_sam(rho: float) -> GradientOf:
    """AsyncSAM with τ = 1: ε along the gradient at the params of the step before."""
    stale = np.zeros(0)

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        nonlocal stale
        eps = rho * unit(stale) if t else np.zeros_like(w)
        stale = grad(w)
        return grad(w + eps)

    return gradient_of


def functional_sam(rho: float, jacobian: OfVector, residual: OfVector) -> GradientOf:
    """Functional SAM: the Jacobian of F at w + ε, the derivative of the loss at w."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        g = jacobian(w).T @ residual(w)
        return jacobian(w + rho * unit(g)).T @ residual(w)

    return gradient_of


def layer_sam(
    rho: float, cut: Callable[[Vector], Leaves], k: int = 1, alpha: float = 0.0
) -> GradientOf:
    """LayerSAM: SAM's ε times ‖w_l‖/‖g_l‖; with k > 1, LookSAM's reuse in between."""
    g_v = np.zeros(0)

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        nonlocal g_v
        g = grad(w)
        if t % k:
            return g + alpha * np.linalg.norm(g) * unit(g_v)
        ratios = [np.linalg.norm(x) * unit(y.ravel()) for x, y in zip(cut(w), cut(g), strict=True)]
        g_s = grad(w + rho * np.concatenate(ratios) / np.linalg.norm(g))
        g_v = g_s - project(g_s, g)
        return g_s

    return gradient_of


def eigen_sam(rho: float, alpha: float, eigenvector: Callable[[Vector], Vector]) -> GradientOf:
    """Eigen-SAM: ε = ρ (u + α sign⟨g, v⟩ v_⊥), u = g/‖g‖."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        u, v = unit(grad(w)), eigenvector(w)
        return grad(w + rho * (u + alpha * np.sign(np.dot(u, v)) * (v - project(v, u))))

    return gradient_of


def k_sam(rho: float, k: int, losses: Callable[[Vector], Vector], grads: Grad) -> GradientOf:
    """K-SAM: both gradients on the k examples of largest loss at w."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        kept = np.argsort(losses(w))[-k:]
        return sam(rho)(t, w, lambda p: np.mean(grads(p)[kept], axis=0))

    return gradient_of


def delta_sam(rho: float, u: Vector, grads: Grad) -> GradientOf:
    """δ-SAM: ε along Σ ω_i ∇ℓ_i with ω_i ∝ |⟨∇ℓ_i, u⟩|."""

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        weights = np.abs(grads(w) @ u)
        return np.mean(grads(w + rho * unit(weights @ grads(w))), axis=0)

    return gradient_of


def spectral_sam(rho: float, cut: Callable[[Vector], Leaves]) -> GradientOf:
    """ε = ρ (G Gᵀ)^(−½) G for a matrix, SAM's for a vector."""

    def polar(x: Vector) -> Vector:
        values, vectors = np.linalg.eigh(x @ x.T)
        return vectors @ np.diag(values**-0.5) @ vectors.T @ x

    def gradient_of(t: int, w: Vector, grad: Grad) -> Vector:
        leaves = [polar(x) if x.ndim == 2 else x for x in cut(unit(grad(w)))]
        return grad(w + rho * np.concatenate([x.ravel() for x in leaves]))

    return gradient_of


def ada_sam(
    w: Vector, gradients: Sequence[Grad], rho: float, lr: float, b1: float, b2: float, eps: float
) -> list[Vector]:
    """AdaSAM: AMSGrad of the sharp gradient without corrections, v̂ from ε²."""
    m, v, largest, points = 0 * w, 0 * w, 0 * w + eps**2, []
    for t, grad in enumerate(gradients):
        g = sam(rho)(t, w, grad)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        largest = np.maximum(largest, v)
        w = w - lr * m / np.sqrt(largest)
        points.append(w)
    return points


def light_sam(
    w: Vector, gradients: Sequence[Grad], rho: float, lr: float, initial: float, total: OfVector
) -> list[Vector]:
    """LightSAM: AdaGrad for the ascent and for the descent; ``total`` of the squares is summed."""
    u, v, points = initial, initial, []
    for grad in gradients:
        s = grad(w)
        u = u + total(s**2)
        g = grad(w + rho * s / np.sqrt(u))
        v = v + total(g**2)
        w = w - lr * g / np.sqrt(v)
        points.append(w)
    return points


def sam_polyak(
    w: Vector, gradients: Sequence[Grad], losses: Losses, rho: float, largest: float
) -> list[Vector]:
    """SAM with a Polyak step size, and ℓ* = 0."""
    points = []
    for grad, loss in zip(gradients, losses, strict=True):
        e = w + rho * unit(grad(w))
        g = grad(e)
        gap = max(loss(e) - np.dot(g, e - w), 0)
        w = w - min(gap / np.sum(g**2), largest) * g
        points.append(w)
    return points


def b_sam(
    w: Vector,
    gradients: Sequence[Grad],
    noise: Sequence[Vector],
    *,
    rho: float,
    lr: float,
    momentum: float,
    decay: float,
    weight_decay: float,
    damping: float,
    data_size: float,
) -> list[Vector]:
    """bSAM, algorithm 1."""
    m, s, points = 0 * w, 1 + 0 * w, []
    for grad, z in zip(gradients, noise, strict=True):
        g = grad(w + z / np.sqrt(data_size * s))
        sharp = grad(w + rho * g / s)
        m = momentum * m + (1 - momentum) * (sharp + weight_decay * w)
        w = w - lr * m / s
        s = decay * s + (1 - decay) * (np.sqrt(s) * np.abs(g) + damping + weight_decay)
        points.append(w)
    return points
