"""Finds the functions that a function may call, without calling it, and the names they use."""

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator, Mapping

from sam_optax._internal.types import Function

# Longer containers in a closure are data, not the parts of a transformation.
_MOST_PARTS = 1000


def functions_of(root: Function) -> Iterator[types.FunctionType | None]:
    """All functions reachable from a function; ``None`` if it is not a Python function."""
    todo: list[object] = [root]
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
        elif callable(wrapped := getattr(value, "__wrapped__", None)):
            todo.append(wrapped)
        elif (call := _call_of(value)) is not None:
            todo += [call, *_attributes(value)]
        elif value is root:
            yield None


def _call_of(value: object) -> object | None:
    """The method that runs when the object is called, if it is written in Python."""
    for cls in type(value).__mro__:
        if (call := vars(cls).get("__call__")) is not None:
            in_python = isinstance(call, types.FunctionType) or hasattr(call, "__wrapped__")
            return call if in_python else None
    return None


def _attributes(instance: object) -> Iterator[object]:
    """The attributes of an object, in its ``__dict__`` or in slots."""
    yield from getattr(instance, "__dict__", {}).values()
    for cls in type(instance).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(instance, name):
                yield getattr(instance, name)


def _held(function: types.FunctionType) -> Iterator[object]:
    """The closure of a function and the defaults of its arguments."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _named(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Functions that it names as globals, if they belong to this library or to its own module.

    A factory, as ``optax.inject_hyperparams`` takes it, refers to its parts by name only.
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
    """The top-level package; empty for code that was executed without a module name."""
    return (function.__module__ or "").split(".")[0]


def words_of(code: types.CodeType) -> set[str]:
    """Argument names and strings in a function and in the functions defined inside it."""
    words = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    for constant in code.co_consts:
        if isinstance(constant, str):
            words.add(constant)
        elif isinstance(constant, types.CodeType):
            words |= words_of(constant)
    return words


def reads_kwargs(function: types.FunctionType) -> bool:
    """Whether a function does more with its ``**kwargs`` than delete them or pass them on.

    Functions of optax and JAX never read the arguments that this library adds. A decorator's
    function takes the arguments of the decorated one.
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
