"""A document that says two things of one subject is refused, although it was hashed anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import documents
import pytest

from q4_conformance.execution.query import Query
from q4_conformance.report.certificate import content_hash, make_certificate, to_text, verdict_hash
from q4_conformance.report.verify import CertificateError, read_certificate

if TYPE_CHECKING:
    from collections.abc import Callable

GPU = {"device": {"gpu": "NVIDIA B200"}}
CLASS = {"manifest": {"class": "another_package.backend.Kernel"}}


def _edited(told: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    told = {**told, **{section: {**told[section], **change} for section, change in changes.items()}}
    told["verdict_hash"] = verdict_hash(told)
    return {**told, "content_hash": content_hash(told)}


def _with_command(*words: str) -> dict[str, dict[str, Any]]:
    return {"run": {"command": ["q4", "conform", *words]}}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"subject": {"name": "cpu-native"}}, "manifest.name"),
        ({"subject": {"name": "cpu-native"}, "manifest": {"name": "cpu-native"}}, "run.command"),
        (_with_command("cpu-native"), "run.command"),
        (_with_command("made-up", "--device", "cuda"), "run.command"),
        (_with_command("made-up", "--profile", "memory"), "run.command"),
        (_with_command("made-up", "--format", "q4_0"), "run.command"),
        (_with_command("made-up", "--format", "q4_0", "--format", "q8_0"), "run.partial"),
        (_with_command("made-up", "--case", "TC-09"), "run.command"),
        (_with_command("made-up", "--limit", "9"), "run.command"),
        (_with_command("made-up", "--jobs", "77"), "run.command"),
        (_with_command("made-up", "--device"), "run.command"),
        (_with_command(), "run.command"),
        ({"manifest": {"name": None}}, "manifest.name"),
        (CLASS, "source.package"),
        ({"device": {"device": "cuda"}}, "device.device"),
        (GPU, "device.gpu"),
        ({"device": {"compute_capability": "10.0"}}, "device.compute_capability"),
        ({"device": {"driver": "580.1"}}, "device.driver"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, dict[str, Any]], name: str
) -> None:
    """Who was judged, by which command and on what device stands in several places, which must agree."""
    path = tmp_path / "certificate.json"
    path.write_text(to_text(_edited(documents.document(), changes)), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    assert caught.value.name == name


def _refused(path: Path, told: dict[str, Any]) -> str | None:
    """Return the name of what is refused in a document that was hashed anew."""
    path.write_text(to_text(_edited(told, {})), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    return caught.value.name


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"bound": 1e9}, "overrides[0].bound"),
        ({"case": ""}, "overrides[0].case"),
        ({"reason": " "}, "overrides[0].reason"),
        ({"bound": 1.0}, "overrides[0].override"),
        ({"bound": 1e9, "is_known_failure": True}, "known_failures[0].bound"),
    ],
)
def test_an_override_that_the_kit_refuses_is_in_no_certificate(
    tmp_path: Path, facts: dict[str, Any], name: str
) -> None:
    """Of a bound that is too wide, no case, no reason or no effect no run writes, whatever its sentence owns to."""
    told = documents.widened(**facts)
    bare = [{key: value for key, value in item.items() if key != "overrides"} for item in told["results"]]
    assert _refused(tmp_path / "certificate.json", {**told, "results": bare}) == name


def test_an_override_stands_where_it_belongs(tmp_path: Path) -> None:
    """Known failures have a list of their own, and a wider bound is a backend's alone."""
    path, told = tmp_path / "certificate.json", documents.widened()
    swapped = {**told, "overrides": [], "known_failures": told["overrides"]}
    assert _refused(path, swapped) == "known_failures[0].is_known_failure"
    other = {**told["subject"], "profile": "dialect", "device": "cpu"}
    assert _refused(path, {**told, "subject": other}) == "overrides[0].bound"


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ({"formats": ["q4_0"]}, "manifest.capabilities.formats"),
        ({"formats": []}, "manifest.capabilities.formats"),
        ({"precisions": ["w4a8"]}, "manifest.capabilities.precisions"),
        ({"precisions": ["w4a16"]}, "manifest.capabilities.precisions"),
    ],
)
def test_what_passed_is_declared(tmp_path: Path, declared: dict[str, list[str]], name: str) -> None:
    """A format or a precision on which a case passed can't be taken out of the manifest, nor the manifest itself."""
    path, told = tmp_path / "certificate.json", documents.document()
    capabilities = {**told["manifest"]["capabilities"], **declared}
    assert _refused(path, {**told, "manifest": {**told["manifest"], "capabilities": capabilities}}) == name
    bare = {key: item for key, item in told["manifest"].items() if key != "capabilities"}
    assert _refused(path, {**told, "manifest": bare}) == "manifest.capabilities"


