"""NNX modules with the interface of Linen modules.

(Flax's ``nnx.bridge.ToLinen`` does not switch between training and evaluation, and in Flax 0.10 it
keeps the module's definition, which no archive of arrays can hold, among the variables.)
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
from flax import nnx

from sam_optax.experiments.types import PyTree

_COLLECTIONS = ("params", "state")
"""Of the variables of an NNX module: those of the type Param, and all others but random streams."""


class Nnx:
    """NNX modules of one kind: ``make(rngs=...)`` returns one."""

    def __init__(self, make: Callable[..., nnx.Module]) -> None:
        self._make, module = make, nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        self._definition, self._streams, *self._like = _split(module)

    def init(self, key: jax.Array, x: jax.Array, *, train: bool) -> PyTree:
        """The variables: those of the type Param as ``params``, all others as ``state``."""
        return _variables(self._make(rngs=nnx.Rngs(key)))

    def apply(
        self,
        variables: PyTree,
        x: jax.Array,
        *,
        train: bool,
        rngs: Mapping[str, jax.Array] | None = None,
        mutable: Any = False,
    ) -> Any:
        """The outputs, and with ``mutable`` the state; every stream of random numbers is new."""
        key, numbers = (rngs or {"dropout": jax.random.key(0)})["dropout"], itertools.count()

        def fresh(leaf: Any) -> Any:
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.fold_in(key, next(numbers))
            return jax.numpy.zeros(leaf.shape, leaf.dtype)

        arrays = flax.traverse_util.flatten_dict(variables)

        def filled(of: str, like: Any) -> Any:
            flat = nnx.to_flat_state(like)
            pairs = [(path, leaf.replace(arrays[of, *map(str, path)])) for path, leaf in flat]
            return nnx.from_flat_state(pairs)

        streams = jax.tree.map(fresh, self._streams)
        model = nnx.merge(self._definition, streams, *map(filled, _COLLECTIONS, self._like))
        model.train() if train else model.eval()
        outputs = model(x)
        if mutable is False:  # as in Linen, an empty list is not
            return outputs
        rest = _variables(model)
        del rest["params"]
        return outputs, rest


def _split(module: nnx.Module) -> tuple[Any, ...]:
    """The definition, the streams of random numbers, the params, and the rest."""
    return nnx.split(module, nnx.RngState, nnx.Param, ...)


def _variables(module: nnx.Module) -> PyTree:
    """The arrays in nested dicts, whose keys are text."""
    _, _, *states = _split(module)
    found = {
        (of, *map(str, path)): leaf[...]
        for of, state in zip(_COLLECTIONS, states, strict=True)
        for path, leaf in nnx.to_flat_state(state)
    }
    return {"params": {}, **flax.traverse_util.unflatten_dict(found)}
