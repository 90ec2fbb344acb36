"""Checks of the core itself: detection, the bare environment, and unified memory without a provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.dialect import DENSE, MODULES
from q4_conformance.contract.case import check, expect, raised
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.outcome import FailureError
from q4core import BUILTIN_FORMATS, ScaleKind, SchemaError, detect, detect_or_fail, validate

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case

_PROCESS_SECONDS = 120


def _trio() -> dict[str, torch.Tensor]:
    weight = WeightRecipe(format="nf4", n=8, k=128).build()
    table = torch.tensor(BUILTIN_FORMATS["nf4"].codebook)
    return {"weight": weight.qdata, "absmax": weight.scale.reshape(-1), "quant_map": table}


def _pair() -> dict[str, torch.Tensor]:
    weight = WeightRecipe(format="nvfp4", n=8, k=64, scale_kind=ScaleKind.E4M3).build()
    return {"qdata": weight.qdata, "scale": weight.scale}


def _check_detected(parts: dict[str, torch.Tensor], kind: str, shape: tuple[int, int], block: int) -> str:
    """Expect each module of the parts to be found as a layer of this kind, with data and without; no other."""
    tensors = {f"{module}.{key}": tensor for module in MODULES for key, tensor in parts.items()} | DENSE
    for held in (tensors, {key: value.to("meta") for key, value in tensors.items()}):
        schema = detect_or_fail(held)
        expect(tuple(schema.layers) == MODULES, f"layers {list(schema.layers)}")
        for module, layer in schema.layers.items():
            expect(layer.format == kind, f"{module}: format {layer.format!r}")
            expect((layer.shape, layer.block_size) == (shape, block), f"{module}: {layer.shape}, {layer.block_size}")
            own = {key for key in tensors if key.startswith(f"{module}.")}
            expect(set(layer.keys.values()) == own, f"{module}: keys {layer.keys}")
        expect(set(schema.dense) == DENSE.keys(), f"dense tensors {sorted(schema.dense)}")
        expect(not validate(schema, held), "a valid schema has problems")
    return f"{len(MODULES)} layers, with data and on the meta device"


check("detect_nf4")(lambda *_: _check_detected(_trio(), "nf4", (8, 128), 64))
check("detect_nvfp4")(lambda *_: _check_detected(_pair(), "nvfp4", (8, 64), 16))


def _planted() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a checkpoint with one fault in each layer, and the key and code by which each fault must be reported."""
    trio, pair = _trio(), _pair()
    layers: dict[str, tuple[dict[str, torch.Tensor], str, str]] = {
        "a": ({key: trio[key] for key in ("weight", "quant_map")}, "absmax", "missing_key"),
        "b": ({key: trio[key] for key in ("weight", "absmax")}, "quant_map", "missing_key"),
        "c": (trio | {"absmax": trio["absmax"].to(torch.int64)}, "absmax", "dtype"),
        "d": (trio | {"quant_map": trio["quant_map"][:15]}, "quant_map", "shape"),
        "e": (trio | {"weight": trio["weight"].reshape(-1)}, "weight", "shape"),
        "f": (trio | {"absmax": trio["absmax"][:-1]}, "absmax", "shape"),
        "g": (trio | {"weight_scale_9": torch.ones(1)}, "weight_scale_9", "unknown_key"),
        "h": ({"qdata": pair["qdata"]}, "scale", "missing_key"),
        "i": (pair | {"scale": pair["scale"].to(torch.float32).to(torch.int32)}, "scale", "dtype"),
        "j": (pair | {"scale": pair["scale"][:, :-1]}, "scale", "shape"),
        "k": (pair | {"qdata": pair["qdata"].to(torch.int64)}, "qdata", "dtype"),
    }
    tensors = {f"{name}.{key}": tensor for name, (parts, _, _) in layers.items() for key, tensor in parts.items()}
    return tensors, {f"{name}.{key}": code for name, (_, key, code) in layers.items()}


