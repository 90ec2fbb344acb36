"""GGUF files that are written: the bytes of every type, metadata, parts, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

import q4core as q4
from q4_gguf import ArrayValue, TypedFloat, TypedInt
from q4_gguf.ggml import PACKED_TYPES
from q4core import Packing, pack_codes
from tests.support.ggml_blocks import entry_of, owners_values, random_blocks, write_parts
from tests.support.interpreter import run_interpreter

SAMPLES = (
    sorted(Path(os.environ.get("Q4_SAMPLES", "")).glob("gguf-*/checkpoint/*.gguf"))
    if "Q4_SAMPLES" in os.environ
    else []
)
INEXACT = {"Q8_1", "TQ1_0"}
"""Types whose bytes are not all decided by the values: the sum of a block, and the digits of a fraction."""


def tensors(path: Path) -> dict[str, tuple[Type, list[int], bytes]]:
    """Return type, shape and bytes of each tensor, as the package ``gguf`` reads them."""
    found = gguf.GGUFReader(path).tensors
    return {item.name: (item.tensor_type, item.shape.tolist(), item.data.tobytes()) for item in found}


def fields(path: Path) -> dict[str, Any]:
    """Return the metadata, types and bytes, as the package ``gguf`` reads it."""
    found = gguf.GGUFReader(path).fields.items()
    return {key: (field.types, [part.tobytes() for part in field.parts]) for key, field in found if key[:5] != "GGUF."}


def copy(source: Path, target: Path, **named: Any) -> Path:
    """Read a file and write it again."""
    with q4.open(source) as opened:
        return q4.save_checkpoint(target, opened, dialect="gguf", dense=opened.dense, metadata=opened.metadata, **named)


@pytest.mark.samples
@pytest.mark.parametrize("sample", SAMPLES, ids=[path.parts[-3] for path in SAMPLES])
def test_every_sample_is_written_as_it_was(sample: Path, tmp_path: Path) -> None:
    """Tensors have the same bytes, and metadata the same types and values."""
    written = copy(sample, tmp_path / "x.gguf")
    assert tensors(written) == tensors(sample)
    before, after = fields(sample), fields(written)
    assert {key: after[key] for key in before} == before
    assert after.keys() - before.keys() <= {"general.quantization_version", "general.file_type"}


def test_every_type_is_written_as_it_was(every_type_gguf: Path, tmp_path: Path) -> None:
    """Matrices of all packed types, experts with a global scale among them, have their bytes again."""
    with q4.open(every_type_gguf) as opened:
        weights = {module: opened[module] for module in opened}
        dense = dict(opened.dense)
    written = tensors(q4.save_checkpoint(tmp_path / "x.gguf", weights, dialect="gguf", dense=dense))
    before = tensors(every_type_gguf)
    del before["blk.0.iq2_xs.weight"]
    ternary = before.pop("blk.0.tq1_0.weight")
    again = written.pop("blk.0.tq1_0.weight")
    assert written == before
    values = [
        gguf.quants.dequantize(np.frombuffer(raw, np.uint8).reshape(4, -1), Type.TQ1_0) for *_, raw in (ternary, again)
    ]
    assert (values[0] == values[1]).all()


@pytest.mark.parametrize("kind", ["random", "ones", "zeros", "negative", "zero scales"])
@pytest.mark.parametrize("name", PACKED_TYPES)
def test_random_bits_of_a_type(name: str, kind: str, tmp_path: Path) -> None:
    """Whatever bits a file's blocks have, they are written again, or others of the same values."""
    from q4_gguf.forms import form_of  # noqa: PLC0415  # the module under test
    from q4_gguf.views import packed_weight  # noqa: PLC0415

    for rows, count in ((1, 1), (5, 3), (7, 2)):
        entry = entry_of(name, (rows, count * PACKED_BLOCKS[name])) if name in PACKED_BLOCKS else None
        assert entry is not None
        blocks = random_blocks(name, rows * count, kind, seed=rows)
        weight = packed_weight(bytearray(blocks.tobytes()), entry, name="m")  # type: ignore[arg-type]
        form = form_of("m", weight)
        raw = torch.cat(list(form.rows())).numpy()
        assert form.type_name == ("Q8_0" if name == "Q8_1" else name)
        if name not in INEXACT:
            assert raw.tobytes() == blocks.tobytes()
        again = owners_values(form.type_name, raw.reshape(rows * count, -1))
        np.testing.assert_array_equal(again, owners_values(name, blocks))


