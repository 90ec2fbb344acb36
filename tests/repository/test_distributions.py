"""Every distribution is described completely, and installs by what its own file says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from tools.installed import first_programs, install_command
from tools.lowest import APART, ENVIRONMENTS, asked, bounds, requirements, unproven
from tools.projects import EXAMPLE, ROOT, Project, projects

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECTS = projects()
NAMES = {project.name for project in PROJECTS}
PYTHONS = [f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)]
URLS = ["Homepage", "Documentation", "Source", "Changelog"]
LINK = re.compile(r"\]\((?!https?://)[^)]*\)|^\[[^]]+\]: (?!https?://).*$", re.MULTILINE)
KINDS = r"(?:Framework|Environment|Development Status|Intended Audience|Operating System|Topic|Typing)"


def missing(project: Project) -> Iterator[str]:
    """Return what a project's table lacks, in words."""
    table = project.table
    for key, least in {"description": 20, "authors": 1, "keywords": 3, "classifiers": 10, "license-files": 1}.items():
        if len(table.get(key, "")) < least:
            yield f"{key} must have at least {least} items or letters"
    if table.get("license") != "Apache-2.0" or table.get("requires-python") != ">=3.10":
        yield "license must be Apache-2.0, and requires-python >=3.10"
    classifiers = table.get("classifiers", [])
    if [item for item in classifiers if re.search(r":: 3\.\d+$", item)] != PYTHONS:
        yield f"classifiers must name the Pythons {PYTHONS}"
    if "Typing :: Typed" not in classifiers or [item for item in classifiers if item.startswith("License ::")]:
        yield "classifiers must have Typing :: Typed, and no licence, which has a field of its own"
    if not all(re.match(rf"{KINDS} ::|Programming Language ::", item) for item in classifiers):
        yield "classifiers must be of the index's kinds"
    if list(table.get("urls", {})) != URLS:
        yield f"urls must be {URLS}"
    if table.get("version") != q4.__version__:
        yield f"version must be that of the core, {q4.__version__}"


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_metadata_is_complete(project: Project) -> None:
    """Each field that an index shows is there, and the licence's file, too."""
    assert list(missing(project)) == []
    for name in project.table["license-files"]:
        assert (project.folder / name).read_bytes() == (ROOT / "LICENSE").read_bytes()
    scripts = project.table.get("scripts", {})
    assert all(re.fullmatch(r"[\w.]+:\w+", target) for target in scripts.values())


def test_gaps_are_found() -> None:
    """A table without one of the fields is reported."""
    project = Project(ROOT)
    for key in ("description", "authors", "keywords", "classifiers", "license-files", "license", "urls", "version"):
        project.table = {name: value for name, value in Project(ROOT).table.items() if name != key}
        assert list(missing(project)), key


@pytest.mark.parametrize("project", [*PROJECTS, Project(EXAMPLE)], ids=lambda project: project.name)
def test_readme_needs_nothing_of_the_repository(project: Project) -> None:
    """An index shows it alone: it begins with the name, and has no link to a file next to it."""
    text = (project.folder / project.table["readme"]).read_text(encoding="utf-8")
    assert text.startswith(f"# {project.name}\n")
    assert LINK.findall(text) == []


@pytest.mark.parametrize("text", ["[a](docs/a.md)", "[a](../a.md)", "[a](#a)", "x\n[a]: docs/a.md\n", "![a](a.svg)"])
def test_relative_links_are_found(text: str) -> None:
    """A link without a server is relative, of an image and of a reference, too."""
    assert LINK.findall(text)
    assert not LINK.findall("[a](https://a.example/b) and [b]")


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_types_are_marked(project: Project) -> None:
    """Each package that a wheel has carries ``py.typed``."""
    tool = project.toml["tool"]
    wheel = tool["scikit-build"]["wheel"] if project.native else tool["hatch"]["build"]["targets"]["wheel"]
    packages = [project.folder / name for name in wheel["packages"] if not name.endswith(".py")]
    assert packages
    assert [str(folder) for folder in packages if not (folder / "py.typed").is_file()] == []


