"""Pipes, sockets, devices and loops under the names of checkpoints are refused at once: nothing ever waits."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.footprint import run_child

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="these files are Unix's")

OPEN = """
import json, os, resource, signal, sys
import q4core as q4

q4.dialects()  # with every plugin, whose readers are asked too
found = {}
for path in sys.argv[1:]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(5)  # ends the process, whatever it waits for
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # for a device without end
        try:
            answer = {"opened": list(q4.open(path).dense)}
        except BaseException as error:
            fields = {field: str(getattr(error, field, None)) for field in ("where", "rule", "value")}
            answer = {"error": type(error).__name__, **fields}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    found[path] = json.loads(answer) if answer else {"error": "killed after 5 s"}
print(json.dumps(found))
"""

ENDS = ("", ".safetensors", ".safetensors.index.json", ".gguf")
ALONE = [f"{kind}{end}" for kind in ("pipe", "socket", "zero", "loop") for end in ENDS]
FOLDERS = {
    # folder → the file in it that is blamed, or None for the folder itself
    "model is a pipe": "model.safetensors",
    "model is its own folder": "model.safetensors",
    "only file is a pipe": "any.safetensors",
    "index is a pipe": "model.safetensors.index.json",
    "index is a loop": "model.safetensors.index.json",
    "index is a device": "model.safetensors.index.json",
    "shard is a pipe": "part.safetensors",
    "shard is a device": "part.safetensors",
    "shard has an endless name": "x" * 300 + ".safetensors",
    "config is a pipe": "config.json",
    "config is a device": "config.json",
    "sidecar is a pipe": "hf_quant_config.json",
    "folder in itself": None,
}


def _make(folder: Path) -> Iterator[socket.socket]:
    """Fill a folder with special files; yield the sockets, which live as long as the test."""
    for end in ENDS:
        os.mkfifo(folder / f"pipe{end}")
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(folder / f"socket{end}"))
        yield bound
        (folder / f"zero{end}").symlink_to("/dev/zero")
        (folder / f"loop{end}").symlink_to(f"loop{end}")
    for name, file in FOLDERS.items():
        place = folder / name
        place.mkdir()
        if file is None:
            (place / "self").symlink_to(place)
            continue
        if file.endswith("config.json"):
            save_file({"x": torch.ones(1)}, place / "model.safetensors")
        if name.startswith("shard"):
            index = {"weight_map": {"x": file}}
            (place / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        if name.endswith("name"):
            continue
        if name.endswith("pipe"):
            os.mkfifo(place / file)
        else:
            target = {"a device": "/dev/zero", "a loop": file, "its own folder": str(place)}[name.partition(" is ")[2]]
            (place / file).symlink_to(target)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Return a folder of special files; its name is short, as the names of sockets must be."""
    import tempfile  # noqa: PLC0415  # pytest's own folders have long names

    with tempfile.TemporaryDirectory(prefix="q4-") as name:
        sockets = list(_make(Path(name)))
        yield Path(name)
        for bound in sockets:
            bound.close()


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, Any]:
    """Return what ``q4.open`` says to each of them, by name."""
    names = [*ALONE, *FOLDERS, "folder in itself/self/self", "model is a pipe/model.safetensors/x"]
    found = run_child(OPEN, *(place / name for name in names))
    return {name: found[str(place / name)] for name in names}


@pytest.mark.parametrize("name", ALONE)
def test_special_file_is_refused(name: str, answers: dict[str, Any], place: Path) -> None:
    """A pipe, socket, device or loop of links is no checkpoint, whatever its name says."""
    assert answers[name]["error"] == "CheckpointError"
    assert answers[name]["where"] == str(place / name)
    wanted = {"pipe": "a pipe", "socket": "a socket", "zero": "a character device"}.get(name.partition(".")[0])
    if wanted is not None:
        assert answers[name]["rule"] == "a regular file or a folder"
        assert answers[name]["value"] == wanted


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_of_special_files_is_refused(name: str, answers: dict[str, Any], place: Path) -> None:
    """A model's folder whose parts are no regular files is refused, by the part."""
    assert answers[name]["error"] == "CheckpointError"
    file = FOLDERS[name]
    assert answers[name]["where"] == str(place / name / file if file else place / name)


@pytest.mark.parametrize("name", ["folder in itself/self/self", "model is a pipe/model.safetensors/x"])
def test_path_through_special_files_is_refused(name: str, answers: dict[str, Any]) -> None:
    """A path that leads round in a circle, or through a pipe, is refused too."""
    assert answers[name]["error"] == "CheckpointError"
