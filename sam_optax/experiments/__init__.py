"""Command-line experiments on the library's public API; not imported by ``import sam_optax``."""