def test_every_format_declared_is_each_of_them(tmp_path: Path) -> None:
    """Of a backend that declares all formats, any may pass."""
    path, told = tmp_path / "certificate.json", documents.document()
    capabilities = {**told["manifest"]["capabilities"], "formats": ["*"]}
    path.write_text(to_text(_edited(told, {"manifest": {"capabilities": capabilities}})), encoding="utf-8")
    assert read_certificate(path)["manifest"]["capabilities"]["formats"] == ["*"]


def _on_cuda(**facts: Any) -> dict[str, Any]:
    """Return the document of a run of one format on a GPU."""
    target = attrs.evolve(documents.TARGET, device="cuda")
    told = documents.document(target=target, query=Query(name="made-up", device="cuda"))
    device = {"device": "cuda", "gpu": "NVIDIA B200", "compute_capability": "10.0", "driver": "580.1"}
    return _edited(told, {"device": device | facts, "run": {"command": [*documents.COMMAND, "--device", "cuda"]}})


def test_a_certificate_of_a_gpu_names_it(tmp_path: Path) -> None:
    """One on cuda names the GPU, and none that the environment hid."""
    path = tmp_path / "certificate.json"
    path.write_text(to_text(_on_cuda()), encoding="utf-8")
    assert read_certificate(path)["device"]["gpu"] == "NVIDIA B200"
    path.write_text(to_text(_on_cuda(gpu=None)), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    assert caught.value.name == "device.gpu"
    hidden = _edited(_on_cuda(), {"run": {"environment": {"CUDA_VISIBLE_DEVICES": ""}}})
    path.write_text(to_text(hidden), encoding="utf-8")
    with pytest.raises(CertificateError, match="CUDA_VISIBLE_DEVICES"):
        read_certificate(path)


@pytest.mark.parametrize(
    "query",
    [
        Query(name="made-up", jobs=1),
        Query(name="made-up", profile="kernel"),
        Query(name="made-up", formats=("q4_0", "q8_0"), only=("TC-09", "EX-01/rows")),
    ],
    ids=["jobs", "profile", "partial"],
)
def test_what_a_run_writes_of_itself_agrees(tmp_path: Path, query: Query) -> None:
    """The command that a run records is the one that its document is checked against."""
    path = tmp_path / "certificate.json"
    run = documents.run(query=query)
    path.write_text(to_text(make_certificate(run, query.command())), encoding="utf-8")
    assert read_certificate(path)["run"]["command"][:3] == documents.COMMAND


@pytest.mark.parametrize("command", [["pytest", "-q"], ["python", "judge.py"]])
def test_another_program_may_have_made_it(tmp_path: Path, command: list[str]) -> None:
    """A command that is not ours is recorded as it was, and says nothing that could be checked."""
    path = tmp_path / "certificate.json"
    path.write_text(to_text(make_certificate(documents.run(), command)), encoding="utf-8")
    assert read_certificate(path)["run"]["command"] == command


def test_a_function_of_a_module_may_call_its_backend_anything(tmp_path: Path) -> None:
    """The name of ``module:function`` is no backend's name, and is not compared with one."""
    path = tmp_path / "certificate.json"
    target = attrs.evolve(documents.TARGET, name="mine:make")
    run = documents.run(target=target, query=Query(name="mine:make"))
    path.write_text(to_text(make_certificate(run, ["q4", "conform", "mine:make"])), encoding="utf-8")
    assert read_certificate(path)["manifest"]["name"] == "made-up"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _large(folder: Path) -> Path:
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)  # holes: it takes no room
    return folder / "large"


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda _: Path("/dev/zero"), "a regular file"),
        (lambda _: Path("/dev/null"), "a regular file"),
        (_pipe, "a regular file"),
        (lambda folder: folder, "a regular file"),
        (_large, "bytes"),
        (lambda _: Path("a\0b"), "can be read"),
        (lambda folder: folder / ("a" * 300), "can be read"),
    ],
    ids=["zero", "null", "pipe", "folder", "large", "nul", "long"],
)
def test_no_file_is_read_for_ever(tmp_path: Path, make: Callable[[Path], Path], rule: str) -> None:
    """A device, a pipe that nobody writes to, a folder and a file that is too large are typed errors, at once."""
    with pytest.raises(CertificateError, match=rule) as caught:
        read_certificate(make(tmp_path))
    assert caught.value.name in {"file", "size"}
