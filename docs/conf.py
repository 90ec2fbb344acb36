"""How Sphinx builds these pages: Markdown by hand, and a reference from the docstrings."""

from __future__ import annotations

import importlib.metadata

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