@check("validate")
def _check_validate(_case: Case, _subject: object) -> str:
    tensors, planted = _planted()
    schema = detect(tensors)
    if schema is None:
        raise FailureError("nothing was detected")
    found = {problem.key: problem.code for problem in validate(schema, tensors)}
    missed = {key: code for key, code in planted.items() if found.get(key) != code}
    expect(not missed, f"not reported, or with another code: {missed}; reported: {found}")
    error = raised(SchemaError, lambda: detect_or_fail(tensors), "detect_or_fail accepted a damaged checkpoint")
    raised_by = {problem.key: problem.code for problem in error.problems}
    expect(raised_by == found, f"detect_or_fail reports {raised_by}, validate {found}")
    missing = [key for key in planted if key not in str(error)]
    expect(not missing, f"the message does not name {missing}")
    return f"{len(planted)} faults at once"


_BARE = """
import importlib.metadata, json, os, sys
import torch
import q4core as q4
codes, scale = torch.arange(32 * 64).remainder(251).to(torch.uint8).reshape(32, 64), torch.ones(32, 2)
weight = q4.PackedWeight(
    format=q4.find_format("nf4"), out_features=32, in_features=128, block_size=64, scale_kind=q4.ScaleKind.PLAIN,
    packing=q4.Packing.HIGH_FIRST, qdata=codes, scale=scale,
)
with q4.Session(q4.SessionConfig(device="cpu")) as session:
    layer = session.linear(weight)
    y = layer(torch.ones(2, 128))
    backend = session.report().layers[0].backend

def named_ours(name):
    return name == "q4core" or name.startswith("q4_")

ours = [name for name in sys.modules if named_ours(name.partition(".")[0])]
files = {name: str(getattr(sys.modules[name], "__file__", "")) for name in ours}
folders = [os.path.realpath(item) + os.sep for name in ours for item in getattr(sys.modules[name], "__path__", ())]
installed = {
    os.path.realpath(str(file.locate()))
    for found in importlib.metadata.distributions()
    if named_ours(str(found.metadata["Name"]).lower().replace("-", "_"))
    for file in found.files or ()
}

def is_ours(path):
    module = os.path.basename(path).partition(".")[0].removeprefix("lib").lstrip("_")
    return named_ours(module) or path.startswith(tuple(folders)) or path in installed

maps = open("/proc/self/maps").read().splitlines() if sys.platform == "linux" else []
mapped = {line[line.index("/"):] for line in maps if "/" in line}
libraries = {path for path in mapped if ".so" in os.path.basename(path)}
print(json.dumps({
    "backend": backend,
    "finite": bool(torch.isfinite(y).all()),
    "shape": list(y.shape),
    "packages": sorted({name.partition(".")[0] for name in ours}),
    "compiled": sorted(f for f in files.values() if f.endswith((".so", ".pyd", ".dylib"))),
    "mapped": sorted(path for path in libraries if is_ours(path)),
}))
"""


@check("bare")
def _check_bare(_case: Case, _subject: object) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("Q4_")}
    environment |= {"Q4_PLUGINS": "dequant-fallback", "Q4_DISABLE_PLUGINS": "quantize", "Q4_CACHE": "off"}
    if "q4_dequant_fallback" in os.environ.get("Q4_PLUGIN_MODULES", ""):
        environment["Q4_PLUGIN_MODULES"] = "q4_dequant_fallback"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(  # noqa: S603  # an interpreter like this one, with a script of our own
        [sys.executable, "-c", _BARE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PROCESS_SECONDS,
        check=False,
    )
    expect(done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    expect(facts["backend"] == "dequant-fallback", f"{facts['backend']!r} served")
    expect(facts["finite"] and facts["shape"] == [2, 32], f"the result is {facts}")
    expect(set(facts["packages"]) <= {"q4core", "q4_dequant_fallback"}, f"packages {facts['packages']} were loaded")
    expect(not facts["compiled"] and not facts["mapped"], f"compiled code: {facts['compiled']} {facts['mapped']}")
    return f"packages {', '.join(facts['packages'])}"
