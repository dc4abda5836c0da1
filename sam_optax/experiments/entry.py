"""The command line: subcommands, exit codes, and errors in one line."""

import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

_PROG = "python -m sam_optax"
# Packages of the extra "experiments".
_EXTRA = {"filelock", "flax", "jinja2", "matfree", "matplotlib", "mlxtend"}
_EXTRA |= {"orbax", "rich", "scipy", "sklearn", "tensorboardX", "tyro"}
_COMMANDS = {
    "compare": "train SGD and sharpness-aware methods on the same data and compare them",
    "analyze": "measure the sharpness of the networks that a run has trained",
    "ranks": "find which sharpness measure ranks networks by their generalization gap",
    "bench": "measure what a training step of each method costs",
    "collectives": "count what a sharded step sends between devices",
}
# Modules of sam_optax.experiments whose names differ from the command's. Each is imported only when
# its command runs; `run(options)` takes the dataclass named after the command, such as `Compare`.
_MODULES = {
    "compare": "comparison",
    "train": "comparison",
    "analyze": "analyze.command",
    "bench": "bench.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` names (default: the arguments of the process).

    The exit code is 0, 2 after a user error, or 128 + n after signal n, such as 130 of Ctrl-C.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without ρ and ± must not fail
            stream.reconfigure(errors="replace")
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *arguments = given
    if name not in _COMMANDS:
        return _fail(f"{name}: unknown command; use one of {', '.join(_COMMANDS)}.")
    from sam_optax.experiments.errors import UserError

    if argv is None and threading.current_thread() is threading.main_thread():
        for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, _interrupt)
    try:
        return _run(name, arguments)
    except UserError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader has closed the pipe
        _silence()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _silence()
        return _fail("standard output cannot be written (no space left on device).")
    except KeyboardInterrupt as stop:
        code = _fail("interrupted.", 128 + (stop.args[0] if stop.args else signal.SIGINT))
        if argv is None:
            # A computation may still be running. If the interpreter shut down meanwhile, it would
            # free the memory in use and crash.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        return _fail(f'{missing} is not installed; run: pip install "sam_optax[experiments]"')


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _run(name: str, arguments: list[str]) -> int:
    import tyro

    if name == "compare":
        from sam_optax.experiments.options import help

        if help.asked(arguments):
            return 0
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
    text = re.sub(r"[│╭╮╰╯+]", " ", box.partition("╮\n")[2] or box)
    first, *rest = (" ".join(part.split()) for part in re.split(r"─{5,}", text))
    more = " ".join(rest)
    if found := re.match(r"Error parsing (--[\w.-]+).*?instantiated from \[(.*?)\]", first):
        option, values = found[1], found[2].replace("'", "").replace(",", "")
        shown = re.search(rf"{re.escape(option)} (\S+)", more)
        kinds = {"INT": "an integer", "FLOAT": "a number"}
        kind = next((of for name, of in kinds.items() if shown and name in shown[1]), "another")
        return f"{option} {values}: use {kind}."
    if found := re.match(r"invalid choice '(.*)' for argument '(.*?)'", first):
        choices = re.findall(r"'([^']*)'", first.partition("one of")[2])
        return f"{found[2]} {found[1]}: use {' or '.join(c for c in choices if c != 'None')}."
    if found := re.match(r"Missing value for argument '(.*?)'", first):
        return f"{found[1]}: no value is given; give one."
    if first.startswith("Unrecognized options:"):
        name = first.removeprefix("Unrecognized options: ").split(", ")[0]
        meant = re.search(r"meant: (--[\w.-]+)", more)
        hint = f"did you mean {meant[1]}?" if meant else "leave it out."
        return f"{name}: unknown option; {hint}"
    return first


def _fail(message: str, code: int = 2) -> int:
    print(f"sam_optax: {' '.join(message.split())}", file=sys.stderr)
    return code


def _silence() -> None:
    """Redirects standard output to the null device, so that the interpreter does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in _COMMANDS.items())
    return (
        f"usage: {_PROG} COMMAND [options]\n\ncommands:\n{commands}\n\n"
        f"{_PROG} COMMAND --help lists a command's options."
    )
