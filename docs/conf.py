"""Sphinx configuration. The build has no warnings: ``python -m sphinx -W -b html docs OUT``."""

import re
import shutil
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

import sam_optax

_log = logging.getLogger(__name__)
_root = Path(__file__).parents[1]

project = "sam_optax"
author = "The sam_optax authors"
copyright = author
version = release = sam_optax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"sam_optax {version}"
html_copy_source = False
html_static_path, html_css_files = ["_static"], ["site.css"]
pygments_style = "tango"

# The repository's address is named in one place, pyproject.toml. Until it is, pages have no links
# to their source.
_project = tomllib.loads((_root / "pyproject.toml").read_text())["project"]
if _address := _project.get("urls", {}).get("Repository"):
    html_theme_options = {
        "source_repository": _address,
        "source_branch": "main",
        "source_directory": "docs/",
    }

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

# The notebooks are pages too, with the outputs that are stored.
nb_execution_mode = "off"
_pages = _root / "docs" / "notebooks"
shutil.rmtree(_pages, ignore_errors=True)
shutil.copytree(
    _root / "notebooks", _pages, ignore=shutil.ignore_patterns("*.py", ".*", "__*")
)

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


def _to_notebook(link):
    """A link to a notebook leads to its page: to the section that the link names, if it does."""
    text, name = link.groups()
    heading = rf'"#+ {re.escape(text)}(\\n)?"'
    section = re.search(heading, (_root / "notebooks" / name).read_text())
    slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    return f"[{text}](notebooks/{name}{f'#{slug}' if section else ''})"


def _as_pages(app, docname, source):
    """Changes what only the repository needs: doctest's empty last lines, paths of notebooks."""
    text = source[0].replace("\n\n```\n", "\n```\n").replace("](../docs/", "](../")
    source[0] = re.sub(
        r"\[([^\]]+)\]\(\.\./notebooks/(\w+\.ipynb)\)", _to_notebook, text
    )


class _BreakCode(SphinxPostTransform):
    """Lets inline code break after ``(``, ``,``, ``.``, ``/`` and ``=``, never inside a name."""

    default_priority = 500
    formats = ("html",)

    def run(self, **kwargs):
        for literal in self.document.findall(nodes.literal):
            first, *rest = re.split(r"(?<=[(,./=])(?=[^\d\s=./)\[])", literal.astext())
            if rest:
                literal.clear()
                literal += nodes.Text(first)
            for piece in rest:
                literal += nodes.raw("", "<wbr>", format="html")
                literal += nodes.Text(piece)


def _mathml(translator, node):
    """Writes an equation as MathML, which browsers draw by themselves, without a network."""
    # The converter knows no \big, and would put the index of \bar g_s below the g.
    equation = re.sub(r"\\[bB]ig+[lr]?\b", "", node.astext())
    equation = re.sub(r"\\(bar|hat|tilde)\s*(\w|{\w+})", r"{{}\g<0>}", equation)
    try:
        mathml = tex2mathml(equation, isinstance(node, nodes.math_block))
    except MathError as error:
        _log.warning("equation: %s", error, location=node)
        raise nodes.SkipNode from error
    # Both bars of a norm are of one height, also where the second one has an exponent.
    bar = r'<mo\1 stretchy="false" lspace="0" rspace="0">'
    translator.body.append(re.sub(r"<mo( class=\"\w+\")?>(?=[‖|])", bar, mathml))
    raise nodes.SkipNode


def setup(app):
    """Registers what this file defines."""
    app.connect("autodoc-process-signature", _plain_defaults)
    app.connect("source-read", _as_pages)
    app.add_post_transform(_BreakCode)
    app.add_html_math_renderer("mathml", (_mathml, None), (_mathml, None))