@pytest.mark.parametrize("project", [*PROJECTS, Project(EXAMPLE)], ids=lambda project: project.name)
def test_requirements_have_lower_bounds(project: Project) -> None:
    """Each requirement names the lowest version that will do; one of ours is a version that there is."""
    for line in (line for lines in project.requirements.values() for line in lines):
        match = re.match(r"(q4core|q4-[\w-]+)(?:\[([\w,-]+)\])?(?:>=(\S+))?$", line)
        if match is None:
            assert re.match(r"[\w-]+(\[\w+\])?>=\d", line), line
            continue
        name, extras, bound = match.groups()
        own = name == project.name
        assert name in NAMES
        assert own or bound == q4.__version__, line
        known = {item.name: item.requirements for item in PROJECTS}[name]
        assert set(filter(None, (extras or "").split(","))) <= set(known), line


def test_plugins_that_import_the_core_ask_for_it() -> None:
    """All but the core ask for it, the faults and the kit, too."""
    assert [item.name for item in PROJECTS if not any(line.startswith("q4core") for line in item.requirements[""])] == [
        "q4core"
    ]


def test_all_has_every_extra() -> None:
    """The extra ``all`` is every other one, but for what programs of the repository need."""
    extras = Project(ROOT).requirements
    (line,) = extras["all"]
    assert set(line[len("q4core[") : -1].split(",")) == set(extras) - {"", "all", "examples"}


def test_each_extra_has_a_first_program() -> None:
    """The core's own page shows one for each extra, which ``nox -s installed`` runs."""
    assert set(first_programs()) == set(Project(ROOT).requirements) - {"", "all"}
    assert first_programs()["cli"] == ("    q4 doctor\n    q4 --help\n", False)


def test_readme_installs_from_the_files() -> None:
    """The command that ``nox -s installed`` runs first is README's, for the three extras of the command line."""
    assert install_command()[-1] == "q4core[cpu,cli,lm]"
    assert install_command()[:2] == ["install", "--find-links"]


def test_a_requirement_without_a_bound_is_refused() -> None:
    """``lowest`` could not prove it; ours and torch's are not its matter, and those of each extra are."""
    given = {"a": {"": ["attrs>=23.1", "q4core>=1", "torch>=2.8"], "b": ["Nir[x]>=1.0 ; python_version > '3'"]}}
    assert bounds(given) == {"attrs": {"23.1"}, "nir": {"1.0"}}
    with pytest.raises(ValueError, match=r"a: requirement 'numpy' must have a lower bound"):
        bounds({"a": {"": ["numpy"]}})


def test_bounds_that_no_environment_got_are_named() -> None:
    """A later version proves nothing; 1.0 and 1.0.0 are one version."""
    assert unproven({"a": {"1.0"}, "b": {"2.1"}}, [{"a": "1.0.0", "b": "2.2"}, {"a": "3.0"}]) == [
        "b>=2.1: the environments got ['2.2', 'None']"
    ]


def test_each_package_is_in_an_environment_of_the_lowest_versions() -> None:
    """Together they have every package of ours and every extra, but for those that name ours alone."""
    found: dict[str, set[str]] = {}
    lines = [line for name in ENVIRONMENTS for line in asked(name)]
    for line in (line for line in lines if line.startswith("q4")):
        name, _, extras = line.rstrip("]").partition("[")
        found.setdefault(name, set()).update(filter(None, extras.split(",")))
    assert set(found) == NAMES
    for name, needed in requirements().items():
        others = {extra for extra, rows in needed.items() if extra and not all(re.match("q4", row) for row in rows)}
        assert others <= found[name], name
        assert set(needed[""]) <= {*lines, *(row for row in needed[""] if row.startswith("q4"))}, name
    assert set(APART) < set(ENVIRONMENTS)
    assert all(set(extras) <= {"", *requirements()[name]} for items in APART.values() for name, extras in items.items())
    assert all((ROOT / folder).is_dir() for folders in ENVIRONMENTS.values() for folder in folders)
