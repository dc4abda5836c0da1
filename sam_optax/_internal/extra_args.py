"""Which extra arguments a transformation asks for.

optax hands extra arguments of ``update`` on to every part of a chain, and some parts refuse what
they do not know: line searches, and transformations with closed signatures. So what this library
adds on its own account is passed only to a transformation of which some part mentions it.
"""

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import optax

FOR_PERTURBATIONS = (
    "ascent_grads",
    "draw_index",
    "norm_axis_name",
    "state_axis_name",
    "training_step",
)
"""What the combinators add to the extra arguments of a perturbation."""

FOR_BASE = ("ascent_grads", "norm_axis_name", "perturbed")
"""What the combinators add to the extra arguments of a base optimizer."""

# A longer container in a closure is data, and not the parts of a transformation.
_MOST_PARTS = 1000


def only_asked(
    transformation: optax.GradientTransformation, names: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """The transformation, which does not see those of the names that it does not ask for."""
    inner = optax.with_extra_args_support(transformation)
    unasked = set(names) - asked_for(transformation, names)
    if not unasked:
        return inner

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        given = {name: value for name, value in extra.items() if name not in unasked}
        return inner.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def asked_for(
    transformation: optax.GradientTransformation, names: Collection[str]
) -> frozenset[str]:
    """Those of the names that the update function, or one that it calls, mentions.

    Functions are found through closures, partial applications and bound methods, which is where
    ``optax.chain`` and other wrappers keep their parts. A function that looks at its ``**kwargs``
    as a whole, or an update function that cannot be looked into, is taken to ask for everything.
    """
    found: set[str] = set()
    for function in _functions_of(transformation.update):
        if function is None or _reads_kwargs(function):
            return frozenset(names)
        found |= _words(function.__code__)
    return frozenset(names) & found


def for_base(added: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments of a base optimizer: what a combinator adds, and what it was given.

    A line search refuses extra arguments that are not arguments of its loss, also where another
    part of its chain asks for them; so the loss takes them and drops them.
    """
    arguments = {**added, **given}
    if callable(given.get("value_fn")):
        arguments["value_fn"] = _tolerant(given["value_fn"])
    return arguments


def _tolerant(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose signature has what the combinators add, and which does not see it."""
    signature = inspect.signature(loss_fn)
    added = [name for name in FOR_BASE if name not in signature.parameters]
    parameters = [
        *signature.parameters.values(),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added),
    ]
    parameters.sort(key=lambda parameter: parameter.kind)  # **kwargs go last

    def tolerant(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(*args, **{k: v for k, v in kwargs.items() if k not in added})

    tolerant.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return tolerant


def _words(code: types.CodeType) -> set[str]:
    """Names of arguments, and strings, in a function and in those defined inside of it."""
    words = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    for constant in code.co_consts:
        if isinstance(constant, str):
            words.add(constant)
        elif isinstance(constant, types.CodeType):
            words |= _words(constant)
    return words


def _reads_kwargs(function: types.FunctionType) -> bool:
    """Whether a function does more with its ``**kwargs`` than to delete them or to pass them on.

    What optax's and JAX's own functions look for is known: never what this library adds.
    A decorator's function takes what the decorated one does.
    """
    code = function.__code__
    decorates = hasattr(function, "__wrapped__") or _package_of(function) in ("jax", "optax")
    if decorates or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    positional = code.co_argcount + code.co_kwonlyargcount
    name = code.co_varnames[positional + bool(code.co_flags & inspect.CO_VARARGS)]
    instructions = list(dis.get_instructions(code))
    for instruction, following in itertools.pairwise(instructions):
        read = instruction.argval
        is_read = name in read if isinstance(read, tuple) else name == read
        passed_on = following.opname in ("DICT_MERGE", "DICT_UPDATE", "CALL_FUNCTION_EX")
        if is_read and instruction.opname.startswith("LOAD") and not passed_on:
            return True
    return False


def _functions_of(root: Callable[..., Any]) -> Iterator[types.FunctionType | None]:
    """All functions that can be reached from one; ``None`` if that is not a Python function."""
    todo: list[Any] = [root]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            yield value
            yield from _named(value)
            todo += [*_held(value), getattr(value, "__wrapped__", None)]
        elif isinstance(value, types.MethodType):
            todo += [value.__func__, *_attributes(value.__self__)]
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (tuple, list, Mapping)) and len(value) <= _MOST_PARTS:
            todo += value.values() if isinstance(value, Mapping) else value
        elif callable(getattr(value, "__wrapped__", None)):
            todo.append(value.__wrapped__)
        elif (call := _call_of(value)) is not None:
            todo += [call, *_attributes(value)]
        elif value is root:
            yield None


def _call_of(value: Any) -> Any | None:
    """The method that calling the object runs, if that is written in Python."""
    for cls in type(value).__mro__:
        if (call := vars(cls).get("__call__")) is not None:
            in_python = isinstance(call, types.FunctionType) or hasattr(call, "__wrapped__")
            return call if in_python else None
    return None


def _attributes(instance: Any) -> Iterator[Any]:
    """What an object holds, in its ``__dict__`` or in slots."""
    yield from getattr(instance, "__dict__", {}).values()
    for cls in type(instance).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(instance, name):
                yield getattr(instance, name)


def _held(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over, and the defaults of its arguments."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _named(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """This library's functions, and the function's neighbours, that it names as globals.

    A factory, as ``optax.inject_hyperparams`` takes it, names its parts and does not hold them.
    """
    scopes = [function.__globals__]
    words = function.__code__.co_names
    for word in words:
        value = function.__globals__.get(word)
        if isinstance(value, types.ModuleType):
            scopes.append(vars(value))
    for scope in scopes:
        for word in words:
            value = scope.get(word)
            if isinstance(value, types.FunctionType) and (
                value.__module__ == function.__module__
                or _package_of(value) == __name__.split(".")[0]
            ):
                yield value


def _package_of(function: types.FunctionType) -> str:
    """The top-level package; empty for code that was executed without a module's name."""
    return (function.__module__ or "").split(".")[0]
