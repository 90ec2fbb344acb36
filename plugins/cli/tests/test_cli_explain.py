"""``q4 explain``: who would serve each layer, and why not the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import q4core as q4
from tests.support.commands import MODEL, NF4, answer, process, say
from tests.support.fakes import FakeBackend, registry

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.usefixtures("reference_alone")
def test_explain_groups_equal_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers with one answer share one block, ``--all`` repeats it, and JSON always has every layer."""
    record = answer(capsys, "explain", MODEL, "--device", "cpu")
    names = [item["layer"] for item in record["layers"]]
    assert len(names) > 2
    grouped, repeated = say(capsys, "explain", MODEL), say(capsys, "explain", MODEL, "--all")
    assert grouped.count("dequant_matmul") == 1
    assert repeated.count("dequant_matmul") == len(names)
    assert all(name in repeated for name in names)
    first = record["layers"][0]
    assert (first["backend"], first["path_name"], first["proven"]) == ("dequant-fallback", "dequant_matmul", False)
    assert first["paths"][0]["m"] == [1, None]


def test_explain_proves_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """``--prove`` prepares a layer of each kind, so that every answer is proven."""
    record = answer(capsys, "explain", MODEL, "--prove", "--m", "1:4")
    assert record["m"] == [1, 4]
    assert all(item["proven"] for item in record["layers"])


def test_proofs_are_remembered_listed_and_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command needs no probe, ``doctor --proofs`` lists what it relies on, and ``--prove`` proves again."""
    monkeypatch.setenv("Q4_CACHE", str(tmp_path))
    shown = []
    for words in (["explain", NF4, "--prove"], ["explain", NF4], ["doctor", "--proofs"], ["explain", NF4, "--prove"]):
        run = process(*words, "--json")
        assert run.returncode == 0, run.stderr
        shown.append(json.loads(run.stdout))
    first, second, doctor, _ = shown
    assert all(item["proven"] for item in first["layers"] + second["layers"])
    (file,) = doctor["proofs"]
    assert (file["backend"], file["is_current"], file["damaged"]) == (first["layers"][0]["backend"], True, 0)
    assert file["count"] >= 1
    assert Path(file["path"]).stat().st_mtime > file["written"]  # written again
    assert f"{file['count']} kinds, in use, last on " in " ".join(process("doctor", "--proofs").stdout.split())


@pytest.mark.usefixtures("reference_alone")
def test_explain_shows_why_no_backend_serves(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no backend serves, every rejection is shown, in one document, and the command ends with 1."""
    record = answer(capsys, "explain", NF4, "--compute-path", "kernel_only", status=1)
    assert record["error"]["code"] == "backend_unavailable"
    (layer,) = record["layers"]
    assert layer["backend"] is None
    reasons = {item["backend"]: item["reasons"] for item in layer["rejections"]}
    assert reasons["dequant-fallback"][0]["code"] == "policy"
    assert "→  no backend" in say(capsys, "explain", NF4, "--compute-path", "kernel_only", status=1)


def test_explain_lists_rejections_when_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losers and their reasons are shown with the winner."""
    reasons = (q4.Reason(q4.ReasonCode.DRIVER, "driver 1 is too old"),)
    backends = registry(FakeBackend("fast"), FakeBackend("unlucky", reasons=reasons))
    monkeypatch.setattr("q4core.default_registry", lambda: backends)
    record = answer(capsys, "explain", NF4)
    (layer,) = record["layers"]
    assert (layer["backend"], layer["path_name"]) == ("fast", "fake_gemm")
    codes = {item["backend"]: item["reasons"][0]["code"] for item in layer["rejections"]}
    assert codes == {"dequant-fallback": "outranked", "unlucky": "driver"}
    assert "driver 1 is too old" in say(capsys, "explain", NF4)


def test_explain_says_which_backends_were_not_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend whose manifest refuses is never asked for the state of its native part, and the text says so."""
    backends = registry(FakeBackend("elsewhere", devices={"cuda"}))
    monkeypatch.setattr("q4core.default_registry", lambda: backends)
    lines = [line.strip() for line in say(capsys, "explain", NF4).splitlines()]
    assert "not elsewhere (refused by what it declares)" in lines
    assert "not asked" not in " ".join(lines)


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("words", [("--compute-path", "kernel_only"), ("--precision", "fp4")])
def test_explain_suggests_nothing_that_is_installed(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Where the request itself rules a path out, the error says so, and does not send people to install it."""
    error = answer(capsys, "explain", NF4, *words, status=1)["error"]
    assert "nstall" not in error["message"]
    assert words[1] in error["message"]
    assert "policy" in error["hint"]


def test_explain_suggests_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reference, which could serve, the hint names it; where it could not, it does not."""
    backends = registry(FakeBackend("gpu-only", devices={"cuda"}), reference=False)
    monkeypatch.setattr("q4core.default_registry", lambda: backends)
    monkeypatch.setattr("q4core.session.session.default_registry", lambda: backends)
    assert "install the package q4-dequant-fallback" in answer(capsys, "explain", NF4, status=1)["error"]["hint"]
    strict = answer(capsys, "explain", NF4, "--compute-path", "kernel_only", status=1)["error"]
    assert "q4-dequant-fallback" not in strict["hint"]


def test_layers_come_in_their_natural_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``layers.2`` comes before ``layers.10``, for explain and inspect."""
    weight = q4.quantize(torch.ones(8, 64), "nf4")
    names = [f"layers.{index}.proj" for index in (0, 1, 2, 10, 11, 20)]
    q4.save_checkpoint(tmp_path / "a.safetensors", dict.fromkeys(sorted(names), weight), dialect="bitsandbytes")
    layers = answer(capsys, "inspect", tmp_path / "a.safetensors")["layers"]
    assert [item["name"] for item in layers] == names
    assert [item["layer"] for item in answer(capsys, "explain", tmp_path / "a.safetensors")["layers"]] == names
