"""What docs/write-a-backend shows is what happens."""

from __future__ import annotations

import collections
import json
import os
import re
import textwrap
from pathlib import Path

import pytest

from q4_conformance import Query
from q4_conformance.execution.isolated import due_cases
from tests.support.commands import run_python
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/write-a-backend"
PAGE = (GUIDE / "index.md").read_text(encoding="utf-8")
HELLO, USE = re.findall(r"^```(?:\{code-block\} py3|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SERVES, RECORD = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SHOWN = {
    f"{page.stem}-{number}": (source, block)
    for page in sorted(GUIDE.glob("*.md"))
    for number, (source, block) in enumerate(
        re.findall(r"^<!-- from (\S+) -->\n```\w+\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE), 1
    )
}
"""Page and number → a file, which an invisible comment names, and the code of it that the page shows below."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the page's ``hello.py``."""
    (tmp_path / "hello.py").write_text(HELLO, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python as the page's reader would, and return what it prints."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    given = {"Q4_PLUGIN_MODULES": "hello", "PYTHONPATH": path, "COLUMNS": "120"} | variables
    return run_python(folder, *arguments, **given)


def test_code_of_files_is_marked() -> None:
    """The pages hold their code themselves, for readers in the repository, and every marker has a block below it."""
    texts = [page.read_text(encoding="utf-8") for page in GUIDE.glob("*.md")]
    assert not any("literalinclude" in text for text in texts)
    assert len(SHOWN) == sum(text.count("<!-- from ") for text in texts) >= 8


@pytest.mark.parametrize(("source", "block"), SHOWN.values(), ids=SHOWN)
def test_code_of_a_file_is_that_files(source: str, block: str) -> None:
    """A marked block is, line for line, a contiguous part of its file; methods stand without their indentation."""
    lines, wanted = (ROOT / source).read_text(encoding="utf-8").splitlines(), block.splitlines()
    parts = ("\n".join(lines[start : start + len(wanted)]) for start in range(len(lines)))
    assert "\n".join(wanted) in map(textwrap.dedent, parts), f"not in {source}, line for line:\n{block}"


def test_hello_world_is_eleven_lines() -> None:
    """The heading says so."""
    assert len(HELLO.splitlines()) == 11
    assert "## Eleven lines" in PAGE


def test_hello_world_is_found(folder: Path) -> None:
    """``q4 doctor`` prints what the page shows."""
    assert SERVES in run(folder, "-m", "q4_cli", "doctor")


def test_hello_world_serves(folder: Path) -> None:
    """A session that names it runs it, and the record is what the page shows with the reference alone."""
    assert run(folder, "-c", USE, Q4_PLUGINS="hello,dequant-fallback") == RECORD


@pytest.mark.soak
def test_hello_world_holds_what_it_declares(folder: Path) -> None:
    """Every case that it declares passes, dense weight and all, because it says so."""
    program = "from q4_conformance import run_cases; report = run_cases('hello'); print(report); assert report.passed"
    assert "hello: passed" in run(folder, "-c", program)


def test_a_program_may_judge_and_certify(tmp_path: Path) -> None:
    """What the page on certificates shows of the package runs, with the reference in the example's place."""
    text = (GUIDE / "certify.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(from q4_conformance.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "hello.py").write_text(program.replace("example-backend", "dequant-fallback"), encoding="utf-8")
    assert run(tmp_path, "hello.py") == "True partial\n"


def test_the_cases_of_the_example_are_counted_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has as many cases as the example's manifest makes due, and as it leaves undeclared; soak runs them."""
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "q4_example_backend")
    monkeypatch.syspath_prepend(ROOT / "examples/q4-example-backend/src")
    due, undeclared = due_cases(Query(name="example-backend"))
    page = (GUIDE / "certify.md").read_text(encoding="utf-8")
    shown = re.findall(r"^not declared: (.*), (\d+) cases$", page, re.MULTILINE)
    assert {reason: int(count) for reason, count in shown} == collections.Counter(undeclared.values())
    assert re.findall(r"^nf4 +(\d+) +(\d+)$", page, re.MULTILINE) == [(str(len(due)),) * 2]
    assert f"{len(due)} of {len(due)} required cases passed; {len(undeclared)} others" in page


@pytest.mark.slow
@pytest.mark.parametrize("page", ["dialect", "memory"])
def test_a_whole_plugin_holds_what_the_page_says(page: str, tmp_path: Path) -> None:
    """The page shows a whole module, and its command judges what that module brings: nothing fails."""
    text = (GUIDE / f"{page}.md").read_text(encoding="utf-8")
    source, block = SHOWN[f"{page}-1"]
    first, (module, command) = re.findall(r"^    Q4_PLUGIN_MODULES=(\S+) PYTHONPATH=. q4 (.*)$", text, re.MULTILINE)
    assert (module, command) == (first[0], f"{first[1]} --report report")
    name = command.split()[1]
    assert f'q4_conformance("{name}", profile="{page}")' in text
    assert source.endswith(f"/{module.replace('.', '/')}.py")
    assert block == (ROOT / source).read_text(encoding="utf-8")
    (tmp_path / f"{module}.py").write_text(block, encoding="utf-8")
    variables = os.environ | {"Q4_PLUGIN_MODULES": module, "PYTHONPATH": "."}
    words = ["-m", "q4_cli", *command.split(), "--json"]
    done = run_interpreter(words, cwd=tmp_path, env=variables, timeout=scaled(240))
    document = json.loads(done.stdout)["certificate"]
    assert done.returncode == 0, done.stderr
    assert document["counts"]["pass"] > 0
    assert document["standing"] != "failed"
