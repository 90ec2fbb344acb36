"""How Sphinx builds these pages: Markdown by hand, and a reference from the docstrings."""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "q4core"
author = "the q4core authors"
project_copyright = "the q4core authors, Apache-2.0"
release = importlib.metadata.version("q4core")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["decisions/template.md"]
html_theme = "furo"
html_title = f"q4core {release}"

autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False


def _keep_formulas(_app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Take ``*`` and ``|`` in docstrings as what they are there, signs of arithmetic, outside of literals."""
    for number, line in enumerate(lines):
        parts = re.split(r"(``.+?``)", line)
        parts[::2] = [re.sub(r"(?<!\\)([*|])", r"\\\1", part) for part in parts[::2]]
        lines[number] = "".join(parts)


def _show_toctrees(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Take tables of contents out of the comments that keep them from readers of plain Markdown."""
    source[0] = re.sub(r"^<!--\n(```\{toctree\}\n.*?^```)\n-->", r"\1", source[0], flags=re.DOTALL | re.MULTILINE)


def setup(app: Sphinx) -> None:
    """Change docstrings before napoleon reads their sections, and pages before they are parsed."""
    app.connect("autodoc-process-docstring", _keep_formulas, priority=400)
    app.connect("source-read", _show_toctrees)
