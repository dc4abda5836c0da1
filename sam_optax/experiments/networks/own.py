"""Networks of users, from a file, a package or a notebook: Flax Linen or NNX.

Both are used as Linen modules are: ``init(key, x, train=False)`` gives nested variables, with the
trained ones under ``"params"``, and ``apply(variables, x, train=..., rngs=..., mutable=...)`` the
outputs, and with ``mutable`` also the other variables after the call.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.named import line
from sam_optax.experiments.networks.from_nnx import Nnx
from sam_optax.experiments.types import PyTree

TRAIN = {"train": True, "training": True, "deterministic": False, "use_running_average": False}
"""Arguments of a Linen module's call that tell training from evaluation, with training's value."""
_FORMS = (
    "give a Flax Linen module, the class of a Linen or NNX module, or a function that returns one: "
    "of NNX with the parameter rngs; a parameter classes gets their number. Or a pair of one of "
    "these and the variables that it starts from"
)


def adapted(given: Any, name: str, classes: int) -> tuple[Any, Any]:
    """A user's network as this module describes it, and the variables it starts from, if any.

    Raises:
      UserError: it is neither a Linen nor an NNX module, or making it fails.
    """
    if isinstance(given, tuple) and len(given) == 2:
        module, start = given
        if not isinstance(start, dict):
            kind = type(start).__name__
            raise UserError(f"--model {name}: its variables are of type {kind}; give nested dicts.")
        return adapted(module, name, classes)[0], start
    if isinstance(given, nnx.Module):
        raise UserError(
            f"--model {name}: is an NNX module, with one initialization for all seeds; give its "
            "class, or a function of rngs that returns it."
        )
    if isinstance(given, nn.Module):
        return _linen(given, name), None
    if not callable(given):
        raise UserError(f"--model {name}: is of type {type(given).__name__}; {_FORMS}.")
    # NNX's classes have a call of their own, which hides the arguments.
    call: Any = given
    accepted = inspect.signature(call.__init__ if isinstance(given, type) else call).parameters
    known = {"classes": classes} if "classes" in accepted else {}

    def make(kinds: Any = nnx.Module, **options: Any) -> Any:
        try:
            made = given(**known, **options)
        except Exception as error:
            raise UserError(f"--model {name}: fails with {line(error)}; {_FORMS}.") from error
        if not isinstance(made, kinds):
            raise UserError(f"--model {name}: returns the type {type(made).__name__}; {_FORMS}.")
        return made

    if "rngs" in accepted:
        return Nnx(make), None
    return adapted(make((nn.Module, tuple)), name, classes)


def _linen(module: nn.Module, name: str) -> Any:
    names = [n for n in inspect.signature(type(module).__call__).parameters if n in TRAIN]
    if len(names) > 1:
        raise UserError(
            f"--model {name}: {' and '.join(names)} of its call both tell training from "
            "evaluation; leave one."
        )
    return module if names == ["train"] else Linen(module, *names)


@dataclasses.dataclass(frozen=True)
class Linen:
    """A Linen module whose call tells training from evaluation by another argument, or by none."""

    module: nn.Module
    argument: str | None = None

    def init(self, key: jax.Array, x: jax.Array, *, train: bool) -> PyTree:
        """The variables."""
        return nn.meta.unbox(self.module.init(key, x, **self._mode(train)))

    def apply(self, variables: PyTree, x: jax.Array, *, train: bool, **options: Any) -> Any:
        """The outputs, and with ``mutable`` what has changed."""
        return self.module.apply(variables, x, **self._mode(train), **options)

    def _mode(self, train: bool) -> dict[str, Any]:
        return {} if self.argument is None else {self.argument: train == TRAIN[self.argument]}


def check(
    model: Any, name: str, example: jax.Array, outputs: tuple[int, ...] | None, start: Any = None
) -> dict[str, np.ndarray]:
    """The variables by path that a user's network is to ``start`` from, after all checks.

    ``outputs`` is the shape of the outputs of one example, if the loss needs one.

    Raises:
      UserError: the network does not take the examples, or does not have such variables.
    """
    shape = "×".join(map(str, example.shape[1:])) or "no axes"

    def call() -> Any:
        made = model.init(jax.random.key(0), example, train=False)
        rest = [k for k in made if k != "params"]
        streams, two = {"dropout": jax.random.key(0)}, jnp.repeat(example, 2, axis=0)
        return made, *model.apply(made, two, train=True, rngs=streams, mutable=rest)

    try:
        needed, found, rest = jax.eval_shape(call)
    except Exception as error:
        raise UserError(
            f"--model {name}: does not take examples of shape {shape} ({example.dtype}): "
            f"{line(error)}."
        ) from error
    if not jax.tree.leaves(needed.get("params")):
        raise UserError(f"--model {name}: has no params to train.")
    if not hasattr(found, "shape"):
        raise UserError(
            f"--model {name}: returns the type {type(found).__name__}; let it return an array."
        )
    if outputs is not None and found.shape != (2, *outputs):
        raise UserError(
            f"--model {name}: returns outputs of shape {found.shape} for two examples, but the "
            f"data need {(2, *outputs)}, a logit for each class; let it return these, or give a "
            "loss."
        )
    for of in rest:
        if jax.tree.map(np.shape, rest[of]) != jax.tree.map(np.shape, needed[of]):
            remedy = 'keep these, and sow only into "intermediates".'
            raise UserError(f"--model {name}: a call changes the shapes of its {of}; {remedy}")
    return {} if start is None else _fitted(start, name, needed)


def _fitted(start: Any, name: str, needed: PyTree) -> dict[str, np.ndarray]:
    """Variables by path, if they have the shapes of those of the network."""
    flat, shapes = flatten_dict(start), flatten_dict(needed, sep="/")
    if start and not flat:
        raise UserError(f"--model {name}: its variables are empty; leave them out, or give arrays.")
    found = {"/".join(map(str, path)): _array(leaf) for path, leaf in flat.items()}
    for (path, leaf), given in zip(found.items(), flat.values(), strict=True):
        what = f"--model {name}: {path} of its variables"
        if leaf.dtype == object:
            kind = type(given).__name__
            raise UserError(f"{what} is of type {kind}; give nested dicts of arrays.")
        if leaf.shape != (shape := getattr(shapes.get(path), "shape", "no such array")):
            raise UserError(
                f"{what} has shape {leaf.shape}, in the network {shape}; give one that fits, or "
                "leave it out to have it initialized."
            )
        with np.errstate(over="ignore"):  # larger values are infinite in the network
            numbers = jnp.issubdtype(leaf.dtype, jnp.number)
            if not (numbers and np.isfinite(leaf.astype(shapes[path].dtype)).all()):
                raise UserError(f"{what} is not all finite numbers; give other variables.")
    return found


def _array(leaf: Any) -> np.ndarray:
    """A leaf as an array; one of objects if it is none, such as a key or a ragged list."""
    try:
        return np.asarray(None if isinstance(leaf, Mapping) else leaf)  # nnx.State is one
    except (TypeError, ValueError):
        return np.asarray(None)
