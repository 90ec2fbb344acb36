"""Write the golden files: layers stored by public packages, with those packages' own dequantised weights.

Nothing here imports q4core. Run from the repository's root, in an environment that has the packages (see
``tests/peers/README.md``)::

    python conformance/golden/make.py            # write the kit's golden files
    python conformance/golden/make.py --check    # fail unless what is there is what the packages give today

Each case is one safetensors file ``<dialect>/<case>.safetensors`` with the stored tensors under their names on disk for
the module ``proj``, the library's results as ``expected.<dtype>`` and the dense weight as ``source``.
``manifest.json`` lists the cases; ``packing.json`` has codes and the bytes that hold them, in hexadecimal;
``models/`` has tiny whole models as each library exports them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # sums in one order, whatever vector unit this machine has
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes compiles its portable kernel; eager gives the same bits, sooner

import exports
import from_bitsandbytes
import from_compressed_tensors
import from_gguf
import from_gpt_oss
import from_modelopt
import from_torchao
import packings
import safetensors.torch
from case import Case, versions_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

GOLDEN = Path(__file__).parents[1] / "src" / "q4_conformance" / "golden"
MAKERS = (from_bitsandbytes, from_torchao, from_modelopt, from_compressed_tensors, from_gguf, from_gpt_oss)


def _canonical(blob: bytes) -> bytes:
    """Return the same safetensors file with its header keys sorted, so that it does not change from run to run."""
    size = int.from_bytes(blob[:8], "little")
    header = json.dumps(json.loads(blob[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + blob[8 + size :]


def _entry(case: Case) -> dict[str, Any]:
    n, k = case.shape
    return {
        "block": case.block,
        "config": dict(case.config),
        "dialect": case.dialect,
        "drops_negative_zero": case.drops_negative_zero,
        "dtype": case.dtype,
        "expected": sorted(case.expected),
        "format": case.format,
        "k": k,
        "library": case.library,
        "n": n,
        "notes": case.notes,
        "version": versions_of(case.library),
    }


def _tensors(case: Case) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.contiguous() for name, tensor in case.tensors.items()}
    for dtype, tensor in case.expected.items():
        tensors[f"expected.{dtype}"] = tensor.contiguous()
    if case.source is not None:
        tensors["source"] = case.source.contiguous()
    return tensors


def _cases() -> Iterator[Case]:
    for maker in MAKERS:
        yield from maker.cases()


def _dump(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    path.write_bytes(_canonical(safetensors.torch.save(tensors, dict(metadata or {}) or None)))


def make(folder: Path) -> int:
    """Write everything below ``folder`` and return the number of cases."""
    manifest = {}
    for case in _cases():
        path = folder / case.dialect / f"{case.name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        name = f"{case.dialect}/{case.name}"
        if name in manifest:
            raise RuntimeError(f"two cases are called {name}")
        _save(path, _tensors(case), case.metadata)
        manifest[name] = _entry(case)
    from_gguf.write_files(folder / "gguf")
    exports.write_models(folder / "models", _save)
    for path in (folder / "models").rglob("model.safetensors"):
        path.write_bytes(_canonical(path.read_bytes()))
    _dump(folder / "manifest.json", manifest)
    _dump(folder / "packing.json", packings.vectors())
    return len(manifest)


def check(folder: Path) -> list[str]:
    """Return what differs between ``folder`` and a fresh run."""
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        make(fresh)
        endings = (".safetensors", ".json", ".gguf")
        wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.suffix in endings}
        there = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in endings}
        problems = [f"{path} is not made any more" for path in sorted(there - wanted)]
        problems += [f"{path} is missing" for path in sorted(wanted - there)]
        problems += [
            f"{path} differs"
            for path in sorted(wanted & there)
            if (fresh / path).read_bytes() != (folder / path).read_bytes()
        ]
    return problems


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Write the golden files with public packages.")
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    if not parser.parse_args().check:
        print(f"{make(GOLDEN)} cases")
        return 0
    problems = check(GOLDEN)
    print("\n".join(problems) or "all as made today")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
