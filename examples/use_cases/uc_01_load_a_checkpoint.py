"""UC-01: dialect and keys are found from what is stored, a broken file gives every problem, files are written again.

    python examples/use_cases/uc_01_load_a_checkpoint.py

It needs a reader, dialects and what quantises: pip install "q4core[io,quantize]"
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import torch
from acceptance import Acceptance

import q4core as q4

STATEMENTS = (
    (
        "The dialect and its keys are found from what is stored: `.weight/.absmax/.quant_map` is NF4, "
        "`.qdata/.scale` is NVFP4."
    ),
    "A file with missing keys, wrong shapes and wrong dtypes at once gives all of these problems, not the first alone.",
    "What was read can be written again, in this dialect or another of its format, without a changed byte.",
)
N, K, BLOCK = 64, 128, 64


def nf4_tensors(name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, as a program without q4core would hold them."""
    return {
        f"{name}.weight": torch.randint(0, 256, (N, K // 2), dtype=torch.uint8),
        f"{name}.absmax": torch.rand(N * K // BLOCK),
        f"{name}.quant_map": torch.tensor(q4.find_format("nf4").codebook),
    }


def nvfp4_tensors(name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer with a scale of eight bits for each 16 in-features."""
    scale = torch.rand(N, K // 16).to(torch.float8_e4m3fn)
    return {f"{name}.qdata": torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), f"{name}.scale": scale}


def detect(case: Acceptance) -> None:
    """Name nothing, and see what is found."""
    schema = q4.detect_or_fail(nf4_tensors("up") | nvfp4_tensors("down"))
    found = {name: (layer.format, sorted(layer.keys.values())) for name, layer in schema.layers.items()}
    lines = [f"{name}: {kind}, by {', '.join(keys)}" for name, (kind, keys) in found.items()]
    expected = {
        "up": ("nf4", ["up.absmax", "up.quant_map", "up.weight"]),
        "down": ("nvfp4", ["down.qdata", "down.scale"]),
    }
    case.judge(STATEMENTS[0], *lines, holds=found == expected)


def reject(case: Acceptance) -> None:
    """Break three layers, each in another way."""
    tensors = nf4_tensors("a") | nf4_tensors("b") | nvfp4_tensors("c")
    del tensors["a.absmax"]
    tensors["b.absmax"] = torch.rand(7)
    tensors["c.qdata"] = tensors["c.qdata"].to(torch.int32)
    try:
        q4.detect_or_fail(tensors)
        problems: tuple[q4.Problem, ...] = ()
    except q4.SchemaError as error:
        problems = error.problems
    named = {(item.code, item.key) for item in problems}
    broken = {("missing_key", "a.absmax"), ("shape", "b.absmax"), ("dtype", "c.qdata")}
    case.judge(STATEMENTS[1], *problems, holds=broken <= named)


def digest(path: Path) -> str:
    """Return the hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_again(case: Acceptance, folder: Path) -> None:
    """Write each format in each dialect that has it, read it, and write it in the first dialect again."""
    dense, lines, same = torch.randn(N, K), [], []
    kinds = {"simple-nf4": q4.ScaleKind.PLAIN, "simple-nvfp4": q4.ScaleKind.E4M3}
    for first, kind in kinds.items():
        name = first.partition("-")[2]
        weight = q4.quantize(dense, name, scale_kind=kind)
        q4.save_checkpoint(folder / "first.safetensors", {"up": weight}, dialect=first)
        dialects = [item.name for item in q4.dialects() if name in item.formats]
        equal: list[bool] = []
        for dialect in dialects:
            with q4.open(folder / "first.safetensors") as read:
                q4.save_checkpoint(folder / "other.safetensors", {"up": read["up"]}, dialect=dialect)
            with q4.open(folder / "other.safetensors") as read:
                q4.save_checkpoint(folder / "twice.safetensors", {"up": read["up"]}, dialect=dialect)
                q4.save_checkpoint(folder / "again.safetensors", {"up": read["up"]}, dialect=first)
            equal.append(digest(folder / "first.safetensors") == digest(folder / "again.safetensors"))
            equal.append(digest(folder / "other.safetensors") == digest(folder / "twice.safetensors"))
        lines.append(
            f"{name}: {first} → {', '.join(dialects)}, each → {first}: {sum(equal)} of {len(equal)} files equal"
        )
        same += equal
    case.judge(STATEMENTS[2], *lines, holds=len(same) > len(kinds) and all(same))


def main() -> int:
    """Judge each statement."""
    case = Acceptance("UC-01: Load a 4-bit checkpoint of whatever dialect")
    torch.manual_seed(0)
    detect(case)
    reject(case)
    with tempfile.TemporaryDirectory() as folder:
        write_again(case, Path(folder))
    return case.end()


if __name__ == "__main__":
    sys.exit(main())
