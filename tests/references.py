"""NumPy transcriptions of the papers' formulas, in float64, on lists of leaves.

Written from the papers, as plainly as they print them; they share nothing with the library.
"""

from collections.abc import Sequence

import numpy as np

Leaves = Sequence[np.ndarray]


def flatten(leaves: Leaves) -> np.ndarray:
    """The whole tree as one vector."""
    return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])


def unflatten(vector: np.ndarray, leaves: Leaves) -> list[np.ndarray]:
    """The vector cut into the leaves' shapes."""
    ends = np.cumsum([np.size(leaf) for leaf in leaves])
    parts = np.split(vector, ends[:-1])
    return [part.reshape(np.shape(leaf)) for part, leaf in zip(parts, leaves, strict=True)]


def ascent(g: np.ndarray, rho: float, p: float) -> np.ndarray:
    """ρ sign(g)|g|^(q−1)/‖g‖_q^(q−1), and its limits at p = 1 and p = ∞ (SAM, equation 2)."""
    if not np.any(g):
        return np.zeros_like(g)
    if p == np.inf:
        return rho * np.sign(g)
    if p == 1:  # q = infinity: everything on the largest elements
        largest = np.abs(g) == np.abs(g).max()
        return rho * np.sign(g) * largest / largest.sum()
    q = 1 / (1 - 1 / p)
    unit = g / np.abs(g).max()  # for the range of float64, not for the formula
    q_norm = np.sum(np.abs(unit) ** q) ** (1 / q)
    return rho * np.sign(unit) * np.abs(unit) ** (q - 1) / q_norm ** (q - 1)


def sam(g: Leaves, rho: float, p: float = 2) -> list[np.ndarray]:
    """SAM, equation (2), with the norm over the whole tree."""
    return unflatten(ascent(flatten(g), rho, p), g)


def normalization(
    w: Leaves, eta: float, biases: Sequence[bool], filters: Sequence[int | None] | None = None
) -> list[np.ndarray]:
    """T of ASAM: |w| + η, ‖f‖₂ + η over a filter (axis of its index given), 1 for a bias."""
    operator = []
    for i, (leaf, is_bias) in enumerate(zip(w, biases, strict=True)):
        axis = None if filters is None else filters[i]
        if is_bias:
            t = np.ones_like(leaf)
        elif axis is None:
            t = np.abs(leaf) + eta
        else:
            t = np.empty_like(leaf)
            for j in range(leaf.shape[axis]):
                where = (slice(None),) * (axis % leaf.ndim) + (j,)
                t[where] = np.sqrt(np.sum(leaf[where] ** 2)) + eta
        operator.append(t)
    return operator


def asam(
    w: Leaves,
    g: Leaves,
    rho: float,
    eta: float,
    biases: Sequence[bool],
    filters: Sequence[int | None] | None = None,
    p: float = 2,
) -> list[np.ndarray]:
    """ASAM, algorithm 1 (p = 2: ρ T² g/‖T g‖₂) and its general form above equation (7)."""
    t = flatten(normalization(w, eta, biases, filters))
    g_flat = flatten(g)
    if p == 2:
        eps = rho * t**2 * g_flat / np.linalg.norm(t * g_flat)
    else:
        eps = t * ascent(t * g_flat, rho, p)
    return unflatten(eps, g)


def fsam_residuals(
    gradients: Sequence[Leaves],
    sigma: float,
    lmbda: float,
    ema_start: str = "first_gradient",
    subtract: str = "previous",
) -> list[list[np.ndarray]]:
    """d_t = g_t − σ m of F-SAM for a sequence of gradients, m by its explicit weights."""

    def ema(past: Sequence[np.ndarray]) -> np.ndarray:
        count = len(past)
        if count == 0:
            return np.zeros_like(flatten(gradients[0]))
        weights = lmbda ** np.arange(count - 1, -1, -1, dtype=np.float64)
        if ema_start == "bias_corrected":  # theorem 1
            weights /= weights.sum()
        else:
            weights *= 1 - lmbda
            if ema_start == "first_gradient":  # m_1 = g_1
                weights[0] = lmbda ** (count - 1)
        return sum(w * g for w, g in zip(weights, past, strict=True))

    flat = [flatten(g) for g in gradients]
    residuals = []
    for t, g in enumerate(flat):
        m = ema(flat[: t + 1] if subtract == "new" else flat[:t])
        residuals.append(unflatten(g - sigma * m, gradients[0]))
    return residuals


def kernel_std(
    w: np.ndarray, gamma: float, axis: int | None = -1, noise_scale: str = "sqrt_norm"
) -> np.ndarray:
    """Standard deviation of δ₀, kernel by kernel.

    R-SAM's, read literally, is "sqrt_norm": the covariance is γ² diag(‖w_j‖).
    """

    def of_kernel(kernel: np.ndarray) -> float:
        norm = np.sqrt(np.sum(np.abs(kernel) ** 2))
        covariance = {
            "sqrt_norm": gamma**2 * norm,
            "norm": gamma**2 * norm**2,
            "relative": gamma**2 * norm**2 / kernel.size,
            "isotropic": gamma**2,
        }[noise_scale]
        return np.sqrt(covariance)

    std = np.empty(w.shape)
    if w.ndim < 2 or axis is None:
        std[...] = of_kernel(w)
        return std
    for j in range(w.shape[axis]):
        where = (slice(None),) * (axis % w.ndim) + (j,)
        std[where] = of_kernel(w[where])
    return std


def rsam(
    delta: Leaves,
    g_hat: Leaves,
    rho: float,
    lmbda: float,
    weighting: str = "raw",
    std: Leaves | None = None,
) -> list[np.ndarray]:
    """R-SAM, algorithm 1: ρ (δ₀ + λ ĝ)/‖δ₀ + λ ĝ‖, given δ₀ and ĝ, or either of unit length.

    Of unit length is δ₀ by its expectation: E‖δ₀‖² is the sum of all variances.
    """
    noise, gradient = flatten(delta), flatten(g_hat)
    if weighting in ("normalized", "normalized_gradient"):
        gradient = gradient / np.linalg.norm(gradient)
    if weighting == "normalized":
        noise = noise / np.sqrt(np.sum(flatten(std) ** 2))
    direction = noise + lmbda * gradient
    return unflatten(rho * direction / np.linalg.norm(direction), g_hat)