PACKED_BLOCKS = {name: gguf.GGML_QUANT_SIZES[Type[name]][0] for name in PACKED_TYPES}


def integers(rows: int, columns: int, block: int, bits: int, **fields: Any) -> q4.PackedWeight:
    """Return a weight of integers with scales in float16."""
    random = torch.Generator().manual_seed(rows * columns + block)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=random, dtype=torch.uint8)
    scale = torch.randn(rows, -(-columns // block), generator=random).half()
    packing = Packing.BYTES if bits == 8 else Packing.LOW_FIRST
    return q4.PackedWeight(
        format=q4.find_format(f"int{bits}"), qdata=pack_codes(codes, packing), scale=scale, out_features=rows,
        in_features=columns, block_size=block, packing=packing, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("columns", [32, 96, 256, 416])
@pytest.mark.parametrize("block", [32, 64, 128, 416])
@pytest.mark.parametrize(("bits", "name"), [(4, "Q4_0"), (8, "Q8_0")])
def test_symmetric_integers_are_written_exactly(bits: int, name: str, block: int, columns: int, tmp_path: Path) -> None:
    """GPTQ's symmetric layers, whatever their groups, become Q4_0 and Q8_0 with the same values."""
    weight = integers(5, columns, block, bits)
    path = q4.save_checkpoint(tmp_path / "x.gguf", {"m": weight}, dialect="gguf")
    ((kind, _, raw),) = tensors(path).values()
    assert kind == Type[name]
    values = gguf.quants.dequantize(np.frombuffer(raw, np.uint8).reshape(5, -1), kind)
    np.testing.assert_array_equal(values, q4.dequantize(weight, torch.float32).numpy())


@pytest.mark.parametrize("block", [32, 64, 128])
def test_blocks_of_several_of_the_type(block: int, tmp_path: Path) -> None:
    """A scale of 64 or 128 in-features is written two or four times."""
    weight = q4.quantize(torch.randn(6, 160), "q4_1", block_size=32)
    wide = integers(6, 256, block, 4)
    wide = q4.PackedWeight(
        format=q4.find_format("q4_1"), qdata=wide.qdata, scale=wide.scale, offset=wide.scale * 3, out_features=6,
        in_features=256, block_size=block, packing=wide.packing,
    )  # fmt: skip
    path = q4.save_checkpoint(tmp_path / "x.gguf", {"a": weight, "b": wide}, dialect="gguf")
    with q4.open(path) as opened:
        for module, before in (("a", weight), ("b", wide)):
            assert torch.equal(q4.dequantize(opened[module]), q4.dequantize(before, torch.float32))


def test_metadata_of_every_type_comes_back(small_gguf: Path, tmp_path: Path) -> None:
    """Numbers keep their types, and arrays their items."""
    with q4.open(small_gguf) as opened:
        metadata = dict(opened.metadata)
        weights = {module: opened[module] for module in opened}
        dense = dict(opened.dense)
    written = q4.save_checkpoint(tmp_path / "x.gguf", weights, dialect="gguf", dense=dense, metadata=metadata)
    before, after = fields(small_gguf), fields(written)
    assert {key: after[key] for key in before} == before
    lists: dict[str, Any] = {"a.b": [1, 2, -3], "a.c": ["x", ""], "a.d": [True, False], "a.e": (0.5, 1), "a.f": [2**40]}
    scalars = {"b.a": TypedInt(3, "uint16"), "b.b": TypedFloat(0.1), "b.c": 2**40, "b.d": -(2**40), "b.e": 1e-5}
    path = q4.save_checkpoint(tmp_path / "y.gguf", {}, dialect="gguf", metadata=lists | scalars)
    found = gguf.GGUFReader(path).fields
    assert found["a.f"].types[-1] == gguf.GGUFValueType.INT64
    assert found["b.a"].types == [gguf.GGUFValueType.UINT16]
    assert found["b.b"].types == [gguf.GGUFValueType.FLOAT64]
    assert [found[key].contents() for key in lists] == [[*value] for value in lists.values()]
    assert found["b.d"].contents() == -(2**40)
    with q4.open(path) as opened:
        assert isinstance(opened.metadata["a.b"], ArrayValue)
        assert opened.metadata["b.b"] == 0.1


@pytest.mark.parametrize("limit", [1, 300, 900])
def test_a_model_in_parts(limit: int, tmp_path: Path) -> None:
    """Parts open as one model, from any of them, in our reader and in the order of llama.cpp's names."""
    weights = {f"blk.{index}.attn_q": q4.quantize(torch.randn(4, 64), "q4_0") for index in range(5)}
    dense = {"output_norm.weight": torch.randn(64)}
    (tmp_path / "m.gguf").write_bytes(b"old")
    path = q4.save_checkpoint(
        tmp_path / "m.gguf", weights, dialect="gguf", dense=dense, metadata={"general.architecture": "llama"},
        max_shard_bytes=limit,
    )  # fmt: skip
    parts = sorted(tmp_path.iterdir())
    assert path == parts[0] == tmp_path / f"m-00001-of-{len(parts):05d}.gguf"
    assert len(parts) > 1
    with q4.open(parts[-1]) as opened:
        assert {*opened} == {*weights}
        assert opened.metadata["split.count"] == len(parts)
        for module, before in weights.items():
            assert torch.equal(q4.dequantize(opened[module]), q4.dequantize(before))
    assert tensors(copy(parts[0], tmp_path / "whole.gguf")).keys() == {*(f"{name}.weight" for name in weights), *dense}


def test_parts_of_the_owner_become_one_file(tmp_path: Path) -> None:
    """What is said of parts is left out."""
    written = copy(write_parts(tmp_path)[1], tmp_path / "whole.gguf")
    assert not [key for key in fields(written) if key.startswith("split.")]


def test_a_number_alone_makes_no_expert(tmp_path: Path) -> None:
    """Layers that end in a number, as ``mlp.0``, are matrices; experts are joined, and come back by their numbers."""
    names = ["mlp.0", "mlp.2", "head.0", "blk.0.ffn_up_exps.0", "blk.0.ffn_up_exps.1"]
    weights = {name: q4.quantize(torch.randn(4, 64), "q4_0") for name in names}
    path = q4.save_checkpoint(tmp_path / "m.gguf", weights, dialect="gguf")
    shapes = {name: shape for name, (_, shape, _) in tensors(path).items()}
    assert shapes.pop("blk.0.ffn_up_exps.weight") == [64, 4, 2]
    assert shapes == {f"{name}.weight": [64, 4] for name in names[:3]}
    with q4.open(path) as opened:
        assert {*opened} == {*names}


def _weight(**changes: Any) -> q4.PackedWeight:
    weight = q4.quantize(torch.randn(4, 64), "q4_0")
    import attrs  # noqa: PLC0415

    return attrs.evolve(weight, **changes)


REFUSED: dict[str, tuple[Any, str]] = {
    "flat": (lambda: q4.quantize(torch.randn(3, 33), "nf4"), "blocks"),
    "nf4": (lambda: q4.quantize(torch.randn(4, 64), "nf4"), "format"),
    "a channel scale": (lambda: _weight(input_channel_scale=torch.ones(64)), "input_channel_scale"),
    "act-order": (lambda: _weight(input_permutation=torch.arange(64)), "input_permutation"),
    "a static activation scale": (lambda: _weight(activation_scale=torch.ones(())), "activation_scale"),
    "a codebook": (lambda: _weight(codebook=torch.arange(16.0)), "codebook"),
    "a scale that float16 lacks": (lambda: _weight(scale=torch.full((4, 2), 0.1)), "scale[0, 0]"),
    "zero points": (lambda: integers(4, 64, 32, 4, zero=torch.full((4, 2), 3, dtype=torch.uint8)), "zero[0, 0]"),
    "zero points of 8 bits": (lambda: integers(4, 64, 32, 8, zero=torch.ones((4, 2), dtype=torch.uint8)), "zero"),
    "short blocks": (lambda: integers(4, 40, 32, 4), "K"),
    "groups of 16": (lambda: integers(4, 64, 16, 4), "block_size and scale_kind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_type_holds_is_refused(case: str, tmp_path: Path) -> None:
    """The message names what does not fit and what to do; nothing is left in the folder."""
    make, name = REFUSED[case]
    with pytest.raises(q4.DialectError) as caught:
        q4.save_checkpoint(tmp_path / "x.gguf", {"good": _weight(), "m": make()}, dialect="gguf")
    assert caught.value.name == name
    assert "'m'" in str(caught.value)
    assert caught.value.hint
    assert not [*tmp_path.iterdir()]


def test_a_loss_is_allowed_where_asked_for(tmp_path: Path) -> None:
    """Scales and offsets are rounded to float16 then: zero points become offsets."""
    zero = torch.randint(0, 16, (4, 2), dtype=torch.uint8)
    weight = integers(4, 64, 32, 4, zero=zero)
    path = q4.save_checkpoint(tmp_path / "x.gguf", {"m": weight}, dialect="gguf", lossy=True)
    with q4.open(path) as opened:
        wanted = q4.dequantize(weight, torch.float32)
        assert opened["m"].format.name == "q4_1"
        assert (q4.dequantize(opened["m"]) - wanted).abs().max() <= 2**-10 * wanted.abs().max()
    huge = _weight(scale=torch.full((4, 2), 1e6))
    with pytest.raises(q4.DialectError, match="number that float16 has"):
        q4.save_checkpoint(tmp_path / "y.gguf", {"m": huge}, dialect="gguf", lossy=True)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "IQ4_XS", "Q5_1", "Q6_K"])
def test_numbers_that_a_type_has_no_bits_for(name: str) -> None:
    """Codes and scales out of reach are an error that names the place."""
    import attrs  # noqa: PLC0415

    from q4_gguf.forms import form_of  # noqa: PLC0415
    from q4_gguf.views import packed_weight  # noqa: PLC0415

    entry = entry_of(name, (3, 2 * PACKED_BLOCKS[name]))
    weight = packed_weight(bytearray(random_blocks(name, 6, "random").tobytes()), entry, name="m")  # type: ignore[arg-type]
    if name in {"Q5_1", "Q6_K"}:
        codes = weight.qdata.clone()
        codes.view(3, -1)[1, 5] = 40
        wrong, place = attrs.evolve(weight, qdata=codes), "code[1, 5]"
    else:
        scale = weight.scale.clone()
        scale[1, 5] = 100
        wrong, place = attrs.evolve(weight, scale=scale), "scale[1, 5]"
    with pytest.raises(q4.DialectError) as caught:
        [*form_of("m", wrong).rows()]
    assert caught.value.name == place


BAD: dict[str, tuple[dict[str, Any], type[q4.Q4Error], str]] = {
    "a long name": ({"weights": {"n" * 57: _weight()}}, q4.CheckpointError, "tensor name"),
    "one name twice": (
        {"weights": {"m": _weight()}, "dense": {"m.weight": torch.ones(2)}}, q4.CheckpointError, "tensor name",
    ),
    "a gap in experts": ({"weights": {"m_exps.0": _weight(), "m_exps.2": _weight()}}, q4.CheckpointError, "layers m"),
    "experts that differ": (
        {"weights": {"m_exps.0": _weight(), "m_exps.1": q4.quantize(torch.randn(4, 64), "q4_1")}}, q4.CheckpointError,
        "layer",
    ),
    "experts and a matrix": ({"weights": {"m_exps.0": _weight(), "m_exps": _weight()}}, q4.CheckpointError, "layer"),
    "a scale that is not finite": (
        {"weights": {"m": _weight(scale=torch.full((4, 2), torch.nan).half())}}, q4.WeightError, "scale",
    ),
    "a dtype": ({"dense": {"x": torch.ones(2, dtype=torch.bool)}}, q4.CheckpointError, "x"),
    "five dimensions": ({"dense": {"x": torch.ones(1, 1, 1, 1, 2)}}, q4.CheckpointError, "x"),
    "no elements": ({"dense": {"x": torch.ones(0, 2)}}, q4.CheckpointError, "x"),
    "the meta device": ({"dense": {"x": torch.ones(2, device="meta")}}, q4.CheckpointError, "x"),
    "a value": ({"metadata": {"k": None}}, q4.CheckpointError, "metadata['k']"),
    "a huge number": ({"metadata": {"k": 2**64}}, q4.CheckpointError, "metadata['k']"),
    "a float out of reach": ({"metadata": {"k": 1e300}}, q4.CheckpointError, "metadata['k']"),
    "an empty list": ({"metadata": {"k": []}}, q4.CheckpointError, "metadata['k']"),
    "a mixed list": ({"metadata": {"k": ["a", 1]}}, q4.CheckpointError, "metadata['k']"),
    "a list of lists": ({"metadata": {"k": [[1]]}}, q4.CheckpointError, "metadata['k']"),
    "huge numbers in a list": ({"metadata": {"k": [2**64]}}, q4.CheckpointError, "metadata['k']"),
    "a surrogate": ({"metadata": {"k": "\ud800"}}, q4.CheckpointError, "metadata['k']"),
    "a surrogate in a list": ({"metadata": {"k": ["\ud800"]}}, q4.CheckpointError, "metadata['k'][0]"),
    "an alignment": ({"metadata": {"general.alignment": 3}}, q4.CheckpointError, "metadata['general.alignment']"),
    "a huge alignment": ({"metadata": {"general.alignment": 1 << 44}}, q4.CheckpointError, "metadata['general.al"),
    "a long key": ({"metadata": {"k" * 65536: 1}}, q4.CheckpointError, "metadata["),
    "a dialect": ({"dialect": "simple-nf4"}, q4.DialectError, "dialect"),
    "a config": ({"config": {}}, q4.CheckpointError, "config"),
    "a limit": ({"max_shard_bytes": 0}, q4.CheckpointError, "max_shard_bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_typed_errors(case: str, tmp_path: Path) -> None:
    """The error names the argument; the old file stays, and nothing else is left."""
    changes, kind, name = BAD[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    given: dict[str, Any] = {"weights": {}, "dialect": "gguf", **changes}
    with pytest.raises(kind) as caught:
        q4.save_checkpoint(path, given.pop("weights"), **given)
    assert (caught.value.name or "").startswith(name)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_the_name_of_a_part_is_refused(tmp_path: Path) -> None:
    """A whole model under the name of a part would not open."""
    with pytest.raises(q4.CheckpointError, match="the name of a whole model"):
        q4.save_checkpoint(tmp_path / "x-00001-of-00002.gguf", {}, dialect="gguf")


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_an_alignment_of_ones_own(alignment: int, tmp_path: Path) -> None:
    """Offsets follow ``general.alignment``."""
    weights = {f"m{index}": q4.quantize(torch.randn(3, 32), "q4_0") for index in range(3)}
    metadata = {"general.alignment": alignment}
    path = q4.save_checkpoint(tmp_path / "x.gguf", weights, dialect="gguf", metadata=metadata)
    assert len(tensors(path)) == 3
    with q4.open(path) as opened:
        for module, before in weights.items():
            assert torch.equal(q4.dequantize(opened[module]), q4.dequantize(before))


def test_a_failing_layer_leaves_nothing(tmp_path: Path) -> None:
    """A mapping that raises halfway ends the writing without a trace."""

    def weights() -> Any:
        class Failing(dict[str, Any]):
            def __getitem__(self, name: str) -> Any:
                if name == "m.1":
                    raise KeyboardInterrupt
                return _weight()

        return Failing({"m.0": 0, "m.1": 0})

    with pytest.raises(KeyboardInterrupt):
        q4.save_checkpoint(tmp_path / "x.gguf", weights(), dialect="gguf")
    assert not [*tmp_path.iterdir()]


_KILLED = """
import os, sys, torch, q4core as q4
class Killing(dict):
    def __getitem__(self, name):
        if name == "b":
            os.kill(os.getpid(), 9)
        return q4.quantize(torch.ones(4, 64), "q4_0")
q4.save_checkpoint(sys.argv[1], Killing(a=0, b=0), dialect="gguf")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the files of killed writers are not removed there")
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """The old file stays, and the temporary folder goes with the next writing."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    run_interpreter(["-c", _KILLED, str(path)])
    assert path.read_bytes() == b"old"
    assert len([*tmp_path.iterdir()]) == 2
    q4.save_checkpoint(path, {"m": _weight()}, dialect="gguf")
    assert [*tmp_path.iterdir()] == [path]


_PEAK = """
import resource, sys, torch, q4core as q4
class Lazy(dict):
    def __getitem__(self, name):
        return q4.PackedWeight(
            format=q4.find_format("q4_0"), qdata=torch.zeros(8192, 4096, dtype=torch.uint8),
            scale=torch.ones(8192, 256).half(), out_features=8192, in_features=8192, block_size=32,
            packing=q4.Packing.half_split(32))
q4.save_checkpoint(sys.argv[1], {"m": q4.quantize(torch.ones(4, 64), "q4_0")}, dialect="gguf")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
q4.save_checkpoint(sys.argv[1], Lazy(dict.fromkeys("abcdef", 0)), dialect="gguf")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """Six matrices of 38 MB are written within the memory of two."""
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "x.gguf")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024
    assert grown < 2 * 38e6 + 60e6


_RESUMED = """
import os, sys, torch, q4core as q4
class Weights(dict):
    read = 0
    def __getitem__(self, name):
        Weights.read += 1
        if Weights.read == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
        torch.manual_seed(int(name.rpartition(".")[2]))
        return q4.quantize(torch.randn(4, 64), "q4_0")
dense = {"n.0": torch.ones(5), "n.1": torch.zeros(3)}
resume = sys.argv[3] or None
weights = Weights({f"m.{index}": 0 for index in range(6)})
q4.save_checkpoint(sys.argv[1], weights, dialect="gguf", dense=dense, resume=resume)
print(Weights.read)
"""


def run_resumed(path: Path, deadly: int, resume: str) -> str:
    """Write six layers in a process that kills itself at one of them; return how many it read, or nothing."""
    return run_interpreter(["-c", _RESUMED, str(path), str(deadly), resume]).stdout.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by a signal here")
@pytest.mark.parametrize("damage", [None, "data", "journal.jsonl"])
def test_a_killed_writer_is_continued(damage: str | None, tmp_path: Path) -> None:
    """What was stored and holds is not read again; the file is that of a run that nobody stopped."""
    path = tmp_path / "x.gguf"
    assert run_resumed(path, 5, "one") == ""
    assert not path.exists()
    if damage is not None:
        (staging,) = tmp_path.glob(".q4core-*")
        raw = bytearray((staging / damage).read_bytes())
        raw[-1 if damage == "data" else -30] ^= 1
        (staging / damage).write_bytes(raw)
    assert run_resumed(path, 0, "one") == ("2" if damage is None else "3")
    assert [*tmp_path.iterdir()] == [path]
    assert run_resumed(tmp_path / "y.gguf", 0, "") == "6"
    assert path.read_bytes() == (tmp_path / "y.gguf").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by a signal here")
def test_another_text_starts_again(tmp_path: Path) -> None:
    """What was stored under another text is removed."""
    path = tmp_path / "x.gguf"
    run_resumed(path, 5, "one")
    assert run_resumed(path, 0, "two") == "6"
    assert [*tmp_path.iterdir()] == [path]


def test_ctrl_c_leaves_what_can_be_continued(tmp_path: Path) -> None:
    """A run that is stopped is gone on with under the same text, and under no text leaves nothing."""

    class Stopping(dict[str, Any]):
        read = 0
        last = 2

        def __getitem__(self, name: str) -> Any:
            self.read += 1
            if self.read == self.last:
                raise KeyboardInterrupt
            return _weight()

    names = {f"m.{index}": 0 for index in range(4)}
    with pytest.raises(KeyboardInterrupt):
        q4.save_checkpoint(tmp_path / "x.gguf", Stopping(names), dialect="gguf", resume="one")
    again = Stopping(names)
    again.last = 99
    q4.save_checkpoint(tmp_path / "x.gguf", again, dialect="gguf", resume="one")
    assert again.read == 3
    assert [item.name for item in tmp_path.iterdir()] == ["x.gguf"]
