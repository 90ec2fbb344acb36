"""TC-06: q4core and the fallback alone, installed from their wheels, run a layer in pure Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import fresh

PROGRAM = """
import json, sys
import torch
import q4core as q4

generator = torch.Generator().manual_seed(1)
weight = q4.PackedWeight(
    format=q4.find_format("nf4"), out_features=48, in_features=128, block_size=64,
    qdata=torch.randint(0, 256, (48, 64), dtype=torch.uint8, generator=generator),
    scale=torch.rand(48, 2, generator=generator),
)
try:
    q4.quantize(torch.ones(48, 128), "nf4")
except q4.PluginError as error:
    missing = str(error)
with q4.Session() as session:
    layer = session.linear(weight)
    x = torch.ones(3, 128)
    y = layer(x)
    exact = x.double() @ q4.dequantize(weight, torch.float64).T
    error = float((y.double() - exact).abs().max())
    record = layer.diagnostics()
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split()[-1] for line in maps if "/" in line})
print(json.dumps({
    "q4core": q4.__file__,
    "plugins": [(item.name, item.state, item.errors) for item in q4.default_registry().records()],
    "backend": record.backend,
    "rejections": len(record.rejections),
    "modules": sorted(name for name in sys.modules if name.startswith("q4_") and "." not in name),
    "error": error,
    "missing": missing,
    "mapped": mapped,
}))
"""


def is_ours(path: Path, clone: Path = fresh.ROOT) -> bool:
    """Return whether a mapped file is one of our packages in an environment, or of the clone outside environments."""
    if "site-packages" in path.parts:
        return str(path).rpartition("/site-packages/")[2].startswith("q4")
    return clone in path.parents


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the python of an environment with torch and its needs, q4core, the fallback, and no other plugin."""
    return fresh.make_environment(
        tmp_path_factory.mktemp("fresh") / "env", [fresh.ROOT, fresh.ROOT / "plugins/dequant-fallback"]
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_core_and_fallback_alone_run_a_layer_without_compiled_code_of_ours(python: Path, tmp_path: Path) -> None:
    """A session is made, a forward is right, the fallback is the only plugin, and nothing native of ours is mapped.

    What quantises is another package, and ``q4.quantize`` says which.
    """
    done = fresh.run(python, "-c", PROGRAM, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    site = Path(told["q4core"]).parents[1]
    assert python.parents[1] in site.parents
    assert told["plugins"] == [["dequant-fallback", "loaded", []]]
    assert (told["backend"], told["rejections"]) == ("dequant-fallback", 0)
    assert told["modules"] == ["q4_dequant_fallback"]
    assert told["error"] < 1e-4
    assert "pip install q4-quantize" in told["missing"]
    mapped = [Path(path) for path in told["mapped"]]
    assert [path for path in mapped if is_ours(path)] == []
    native = [file for file in site.glob("q4*/**/*") if file.suffix in {".so", ".pyd", ".dylib", ".dll"}]
    assert native == []
    assert any("libtorch" in path.name for path in mapped)  # the list is of this process


@pytest.mark.parametrize("clone", ["/home/me/q4core", "/home/me/elsewhere", "/q4core"])
def test_our_files_are_known_wherever_the_clone_is(clone: str) -> None:
    """A file of the clone, or of our packages in any environment, is ours; other packages in the clone's aren't."""
    own, apart = (Path(base, "lib/python3.11/site-packages") for base in (f"{clone}/.nox/env", "/a/q4core-0/env"))
    ours = [Path(clone, "build/_native.so"), own / "q4_cpu_native/_native.so", apart / "q4_actors/_cells.so"]
    others = [own / "torch/lib/libtorch_cpu.so", apart / "numpy/_core.so", Path("/usr/lib/libc.so.6")]
    assert [path for path in (*ours, *others) if is_ours(path, Path(clone))] == ours
