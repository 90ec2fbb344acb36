"""TC-06: q4core and the fallback alone, installed from their wheels, run a layer in pure Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, sys
import torch
import q4core as q4

weight = q4.quantize(torch.randn(48, 128, generator=torch.Generator().manual_seed(1)), "nf4")
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
    "mapped": mapped,
}))
"""


def _wheel(folder: Path, target: Path) -> Path:
    """Build the wheel of a distribution, as an index would serve it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the python of an environment with torch and its needs, q4core, the fallback, and no other plugin."""
    base = tmp_path_factory.mktemp("fresh")
    venv.create(base / "env", with_pip=False, symlinks=True)
    python = base / "env" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(base / "env")}))
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        ours = item.name.lower().lstrip("_").startswith(("q4", "editable"))
        if not ours and item.suffix != ".pth" and not (site / item.name).exists():
            (site / item.name).symlink_to(item)
    for number, folder in enumerate((ROOT, ROOT / "plugins" / "dequant-fallback")):
        target = base / str(number)
        target.mkdir()
        with zipfile.ZipFile(_wheel(folder, target)) as wheel:
            wheel.extractall(site)
    return python


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_core_and_fallback_alone_run_a_layer_without_compiled_code_of_ours(fresh: Path, tmp_path: Path) -> None:
    """A session is made, a forward is right, the fallback is the only plugin, and nothing native of ours is mapped."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "Q4_", "COV_"))}
    command = [str(fresh), "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    site = Path(told["q4core"]).parents[1]
    assert fresh.parents[1] in site.parents
    assert told["plugins"] == [["dequant-fallback", "loaded", []]]
    assert (told["backend"], told["rejections"]) == ("dequant-fallback", 0)
    assert told["modules"] == ["q4_dequant_fallback"]
    assert told["error"] < 1e-4
    ours = [path for path in told["mapped"] if "/q4" in path.removeprefix(str(site.parent))]
    assert ours == []
    native = [file for file in site.glob("q4*/**/*") if file.suffix in {".so", ".pyd", ".dylib", ".dll"}]
    assert native == []
    assert any("libtorch" in path for path in told["mapped"])  # the list is of this process
