"""The extension of Sphinx that makes pages from data, and names what the pages promise and do not have.

A warning ends ``nox -s docs``: a result that is named and not stored, and a public name without a docstring or outside
of the reference.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.util import logging

from tools.website import chinese, compatibility, inventories, performance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

__all__ = ["MADE", "PUBLIC", "missing_results", "setup", "undocumented"]

ROOT = Path(__file__).parents[2]


def _contributing() -> str:
    """Return CONTRIBUTING.md without its title."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n")[2]


def _extras() -> str:
    """Return the extras of the core's own page, each with its first program."""
    page = (ROOT / "q4core" / "README.md").read_text(encoding="utf-8")
    return "### " + page.partition("\n## Extras\n")[2].partition("\n### ")[2].partition("\n`all` is")[0]


MADE: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
    "performance": (performance.page, ("benchmarks/results/*.json",)),
    "compatibility": (compatibility.page, ("docs/certificates/*/*.md", "benchmarks/results/gpu-*.json")),
    "contributing": (_contributing, ("CONTRIBUTING.md",)),
    "extras": (_extras, ("q4core/README.md",)),
}
"""Name in a page's comment ``<!-- made: NAME -->`` → what makes the text there, and the files that it reads."""
PUBLIC = (
    "q4core",
    "q4core.extension",
    "q4core.memory",
    "q4core.plugin_api",
    "q4_actors",
    "q4_conformance",
    "q4_gguf",
    "q4_lm",
    "q4_nn",
    "q4_onnx",
    "q4_programs",
    "q4_quantize",
    "q4_safetensors",
    "q4_snn",
    "q4_snn.actors",
    "q4_snn.connectors",
    "q4_snn.plot",
    "q4_snn.spikegen",
    "q4_snn.surrogate",
    "q4_transformers",
    "q4_um_managed",
)
"""Modules whose ``__all__`` is public, each with a page of the reference."""
_log = logging.getLogger(__name__)
_TOCTREE = re.compile(r"^<!--\n(```\{toctree\}\n.*?^```)\n-->", re.DOTALL | re.MULTILINE)
_MADE = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)
_CONTAINER = re.compile(r"^<!-- container: (\w+) -->\n(.*?)^<!-- /container -->$", re.DOTALL | re.MULTILINE)
_RESULT = re.compile(r"(?<!build/)benchmarks/results/([\w.*-]+\.(?:json|png))")


def missing_results(text: str, root: Path = ROOT) -> Iterator[str]:
    """Yield each result that a page names and that is not stored."""
    for name in dict.fromkeys(_RESULT.findall(text)):
        if not any((root / "benchmarks" / "results").glob(name)):
            yield name


def undocumented(name: str) -> Iterator[str]:
    """Yield the public functions and classes of a module that have no docstring of their own."""
    module = importlib.import_module(name)
    for item in module.__all__:
        value = getattr(module, item)
        if (inspect.isclass(value) or inspect.isroutine(value)) and not _own_docstring(value):
            yield f"{name}.{item}"


def _own_docstring(value: Any) -> str | None:
    return vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)


def _change_source(app: Sphinx, name: str, source: list[str]) -> None:
    """Put made text in a page, and take tables of contents and containers out of comments."""
    text = source[0]
    for result in missing_results(text):
        _log.warning("benchmarks/results/%s is named and not stored", result, location=name)
    for found in _MADE.findall(text):
        make, patterns = MADE[found]
        for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
            app.env.note_dependency(str(path))
        try:
            text = text.replace(f"<!-- made: {found} -->", make())
        except (performance.ResultsError, compatibility.CertificateError) as error:
            _log.warning("%s", error, location=name)
    text = chinese.join_lines(text)
    text = _CONTAINER.sub(r"::::{container} \1\n\2\n::::", text)
    source[0] = _TOCTREE.sub(r"\1", text)


def _check_names(_app: Sphinx, env: BuildEnvironment) -> None:
    """Warn about each public name without a docstring, or without an entry in the reference."""
    entries = {name.rpartition(".")[2] for name, _, _, _, _, _ in env.domains["py"].get_objects()}
    for module in PUBLIC:
        for name in undocumented(module):
            _log.warning("%s has no docstring", name)
        for name in importlib.import_module(module).__all__:
            if name not in entries and not inspect.ismodule(getattr(importlib.import_module(module), name)):
                _log.warning("%s.%s is not in the reference", module, name)


def _name_missing(_app: Sphinx, _env: BuildEnvironment, node: pending_xref, _shown: object) -> None:
    """Warn about a name of torch or transformers that the stored inventories do not have."""
    target = node.get("reftarget", "")
    known = any(target in names for names in inventories.NAMES.values())
    if node.get("refdomain") == "py" and target.startswith(("torch.", "transformers.")) and not known:
        _log.warning("%s is not in tools/website/inventories.py", target, location=node)


def _name_language(_app: Sphinx, name: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Name the language of a page that is not in English, for readers aloud and for fonts."""
    if name.startswith("zh/"):
        context["language"] = "zh-CN"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the events of a build."""
    app.connect("source-read", _change_source)
    app.connect("env-check-consistency", _check_names)
    app.connect("missing-reference", _name_missing)
    app.connect("html-page-context", _name_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
