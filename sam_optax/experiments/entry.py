"""The command line: subcommands, exit codes, and errors in one line."""

import contextlib
import importlib
import io
import itertools
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from sam_optax.experiments.reporting.stream import Stream, printable

_PROG = "python -m sam_optax"
# Packages of the extra "experiments".
_EXTRA = {"filelock", "flax", "jinja2", "matfree", "matplotlib", "mlxtend", "msgspec"}
_EXTRA |= {"orbax", "rich", "scipy", "sklearn", "tensorboardX", "tyro"}
_COMMANDS = {
    "compare": "train SGD and sharpness-aware methods on the same data and compare them",
    "analyze": "measure the sharpness of the networks that a run has trained",
    "cost": "count what a training step of each method costs, also on a TPU that is not there",
}
# Modules of sam_optax.experiments whose names differ from the command's. Each is imported only when
# its command runs; `run(options)` takes the dataclass named after the command, such as `Compare`.
_MODULES = {"compare": "comparison", "analyze": "analyze.command", "cost": "cost.command"}


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
    out: Any = Stream(sys.stdout)
    err: Any = Stream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        if code > 128 and argv is None:
            # A computation may still be running. If the interpreter shut down meanwhile, it would
            # free the memory in use and crash.
            os._exit(code)
        if out.error is None or code:
            return code
        if isinstance(out.error, BrokenPipeError):
            return 1
        reason = (out.error.strerror or str(out.error)).lower()
        return _fail(f"standard output cannot be written ({reason}).")


def _main(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *arguments = given
    if name not in _COMMANDS:
        return _fail(f"{name}: unknown command; use one of {', '.join(_COMMANDS)}.")
    from sam_optax.experiments.errors import UserError

    try:
        return _run(name, arguments)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt as stop:
        warnings.simplefilter("ignore")  # what was waited for, such as Orbax's writing, ends here
        return _fail("interrupted.", 128 + (stop.args[0] if stop.args else signal.SIGINT))
    except (MemoryError, RuntimeError) as error:
        if (reason := _of_the_machine(error)) is None:
            raise
        return _fail(reason)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        return _fail(f'{missing} is not installed; run: pip install "sam_optax[experiments]"')


def _of_the_machine(error: Exception) -> str | None:
    """What to say of an error that is neither the user's nor ours, if it is one."""
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        what = (text.splitlines() or ["no more is free"])[0][:200]
        return f"out of memory ({what}); use fewer examples, a smaller --batch-size or network."
    import jax

    if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
        from sam_optax.experiments.training.devices import LOST

        return LOST
    return None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _run(name: str, arguments: list[str]) -> int:
    import tyro

    if name == "compare":
        from sam_optax.experiments.options import help

        if help.asked(arguments):
            return 0
    for option, value in itertools.pairwise(["", *arguments]):
        if value in ("", "--out="):  # which would be the current directory
            return _fail(f"{value[:-1] or option}: is empty; give a value, or leave it out.")
    module = importlib.import_module(f"sam_optax.experiments.{_MODULES.get(name, name)}")
    messages = io.StringIO()
    try:
        # tyro draws a box around a mistake; one line is easier to read in a log.
        with contextlib.redirect_stderr(messages):
            command, args = getattr(module, name.title()), [*map(_expanded, arguments)]
            options = tyro.cli(command, prog=f"{_PROG} {name}", args=args)
    except SystemExit as leaving:
        if not leaving.code:
            return 0
        return _fail(f"{_mistake(messages.getvalue())} (see {_PROG} {name} --help)")
    module.run(options)
    return 0


def _expanded(argument: str) -> str:
    """The argument with a leading ``~`` expanded, which shells leave alone in ``--out=~/runs``."""
    flag, equals, value = argument.partition("=")
    if argument.startswith("--") and equals:
        return f"{flag}={os.path.expanduser(value)}"
    return os.path.expanduser(argument)


def _mistake(box: str) -> str:
    """What is wrong with the arguments, in one sentence, from the text in tyro's box."""
    lines = (line.strip("│|╭╮╰╯+ ") for line in box.splitlines())
    text = " ".join(re.sub(r"[─-]{5,}", " ", " ".join(lines)).split())
    if found := re.search(r"Error parsing (--[\w.-]+).*?instantiated from \[(.*?)\]", text):
        option, values = found[1], found[2].replace("'", "").replace(",", "")
        shown = re.search(rf"helptext: {re.escape(option)} (\S+)", text)
        kinds = {"INT": "an integer", "FLOAT": "a number"}
        kind = next((of for name, of in kinds.items() if shown and name in shown[1]), "another")
        return f"{option} {values}: use {kind}."
    if found := re.search(r"invalid choice '(.*?)' for argument '(.*?)'.*?one of (\(.*?\))", text):
        choices = [c for c in re.findall(r"'([^']*)'", found[3]) if c != "None"]
        return f"{found[2]} {found[1]}: use {' or '.join(sorted(choices, reverse=True))}."
    if found := re.search(r"Missing value for argument '(.*?)'", text):
        return f"{found[1]}: no value is given; give one."
    if found := re.search(r"Unrecognized options: (\S+?)(,| |$)", text):
        meant = re.search(r"meant: (--[\w.-]+)", text)
        hint = f"did you mean {meant[1]}?" if meant else "leave it out."
        return f"{found[1]}: unknown option; {hint}"
    return text.partition("For full helptext")[0].strip()


def _fail(message: str, code: int = 2) -> int:
    print(f"sam_optax: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def _help() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in _COMMANDS.items())
    return (
        f"usage: {_PROG} COMMAND [options]\n\ncommands:\n{commands}\n\n"
        f"{_PROG} COMMAND --help lists a command's options."
    )
