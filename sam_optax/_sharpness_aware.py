"""The combinator: any optimizer, driven by the gradient at the perturbed params."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax import _control, _trees
from sam_optax._hyperparameters import check_integer, static_default
from sam_optax._perturbation import Perturbation, as_perturbation
from sam_optax._when import When

GradFn = Callable[[optax.Params], optax.Updates]


class SharpnessAwareState(NamedTuple):
    """State of :func:`sam_optax.sharpness_aware`.

    Attributes:
      step: int32 scalar, the number of steps taken.
      skipped: int32 scalar, the number of steps skipped by ``skip_nonfinite``, not in ``step``.
        Schedules of the perturbation and ``when`` count both.
      perturbation_state: state of the perturbation.
      base_state: state of the base optimizer.
    """

    step: chex.Array
    skipped: chex.Array
    perturbation_state: optax.OptState
    base_state: optax.OptState


def sharpness_aware(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    *,
    ascent_steps: int = static_default(1),
    when: When | None = None,
    skip_nonfinite: bool = False,
    perturb_dtype: Any | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Drives ``base_tx`` with the gradient at the perturbed params.

    .. math::
        \varepsilon = \mathrm{perturbation}(\nabla L(w)), \qquad
        w \leftarrow w + \mathrm{base\_tx}(\nabla L(w + \varepsilon)).

    ``update(grads, state, params, grad_fn=grad_fn)`` takes

    * ``grad_fn(params) -> grads``: the gradient on this step's batch (same batch, same dropout
      key), differentiated at the params it is given;
    * ``grads``: the gradient at ``params`` if there is one already, else ``None``. It is the
      ascent gradient of every perturbation without a random start, so one further gradient is
      evaluated. A random start evaluates its own and does not use ``grads``;
    * any further keyword arguments, which go to the perturbation and to ``base_tx``.

    ``base_tx`` also receives the first ascent gradient, as ``ascent_grads``. Weight decay,
    momentum and clipping in ``base_tx`` act on the sharp gradient and on the unperturbed params;
    a clip in front of ``sharpness_aware`` changes the ascent gradient only, and does not bound
    the update.

    Args:
      base_tx: the base optimizer, any optax transformation.
      perturbation: maps the ascent gradient to ε, which is added to the params: :func:`sam`,
        :func:`asam`, :func:`fsam`, :func:`rsam` or any optax transformation.
      ascent_steps: number of ascent steps n ≥ 1, each from the point the last one reached, with
        the full radius; each costs a gradient. ``sync_period=n + 1`` of ``optax.contrib.sam``.
      when: function of the training step (int32 scalar, from 0) that says whether it perturbs.
        Other steps are ``base_tx``'s, bit for bit, and evaluate one gradient. See :func:`every`
        and :func:`after`. Default: every step perturbs.
      skip_nonfinite: whether a step whose sharp gradient is not finite leaves the params and all
        state as they were but for the count ``state.skipped``.
      perturb_dtype: dtype of the perturbed params. Default: each leaf's own. ``jnp.float32``
        keeps ε from being rounded away for low-precision params; ``grad_fn`` then gets float32
        params, and ``base_tx`` the gradient in the dtype of the params.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`SharpnessAwareState`.

    Raises:
      TypeError: an argument is not a gradient transformation, or of the wrong kind.
      ValueError: ``ascent_steps`` < 1; in ``update``, ``params`` or ``grad_fn`` is missing; in
        ``init``, a wrapper has cut a random start off.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=1.0))
      >>> x = jnp.array(3.0)
      >>> state = tx.init(x)
      >>> grad_fn = jax.grad(lambda x: x**2)
      >>> updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
      >>> print(updates)  # the sharp gradient is 2 (3 + 1) = 8
      -0.8

    References:
      Foret et al., `Sharpness-Aware Minimization for Efficiently Improving Generalization
      <https://arxiv.org/abs/2010.01412>`_, 2021.
    """
    if not isinstance(base_tx, optax.GradientTransformation):
        raise TypeError(
            f"base_tx must be an optax.GradientTransformation, such as optax.sgd(0.1), got "
            f"{base_tx!r}."
        )
    base = optax.with_extra_args_support(base_tx)
    method = as_perturbation(perturbation)
    check_integer("ascent_steps", ascent_steps, lower=1)
    if when is not None and not callable(when):
        raise TypeError(
            "when must be a function of the training step, such as sam_optax.every(2), got "
            f"{when!r}."
        )
    if perturb_dtype is not None:
        perturb_dtype = jnp.dtype(perturb_dtype)

    def init_fn(params: optax.Params) -> SharpnessAwareState:
        return SharpnessAwareState(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            perturbation_state=method.init(params),
            base_state=base.init(params),
        )

    def update_fn(
        updates: optax.Updates | None,
        state: SharpnessAwareState,
        params: optax.Params | None = None,
        *,
        grad_fn: GradFn | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SharpnessAwareState]:
        if params is None or not callable(grad_fn):
            raise ValueError(
                "sharpness_aware needs the params and a gradient function: call "
                "update(grads, state, params, grad_fn=grad_fn), where grad_fn(params) returns "
                "the gradient on this step's batch, such as "
                "jax.grad(lambda p: loss(p, batch)). A training loop that cannot pass grad_fn "
                "on (MultiSteps, TrainState.apply_gradients) has to be told to. Got "
                f"params={'None' if params is None else '...'}, grad_fn={grad_fn!r}."
            )
        training_step = state.step + state.skipped
        evaluations = ascent_steps + (updates is None or method.has_random_start)
        gradient = _trace_once(grad_fn, params) if evaluations > 1 else grad_fn
        # One evaluation serves both branches of `when`.
        if updates is None and not method.has_random_start:
            updates = gradient(params)

        def sharp() -> tuple[optax.Updates, optax.Updates, optax.OptState]:
            point, ascent_grads, perturbation_state = _ascend(
                method,
                gradient,
                updates,
                state.perturbation_state,
                params,
                steps=ascent_steps,
                dtype=perturb_dtype,
                extra={"training_step": training_step, **extra},
            )
            grads = gradient(point)
            if perturb_dtype is not None:
                grads = _trees.map_inexact(_trees.cast_like, grads, params)
            return grads, ascent_grads, perturbation_state

        def plain() -> tuple[optax.Updates, optax.Updates, optax.OptState]:
            grads = gradient(params) if updates is None else updates
            return grads, grads, state.perturbation_state

        if when is None:
            grads, ascent_grads, perturbation_state = sharp()
        else:
            grads, ascent_grads, perturbation_state = _control.cond(
                when(training_step), sharp, plain
            )

        def descend() -> tuple[optax.Updates, SharpnessAwareState]:
            new_updates, base_state = base.update(
                grads, state.base_state, params, ascent_grads=ascent_grads, **extra
            )
            return new_updates, SharpnessAwareState(
                optax.safe_increment(state.step), state.skipped, perturbation_state, base_state
            )

        def skip() -> tuple[optax.Updates, SharpnessAwareState]:
            unchanged = jax.tree.map(_trees.zeros_like, jax.eval_shape(descend)[0])
            return unchanged, state._replace(skipped=optax.safe_increment(state.skipped))

        if not skip_nonfinite:
            return descend()
        return _control.cond(_control.all_finite(grads), descend, skip)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _trace_once(grad_fn: GradFn, params: optax.Params) -> GradFn:
    """``grad_fn`` for several evaluations in one step, traced once.

    Under jit an inner jit shares the trace and is inlined by the compiler. Outside of it, it
    would compile a fresh function at every step.
    """
    return jax.jit(grad_fn) if _control.is_traced(params) else grad_fn


def _ascend(
    method: Perturbation,
    gradient: GradFn,
    grads: optax.Updates | None,
    state: optax.OptState,
    params: optax.Params,
    *,
    steps: int,
    dtype: Any | None,
    extra: dict[str, Any],
) -> tuple[optax.Params, optax.Updates, optax.OptState]:
    """The perturbed params, the first ascent gradient and the perturbation's new state."""

    def ascent_gradient(point: optax.Params, state: optax.OptState) -> optax.Updates:
        return gradient(method.start_fn(point, state, training_step=extra["training_step"]))

    def step(carry: tuple[optax.Params, optax.OptState]) -> tuple[optax.Params, optax.OptState]:
        point, state = carry
        return method.perturb(point, ascent_gradient(point, state), state, dtype, extra)

    if grads is None or method.has_random_start:
        grads = ascent_gradient(params, state)
    carry = method.perturb(params, grads, state, dtype, extra)
    point, state = _control.repeat(steps - 1, step, carry)
    return point, grads, state
