"""Objects of users by name: ``FILE.py:NAME``, or ``package.module:NAME``; and their failures."""

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sam_optax.experiments.errors import UserError


def is_spec(name: str) -> bool:
    """Whether a name is ``FILE.py:NAME`` or ``package.module:NAME``."""
    return ":" in name


def short(name: str) -> str:
    """Such a name without the place, or one that has none."""
    return name.rpartition(":")[2]


def find(spec: str, option: str = "--model") -> Any:
    """The object that ``FILE.py:NAME`` or ``package.module:NAME`` names.

    Raises:
      UserError: (it names the option) there is no such file, module or name, or importing it fails.
    """
    place, _, name = spec.rpartition(":")
    module = _imported(spec, place, option)
    if not hasattr(module, name):
        raise UserError(f"{option} {spec}: {place} has no {name or 'name after the colon'}.")
    return getattr(module, name)


def sha256(names: Sequence[str], option: str = "--model") -> str | None:
    """The digest of the files in which :func:`find` looks; what these import is not part of it.

    Names without a place are in none, nor are objects of a notebook, ``__main__:NAME``.
    """
    files = dict[Path, None]()
    for spec in filter(is_spec, names):
        place = spec.rpartition(":")[0]
        if place.endswith(".py"):
            path = _file(place, option)
        else:
            path = Path(getattr(_imported(spec, place, option), "__file__", None) or "")
        files |= {path: None} if path.is_file() else {}  # "<stdin>", say, is none
    contents = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(contents).hexdigest() if files else None


def digests(models: Sequence[str], methods: Sequence[str]) -> dict[str, str | None]:
    """The :func:`sha256` of networks and of methods, by the names of these settings."""
    return {"model_sha256": sha256(models), "methods_sha256": sha256(methods, "--methods")}


def _file(path: str, option: str) -> Path:
    if not (found := Path(path).expanduser().absolute()).is_file():
        raise UserError(f"{option} {path}: there is no such file.")
    return found


def _imported(spec: str, place: str, option: str) -> Any:
    """The module of a file, executed anew, or of a package; the folder is that of the file."""
    file = _file(place, option) if place.endswith(".py") else None
    folder = str(file.parent) if file else ""
    sys.path.insert(0, folder)
    try:
        if file is None:
            return importlib.import_module(place)
        name = str(file.with_suffix("")).replace(".", "_")  # no other module's
        found: Any = importlib.util.spec_from_file_location(name, file)
        module = sys.modules[name] = importlib.util.module_from_spec(found)  # for dataclasses
        found.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise UserError(f"{option} {spec}: {place} fails with {line(error)}.") from error
    finally:
        sys.path.remove(folder)


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Turns what a user's code raises into a :class:`UserError`: ``what`` fails with it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} fails with {line(error)}.") from error


def line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
