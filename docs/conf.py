"""Sphinx configuration. The build has no warnings: ``python -m sphinx -W -b html docs OUT``."""

import re
import tomllib
from pathlib import Path

import sam_optax

project = "sam_optax"
author = "The sam_optax authors"
copyright = author
version = release = sam_optax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = f"sam_optax {version}"
html_copy_source = False
html_static_path, html_css_files = ["_static"], ["tables.css"]
pygments_style = "tango"

# The repository's address is named in one place, pyproject.toml. Until it is, pages have no links
# to their source.
_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
if _address := _project.get("urls", {}).get("Repository"):
    html_theme_options = {
        "source_repository": _address,
        "source_branch": "main",
        "source_directory": "docs/",
    }

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

# Every name that a docstring refers to has to be in the reference.
nitpicky = True
add_module_names = False
autodoc_member_order = "bysource"
# Written out, a hyperparameter's type fills three lines; the docstrings say what it may be.
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False


def _plain_defaults(app, what, name, obj, options, signature, return_annotation):
    """Shows NumPy scalars, which mark defaults as static, as the numbers they are."""
    if signature is not None:
        signature = re.sub(r"np\.\w+\((-?[\d.]+)\)", r"\1", signature)
    return signature, return_annotation


def _without_empty_last_lines(app, docname, source):
    """Drops the empty line that doctest needs at the end of a block of code."""
    source[0] = source[0].replace("\n\n```\n", "\n```\n")


def setup(app):
    """Registers what this file defines."""
    app.connect("autodoc-process-signature", _plain_defaults)
    app.connect("source-read", _without_empty_last_lines)
