"""How Sphinx builds these pages: Markdown by hand, tables from stored data, and a reference from the docstrings."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.website import inventories, stand_ins

if TYPE_CHECKING:
    from sphinx.application import Sphinx

stand_ins.stand_in_for_transformers()

project = "q4core"
author = "the q4core authors"
project_copyright = "the q4core authors, Apache-2.0"
release = importlib.metadata.version("q4core")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "tools.website.extension",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["decisions/template.md"]
html_theme = "furo"
html_title = f"q4core {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "static/icon.svg"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5cad", "color-brand-content": "#0b5cad"},
    "dark_css_variables": {"color-brand-primary": "#7ab8ff", "color-brand-content": "#7ab8ff"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_prompt_text = "$ "

suppress_warnings = ["ref.python"]  # a word in a docstring that is an attribute of two classes links to one of them
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False

# Stored inventories, so that a build needs no network. Q4_DOCS_ONLINE=1 takes those of the projects themselves.
intersphinx_mapping = {
    name: (url, None if os.environ.get("Q4_DOCS_ONLINE") == "1" else str(inventories.write(name)))
    for name, url in inventories.PROJECTS.items()
}


def _keep_formulas(_app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Take ``*`` and ``|`` in docstrings as what they are there, signs of arithmetic, outside of literals."""
    for number, line in enumerate(lines):
        parts = re.split(r"(``.+?``)", line)
        parts[::2] = [re.sub(r"(?<!\\)([*|])", r"\\\1", part) for part in parts[::2]]
        lines[number] = "".join(parts)


def setup(app: Sphinx) -> None:
    """Change docstrings before napoleon reads their sections."""
    app.connect("autodoc-process-docstring", _keep_formulas, priority=400)
