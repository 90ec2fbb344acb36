"""What self-probes have shown is remembered on disk, for this machine and this build, and for nothing else."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4core.extension import prove_once
from q4core.selection.proofs import Proofs
from tests.support.events import heard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOY = """
import q4core as q4
from tests.support.fakes import FakeBackend

class Toy(FakeBackend):
    pass

@q4.hookimpl
def q4_backends():
    return [Toy("toy", damage={damage})]
"""
_CHILD = """
import q4core as q4, torch
from tests.selection.test_proofs import probed
print(probed())
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let proofs be remembered in a folder of the test's own, about the backend of a module of its own."""
    (tmp_path / "toy_of_a_test.py").write_text(TOY.format(damage=None), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("Q4_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "toy_of_a_test")
    forget()
    yield
    sys.modules.pop("toy_of_a_test", None)
    forget()


def forget() -> None:
    """Begin as a new process does: without plugins, hashes of code, and results of probes."""
    sys.modules.pop("toy_of_a_test", None)
    importlib.invalidate_caches()
    q4.reset_registry()
    importlib.import_module("q4core.selection.proofs").code_of.cache_clear()


def probed(n: int = 64) -> list[tuple[str, bool, bool]]:
    """Prepare a layer; return of each probe what it was of, whether it passed, and whether it was remembered."""
    weight = q4.quantize(torch.randn(n, 64, generator=torch.Generator().manual_seed(0)), "nf4")
    config = q4.SessionConfig(backend="toy", device="cpu")
    with heard("q4.probe") as events:
        q4.Session(config).linear(weight)
    return [(item["path"], item["passed"], item["remembered"]) for item in events]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return where the proofs are."""
    return tmp_path / "cache" / "proofs"


def file_of(folder: Path) -> Path:
    """Return the one file of the toy."""
    (file,) = folder.glob("toy-*.proofs")
    return file


def test_the_next_process_remembers() -> None:
    """Of equal builds each path is proven once on a machine, not once in each process."""
    first = probed()
    assert first
    assert all(passed and not remembered for _, passed, remembered in first)
    environment = {**os.environ, "PYTHONHASHSEED": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    for seed in ("1", "2"):  # sets are in other orders then
        environment["PYTHONHASHSEED"] = seed
        run = subprocess.run(
            [sys.executable, "-c", _CHILD], env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == str([(path, True, True) for path, *_ in first])


def test_what_is_another_kind_is_proven() -> None:
    """A proof holds for its tail of N alone, as within a process."""
    probed()
    forget()
    assert all(remembered for *_, remembered in probed(64 + 32))
    forget()
    assert not any(remembered for *_, remembered in probed(64 + 1))


def _code(folder: Path) -> None:
    path = folder.parents[1] / "toy_of_a_test.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n# another build\n", encoding="utf-8")


def _setting(_folder: Path) -> None:
    os.environ["Q4_CPU_ISA"] = "avx2" if os.environ.get("Q4_CPU_ISA") != "avx2" else "avx512"


def _head(folder: Path, **facts: Any) -> None:
    file = file_of(folder)
    first, *rest = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join((json.dumps({**json.loads(first), **facts}, sort_keys=True), *rest)) + "\n", "utf-8")


def _processor(folder: Path) -> None:
    _head(folder, processor="another one")


def _microcode(folder: Path) -> None:
    _head(folder, microcode="0x2")


def _torch(folder: Path) -> None:
    _head(folder, torch="1.0")


def _cut(folder: Path) -> None:
    file_of(folder).write_bytes(b"")


def _garbage(folder: Path) -> None:
    file_of(folder).write_bytes(b"\x00\xff[" * 5000)


def _nested(folder: Path) -> None:
    file_of(folder).write_bytes(b"[" * 200_000)


def _folder(folder: Path) -> None:
    file = file_of(folder)
    file.unlink()
    file.mkdir()


def _key(folder: Path) -> None:
    file = file_of(folder)
    lines = file.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines[1:]]
    text = [json.dumps({**entry, "rows": [*entry["rows"], 4096]}) for entry in entries]
    file.write_text("\n".join((lines[0], *text)), encoding="utf-8")


@pytest.mark.parametrize(
    "change", [_code, _setting, _processor, _microcode, _torch, _cut, _garbage, _nested, _folder, _key]
)
def test_after_a_change_everything_is_proven_anew(
    change: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other code, another machine, another setting, and a damaged file: nothing is taken over, and nothing fails."""
    monkeypatch.setenv("Q4_CPU_ISA", os.environ.get("Q4_CPU_ISA", ""))
    first = probed()
    change(folder)
    forget()
    assert probed() == first


def test_each_line_stands_for_itself(folder: Path) -> None:
    """A proof that a killed process cut off is made again, and the others are remembered."""
    first = probed()
    file = file_of(folder)
    file.write_bytes(file.read_bytes()[:-20])
    forget()
    again = probed()
    assert [remembered for *_, remembered in again].count(False) == 1
    assert len(again) == len(first)
    (found,) = [item for item in _stored().files() if item.backend == "toy"]
    assert (found.is_current, found.damaged) == (True, 1)


def test_what_was_wrong_is_not_remembered(tmp_path: Path, folder: Path) -> None:
    """A fault may lie in the machine's state: the next process looks again, and warns again."""
    (tmp_path / "toy_of_a_test.py").write_text(TOY.format(damage="lambda y: y.add_(1)"), encoding="utf-8")
    for _ in range(2):
        forget()
        with pytest.raises(q4.BackendUnavailableError, match="probe_failed"), pytest.warns(q4.Q4ProbeWarning):
            probed()
        importlib.import_module("tests.support.events").forget_warnings()
    stored = [json.loads(line) for file in folder.glob("toy-*") for line in file.read_text().splitlines()[1:]]
    assert not [entry for entry in stored if "fake_gemm" in entry["what"]]


def test_a_fault_forgets_what_was_proven_before(tmp_path: Path, folder: Path) -> None:
    """A processor or a library that begins to compute wrong is trusted in nothing by the next process."""
    probed()
    assert [*folder.iterdir()]
    (tmp_path / "toy_of_a_test.py").write_text(TOY.format(damage="lambda y: y.add_(1)"), encoding="utf-8")
    forget()
    with pytest.raises(q4.BackendUnavailableError, match="probe_failed"), pytest.warns(q4.Q4ProbeWarning):
        probed()
    assert not [file for file in folder.iterdir() if "fake_gemm" in file.read_text(encoding="utf-8")]
    importlib.import_module("tests.support.events").forget_warnings()


def test_given_plugins_store_nothing(folder: Path) -> None:
    """Objects of a test or of the kit may change from run to run: they are proven in each process."""
    toy = importlib.import_module("toy_of_a_test")
    registry = q4.Registry([("toy", toy), ("reference", importlib.import_module("q4_dequant_fallback"))])
    weight = q4.quantize(torch.randn(64, 64), "nf4")
    q4.Session(q4.SessionConfig(backend="toy"), registry=registry).linear(weight)
    assert not folder.exists()


def test_off_and_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Q4_CACHE=off`` stores nothing; where nothing can be stored, every process proves for itself."""
    monkeypatch.setenv("Q4_CACHE", "off")
    forget()
    assert not any(remembered for *_, remembered in probed())
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("Q4_CACHE", str(tmp_path / "file"))
    forget()
    with heard("q4.proofs") as events:
        assert not any(remembered for *_, remembered in probed())
    assert events


def test_what_libraries_prove_is_remembered_too() -> None:
    """A program, or a product of spikes, is proven once on a machine; of another kind again, and after a fault."""
    seen: list[str] = []

    def find(kind: str, fault: str | None = None) -> str | None:
        def probe() -> str | None:
            seen.append(kind)
            return fault

        forget()
        registry = q4.default_registry()
        return prove_once(registry, registry.backends()["toy"], "sums", (kind, 1.5), probe)

    assert [find("a"), find("a"), find("b")] == [None, None, None]
    assert seen == ["a", "b"]
    with pytest.warns(q4.Q4ProbeWarning, match="all wrong"):
        assert find("c", "all wrong") == "all wrong"
    assert find("a") is None
    assert seen == ["a", "b", "c", "a"]


def test_few_files_are_kept(folder: Path) -> None:
    """Builds that are gone leave no files behind for ever."""
    folder.mkdir(parents=True)
    for number in range(20):
        (folder / f"toy-{number:016}.proofs").write_text("{}\n", encoding="utf-8")
        os.utime(folder / f"toy-{number:016}.proofs", (number, number))
    probed()
    names = [file.name for file in folder.iterdir()]
    assert len(names) == 8
    assert "toy-0000000000000019.proofs" in names


def test_forgotten_proofs_are_made_anew(folder: Path) -> None:
    """``forget`` removes every file, of other builds too."""
    first = probed()
    (folder / "gone-0000000000000001.proofs").write_text("{}\n", encoding="utf-8")
    assert _stored().forget() == 2
    assert not [*folder.iterdir()]
    forget()
    assert probed() == first


def _stored() -> Proofs:
    found = Proofs.here(q4.default_registry())
    assert found is not None
    return found
