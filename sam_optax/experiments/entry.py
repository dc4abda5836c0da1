"""The command line: subcommands, exit codes, and errors in one line."""

import contextlib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence

_PROG = "python -m sam_optax"
# Packages of the extra "experiments".
_EXTRA = {"filelock", "flax", "jinja2", "matfree", "matplotlib", "mlxtend"}
_EXTRA |= {"orbax", "rich", "scipy", "sklearn", "tensorboardX", "tyro"}
_COMMANDS = {
    "compare": "train SGD and sharpness-aware methods on the same data and compare them",
    "train": "train one network by one method, in a paper's setting or yours",
    "analyze": "measure the sharpness of the networks that a run has trained",
    "ranks": "find which sharpness measure ranks networks by their generalization gap",
    "cost": "count what a training step of each method costs, also on a TPU that is not there",
}
# Modules of sam_optax.experiments whose names differ from the command's. Each is imported only when
# its command runs; `run(options)` takes the dataclass named after the command, such as `Compare`.
_MODULES = {"train": "compare", "analyze": "analyze.command", "cost": "cost.command"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` names (default: the arguments of the process).

    The exit code is 0, 2 after a user error, or 130 after an interrupt.
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
    except KeyboardInterrupt:
        code = _fail("interrupted.", code=130)
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


def _run(name: str, arguments: list[str]) -> int:
    import tyro

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
        return _fail(f"{_first_lines(messages.getvalue())} (see {_PROG} {name} --help)")
    module.run(options)
    return 0


def _expanded(argument: str) -> str:
    """The argument with a leading ``~`` expanded, which shells leave alone in ``--out=~/runs``."""
    flag, equals, value = argument.partition("=")
    if argument.startswith("--") and equals:
        return f"{flag}={os.path.expanduser(value)}"
    return os.path.expanduser(argument)


def _first_lines(box: str) -> str:
    """The text above the first rule of tyro's box, on one line."""
    text = re.sub(r"[│╭╮╰╯|+]", " ", box.partition("╮\n")[2] or box)
    return " ".join(re.split(r"─{5,}", text)[0].split())


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
