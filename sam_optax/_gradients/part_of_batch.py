"""An evenly spaced part of a batch."""

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax._gradients.examples import sizes
from sam_optax._internal.types import PyTree


def part_of_batch(batch: PyTree, fraction: float) -> PyTree:
    """Selects evenly spaced examples of a batch, for an ascent gradient at a fraction of the cost.

    ``update(None, state, params, grad_fn=grad_fn, ascent_grad_fn=lambda p: jax.grad(loss)(p,
    part_of_batch(batch, 0.1)))`` makes a step that costs about 1.1 gradients. The ascent needs only
    a direction, which is noisier on fewer examples; what that costs in accuracy depends on the
    task. Examples are spaced evenly, so that each device keeps its share of a sharded batch.

    Args:
      batch: a pytree of arrays whose first axis indexes the examples.
      fraction: share of the examples, in (0, 1].

    Returns:
      The same pytree with ``max(1, round(fraction * n))`` of the n examples.

    Raises:
      ValueError: ``fraction`` out of range, or the leaves differ in their number of examples.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> print(sam_optax.part_of_batch(jnp.arange(10), 0.2))
      [0 5]
    """
    n, kept = sizes(batch, fraction)
    if n % kept == 0:
        return jax.tree.map(lambda leaf: leaf[:: n // kept], batch)
    index = np.arange(kept) * n // kept
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], batch)
