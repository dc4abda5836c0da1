"""The command line: subcommands, exit codes, and errors in one line."""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.stream import Stream, printable

_PROG = "python -m sam_optax"
# Packages of the extra "experiments".
_EXTRA = {"filelock", "flax", "jinja2", "matfree", "matplotlib", "mlxtend", "msgspec"}
_EXTRA |= {"rich", "scipy", "sklearn"}
# Each module is imported only when its command runs: `run(options)` takes the dataclass named after
# the command, such as `Compare`.
_COMMANDS = {
    "compare": ("comparison", "train SGD and sharpness-aware methods on the same data"),
    "cost": ("cost.command", "count what a step of each method costs, also on a TPU not there"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` names (default: the arguments of the process).

    The exit code is 0, 2 after a user error or where standard output cannot be written, 1 where its
    reader has left, or 128 + n after signal n, such as 130 of Ctrl-C. What cannot be printed does
    not stop the work.
    """
    if argv is None and threading.current_thread() is threading.main_thread():
        for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, _interrupt)
        sys.unraisablehook = _again
    out: Any = Stream(sys.stdout)
    err: Any = Stream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = 0
        try:
            _run(list(sys.argv[1:] if argv is None else argv))
        except KeyboardInterrupt as stop:
            code = _fail("interrupted.", 128 + (stop.args[0] if stop.args else signal.SIGINT))
            sys.stdout.flush()
            if argv is None:
                # A computation may still be running. If the interpreter shut down meanwhile, it
                # would free the memory in use and crash.
                os._exit(code)
        except Exception as error:
            if (message := _message(error)) is None:
                raise
            code = _fail(message)
        sys.stdout.flush()
        if out.error is None or code:
            return code
        if isinstance(out.error, BrokenPipeError):
            return 1
        reason = (out.error.strerror or str(out.error)).lower()
        return _fail(f"standard output cannot be written ({reason}).")


def _message(error: Exception) -> str | None:
    """What to say of an error in a line; ``None`` if it is a mistake of ours."""
    if isinstance(error, UserError):
        return str(error)
    said = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "Out of memory" in said:
        what = (said.splitlines() or ["no more is free"])[0][:200]
        remedy = "use fewer or smaller examples, a smaller --batch-size or network."
        return f"out of memory ({what}); {remedy}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if (package := (missing or "").partition(".")[0]) not in _EXTRA:
        return None
    return f'{package} is not installed; run: pip install "sam_optax[experiments]"'


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _again(lost: "sys.UnraisableHookArgs") -> None:
    """Repeats a signal that Python ignores, such as amid JAX's collection of garbage."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        return sys.__unraisablehook__(lost)
    number = lost.exc_value.args[0] if lost.exc_value.args else signal.SIGINT
    threading.Timer(0.1, signal.raise_signal, [number]).start()


def _run(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:9}{summary}" for name, (_, summary) in _COMMANDS.items())
        print(f"usage: {_PROG} COMMAND [options]\n\ncommands:\n{commands}\n")
        print(f"{_PROG} COMMAND --help lists a command's options.")
        return
    name, *arguments = given
    if name not in _COMMANDS:
        raise UserError(f"{name}: unknown command; use one of {', '.join(_COMMANDS)}.")
    from sam_optax.experiments.options.arguments import parse, print_help

    module = importlib.import_module(f"sam_optax.experiments.{_COMMANDS[name][0]}")
    command, program = getattr(module, name.title()), f"{_PROG} {name}"
    if not print_help(command, arguments, program):
        module.run(parse(command, arguments, program))


def _fail(message: str, code: int = 2) -> int:
    print(f"sam_optax: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
