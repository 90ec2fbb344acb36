"""A page's first program is complete; those that continue it are run by the tests of their page."""

from __future__ import annotations

import builtins
import re
import symtable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python\n(import torch\n.*?)^```", re.DOTALL | re.MULTILINE)
SNIPPETS = {
    f"{page.relative_to(ROOT)}-{number}": snippet
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
    for number, snippet in enumerate(PROGRAM.findall(page.read_text(encoding="utf-8")), 1)
}
"""Page and number → a program that imports torch itself: it does not show that it needs what an earlier one made."""


def undefined(program: str) -> set[str]:
    """Return the names that a program uses and that neither it nor Python defines."""
    module = symtable.symtable(program, "snippet", "exec")
    tables, used = [module], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {item.get_name() for item in table.get_symbols() if item.is_referenced() and item.is_global()}
    defined = {item.get_name() for item in module.get_symbols() if item.is_assigned() or item.is_imported()}
    defined |= {item.get_name() for item in module.get_symbols() if item.is_namespace()}
    used |= {item.get_name() for item in module.get_symbols() if item.is_referenced()}
    return used - defined - {*vars(builtins), "__name__", "__file__"}


def test_names_that_are_missing_are_found() -> None:
    """Names of an earlier program are found wherever they are used; the program's own, and Python's, are not."""
    program = "import torch\ndef f(x):\n    return x + size\ny = [f(item) for item in given]\nprint(y, torch)\n"
    assert undefined(program) == {"size", "given"}


def test_there_are_programs() -> None:
    """Most pages about Python start with one."""
    assert len(SNIPPETS) > 12


@pytest.mark.parametrize("snippet", SNIPPETS.values(), ids=SNIPPETS)
def test_a_program_that_imports_torch_is_complete(snippet: str) -> None:
    """It needs no name of a program above it."""
    assert undefined(snippet) == set()
