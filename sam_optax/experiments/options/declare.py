"""How options are declared."""

from typing import Any

import tyro


def arg(help: str, metavar: str | None = None) -> Any:
    """An option with a default."""
    return tyro.conf.arg(help=help, metavar=metavar)


def optional(help: str, metavar: str) -> Any:
    """An option that is left out by default."""
    return tyro.conf.arg(help=help, metavar=metavar, help_behavior_hint="")


def setting(help: str, metavar: str, default: Any) -> Any:
    """An option that a preset may set. ``None`` where it is not given."""
    shown = f"(default: {default}, or the preset's)"
    return tyro.conf.arg(help=help, metavar=metavar, help_behavior_hint=shown)
