"""``q4 prepare`` and ``q4 cache``."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

import q4core as q4
from q4_lm.commands.declared import cache as cache_commands
from q4_lm.commands.declared import prepare
from q4_lm.prepared.container import Container
from q4core.plugin_api import counted
from tests.support.prepared import only_file

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result


def invoke(cache: Path | str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """Run the command on an application of its own; an error comes through as it is."""
    monkeypatch.setenv("Q4_CACHE", str(cache))
    app = typer.Typer()
    app.command()(prepare)
    app.add_typer(cache_commands, name="cache")
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_prepare_list_verify_prune(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is prepared once, listed with its source, found damaged where it is, and removed."""
    cache = tmp_path / "cache"
    assert "prepared: 0 MB in" in invoke(cache, monkeypatch, "prepare", str(tiny_llama)).stdout
    again = json.loads(invoke(cache, monkeypatch, "prepare", str(tiny_llama), "--json").stdout)
    assert again["state"] == "opened"
    (listed,) = json.loads(invoke(cache, monkeypatch, "cache", "list", "--json").stdout)["files"]
    assert listed["source"] == str(tiny_llama.resolve())
    assert str(tiny_llama.resolve()) in invoke(cache, monkeypatch, "cache", "list").stdout
    assert "1 file, 0 damaged" in invoke(cache, monkeypatch, "cache", "verify").stdout
    data = bytearray(only_file(cache).read_bytes())
    data[-1] ^= 1
    only_file(cache).write_bytes(data)
    verified = invoke(cache, monkeypatch, "cache", "verify")
    assert verified.exit_code == 2
    assert "damaged, the first is number" in verified.stdout
    only_file(cache).write_bytes(b"nothing of ours")
    assert json.loads(invoke(cache, monkeypatch, "cache", "verify", "--json").stdout)["files"][0]["fault"]
    assert "start must be" in invoke(cache, monkeypatch, "cache", "list").stdout
    (cache / "x.tmp").write_bytes(b"half")
    assert "unfinished: its writer was killed" in invoke(cache, monkeypatch, "cache", "list").stdout
    assert "removed 1 file," in invoke(cache, monkeypatch, "cache", "prune", "--limit", "1GB").stdout
    assert "removed 0 files" in invoke(cache, monkeypatch, "cache", "prune", "--limit", "1GB").stdout
    assert invoke(cache, monkeypatch, "cache", "prune").exit_code == 2
    assert only_file(cache).exists()
    proofs = len([*cache.glob("proofs/*")])
    removed = invoke(cache, monkeypatch, "cache", "prune", "--limit", "0").stdout
    more = f", and {counted(proofs, 'file')} of proofs" if proofs else ""
    assert removed == f"removed 1 file, 0 MB{more}\n"
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert json.loads(invoke(cache, monkeypatch, "cache", "prune", "--limit", "0", "--json").stdout)["removed"] == []


def test_prepare_says_why_not(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no cache, or a backend keeps nothing, that is an error with the reason."""
    with pytest.raises(q4.ConfigError, match="Q4_CACHE is 'off'"):
        invoke("off", monkeypatch, "prepare", str(tiny_llama))
    with pytest.raises(q4.LifecycleError, match="keeps views of its source"):
        invoke(tmp_path, monkeypatch, "prepare", str(tiny_llama), "--backend", "dequant-fallback")
    with contextlib.suppress(FileNotFoundError):
        assert not any(tmp_path.iterdir())
    with pytest.raises(q4.ConfigError, match="--limit"):
        invoke(tmp_path, monkeypatch, "cache", "prune", "--limit", "some")
    for command in (("list",), ("verify",), ("prune", "--limit", "0")):
        with pytest.raises(q4.ConfigError, match="Q4_CACHE must be 'off' or a folder"):
            invoke(tiny_llama, monkeypatch, "cache", *command)


def test_verifying_tells_how_far_it_is(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is told once, in order, up to all."""
    cache = tmp_path / "cache"
    invoke(cache, monkeypatch, "prepare", str(tiny_llama))
    steps: list[tuple[int, int]] = []
    container = Container(only_file(cache))
    assert container.verify(lambda done, total: steps.append((done, total))) == []
    assert steps == [(done, len(container)) for done in range(1, len(container) + 1)]
