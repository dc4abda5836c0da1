"""SAM: steepest ascent to the surface of a p-norm ball of radius ρ."""

from typing import Any

from chex import Numeric
from optax import EmptyState, Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.steepest_ascent import check_p, steepest_ascent
from sam_optax._perturbations.perturbation import Perturbation


def sam(rho: hp.Hyperparameter = 0.05, *, p: float = hp.static_default(2)) -> Perturbation:
    r"""SAM: perturbs the params by a step of length ρ in the direction of steepest ascent.

    .. math::
        \varepsilon = \rho\, \mathrm{sign}(g)\, |g|^{q-1} / \|g\|_q^{q-1},
        \qquad 1/p + 1/q = 1,

    which for p = 2 is ρ g/‖g‖₂. The norm treats the whole tree as one vector, so ‖ε‖_p = ρ unless
    g = 0; then ε = 0. For p = 1 the elements of largest magnitude share the radius.

    Args:
      rho: radius ρ ≥ 0 of the neighbourhood, in units of the weights. Default 0.05, which the SAM
        paper uses for CIFAR-10 (0.1 for CIFAR-100).
      p: norm of the neighbourhood, 1 ≤ p ≤ ∞. Default 2, which the SAM and ASAM papers find best.

    Returns:
      A :class:`~sam_optax.Perturbation` that needs no ``params``: ε has the structure, shapes and
      dtypes of the gradient. Its state is empty unless ``rho`` is a schedule.

    Raises:
      ValueError: ``rho`` < 0 or ``p`` < 1.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.sam(rho=0.1)
      >>> grads = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
      >>> eps, _ = method.update(grads, method.init(grads))
      >>> print(f"{eps['a']:.2f} {eps['b']:.2f}")
      0.06 0.08

    References:
      Foret et al., `Sharpness-Aware Minimization for Efficiently Improving Generalization
      <https://arxiv.org/abs/2010.01412>`_, 2021.
    """
    hp.check("rho", rho, lower=0)
    check_p(p)
    p = float(p)  # code that filters closures would take a NumPy scalar for an array

    def update_fn(
        updates: Updates, state: EmptyState, params: Params | None, rho: Numeric, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        return steepest_ascent(updates, None, rho, p, extra["norm_axis_name"]), state

    return Perturbation(
        hp.stateless, update_fn, hyperparameters={"rho": rho}, state_type=EmptyState
    )
