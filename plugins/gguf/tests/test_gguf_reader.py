"""GGUF files through ``q4.open``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import q4core as q4
from q4_gguf import GgufReader
from q4_gguf.header import TensorEntry
from q4_gguf.reader import refusal
from q4_gguf.views import map_file
from tests.support.checkpoints import write_iq2_s
from tests.support.ggml_blocks import write_parts


def test_open(small_gguf: Path) -> None:
    """Packed tensors are layers under their module's name, experts one by one; the others are dense."""
    with q4.open(small_gguf) as checkpoint:
        experts = [f"blk.0.ffn_gate_exps.{index}" for index in range(3)]
        assert list(checkpoint) == ["blk.0.attn_q", "blk.0.attn_k", "token_embd", *experts]
        assert list(checkpoint.dense) == [
            "blk.0.attn_norm.weight",
            "output_norm.weight",
            "blk.0.ffn_down.weight",
            "positions",
        ]
        assert checkpoint.metadata["general.name"] == "kleine Prüfung"
        assert {layer.dialect for layer in checkpoint.schema.layers.values()} == {"gguf"}
        shapes = {name: layer.shape for name, layer in checkpoint.schema.layers.items()}
        assert shapes["blk.0.attn_k"] == (4, 96)
        assert shapes[experts[2]] == (4, 64)
        for name, info in checkpoint.dense.infos.items():
            assert (checkpoint.dense[name].dtype, tuple(checkpoint.dense[name].shape)) == (info.dtype, info.shape)


def test_values_are_ggufs_own(small_gguf: Path) -> None:
    """Every layer, each expert too, dequantises to the package's own bits; stored bytes add up to the file's."""
    tensors = gguf.GGUFReader(small_gguf).tensors
    expected = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in tensors if t.name != "positions"}
    with q4.open(small_gguf) as checkpoint:
        for name, weight in checkpoint.items():
            module, _, number = name.rpartition(".")
            dense = expected[f"{module}.weight"][int(number)] if number.isdigit() else expected[f"{name}.weight"]
            result = q4.dequantize(weight, torch.float32).numpy()
            assert result.tobytes() == np.ascontiguousarray(dense).tobytes(), name
            assert (weight.name, weight.dialect) == (name, "gguf")
            assert checkpoint.schema.layers[name].nbytes == weight.nbytes


def test_unsupported_type_is_listed_and_refused_when_asked_for(small_gguf: Path) -> None:
    """A tensor of a type that is not read is in the schema with its reason, and is an error only when read."""
    with q4.open(small_gguf) as checkpoint:
        (problem,) = checkpoint.schema.unsupported
        assert (problem.code, problem.key, problem.value) == ("unsupported", "blk.0.ffn_up", "IQ3_S")
        with pytest.raises(q4.CheckpointError, match="reads it as dense float32") as caught:
            checkpoint["blk.0.ffn_up"]
        assert (caught.value.value, caught.value.where) == ("IQ3_S", str(small_gguf))


def test_a_file_of_unread_types_alone_is_refused(tmp_path: Path) -> None:
    """A file whose matrices are all IQ2_S doesn't open: the error names dialect, layers and what is missing."""
    path = tmp_path / "iq2_s.gguf"
    write_iq2_s(path, layers=5)
    with pytest.raises(q4.SchemaError) as caught:
        q4.open(path)
    text = str(caught.value)
    assert "5 layers (blk.0.attn_q, blk.1.attn_q, blk.2.attn_q, …)" in text
    assert "options={'dequantize': True} reads it as dense float32" in text
    assert "got 'IQ2_S'" in text
    assert caught.value.where == str(path)
    assert len(caught.value.schema.unsupported) == 5


def test_nothing_else_can_be_read_after_close(small_gguf: Path) -> None:
    """Closing lets go of the file; a weight that was given before stays valid."""
    checkpoint = q4.open(small_gguf)
    weight = checkpoint["token_embd"]
    expected = q4.dequantize(weight, torch.float32)
    checkpoint.close()
    with pytest.raises(q4.LifecycleError):
        checkpoint["blk.0.attn_q"]
    with pytest.raises(q4.LifecycleError):
        checkpoint.dense["positions"]
    assert torch.equal(q4.dequantize(weight, torch.float32), expected)


def test_illegal_scale_is_named(small_gguf: Path, tmp_path: Path) -> None:
    """A NaN among the scales is an error that names file, tensor and place when the layer is read."""
    data = bytearray(small_gguf.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(small_gguf).tensors if t.name == "blk.0.attn_q.weight")
    second_block_of_first_row = int(tensor.data_offset) + 18
    data[second_block_of_first_row : second_block_of_first_row + 2] = np.float16(np.nan).tobytes()
    path = tmp_path / "nan.gguf"
    path.write_bytes(data)
    with q4.open(path) as checkpoint, pytest.raises(q4.CheckpointError) as caught:
        checkpoint["blk.0.attn_q"]
    assert caught.value.name == "blk.0.attn_q.weight[0, 1]"
    assert caught.value.where == str(path)


def test_recognised_by_its_first_bytes(small_gguf: Path, tmp_path: Path) -> None:
    """The magic decides, not the file's name; a file that can't be read is not ours."""
    other = tmp_path / "model.gguf"
    other.write_bytes(b"{}")
    reader = GgufReader()
    assert reader.recognises(small_gguf)
    assert not reader.recognises(other)
    assert not reader.recognises(tmp_path / "none")
    assert not reader.recognises(tmp_path)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """A named pipe, which would wait for a writer, is neither recognised nor mapped."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not GgufReader().recognises(pipe)
    with pytest.raises(q4.CheckpointError, match="regular file"):
        map_file(pipe)


def test_other_options_are_refused(small_gguf: Path) -> None:
    """An option is refused by name instead of being passed over."""
    for options in ({"nibble_order": "low_first"}, {"dequantize": "yes"}):
        with pytest.raises(q4.DialectError, match=next(iter(options))):
            GgufReader().open(small_gguf, q4.OpenRequest(options=options))


def test_refused_shapes() -> None:
    """A packed tensor must be a matrix, or a reasonable number of them."""
    with_blocks = {"type_number": 2, "position": 0, "nbytes": 0}
    kind = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_0]
    assert kind == (32, 18)
    from q4_gguf.ggml import find_type  # noqa: PLC0415

    def problem(*shape: int) -> object:
        return refusal(TensorEntry("t.weight", shape, type=find_type(2), **with_blocks))

    assert problem(4, 32) is None
    assert problem(8, 4, 32) is None
    assert problem(32) is not None
    assert problem(1, 1, 1, 32) is not None
    assert problem(100_000, 1, 32) is not None


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings can be listed on Linux only")
def test_copy_reads_the_same_and_maps_nothing(small_gguf: Path, tmp_path: Path) -> None:
    """``copy=True`` gives the numbers of the mapped file, without a mapping: cutting the file short harms no reader."""
    path = tmp_path / "x.gguf"
    path.write_bytes(small_gguf.read_bytes())
    with q4.open(small_gguf) as mapped, q4.open(path, copy=True) as copied:
        assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
        os.truncate(path, 10)
        assert list(copied) == list(mapped)
        for module in mapped:
            assert torch.equal(q4.dequantize(copied[module]), q4.dequantize(mapped[module]))
        for name, tensor in mapped.dense.items():
            assert torch.equal(copied.dense[name], tensor)


def write_whole(path: Path, **facts: int) -> Path:
    """Write a file of one tensor with facts of a split."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in facts.items():
        writer.add_uint16(f"split.{name.replace('_', '.')}", value)
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("copy", [False, True])
def test_a_split_model_opens_from_any_part(tmp_path: Path, copy: bool) -> None:
    """Any part opens the whole model, with the metadata of the first part."""
    parts = write_parts(tmp_path)
    assert [path.name for path in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for path in parts:
        with q4.open(path, copy=copy) as checkpoint:
            assert list(checkpoint.dense) == ["token_embd.weight", "output_norm.weight", "output.weight"]
            assert checkpoint.metadata["general.architecture"] == "llama"
            assert checkpoint.path == parts[0]
            assert all(bool((tensor == 1).all()) for tensor in checkpoint.dense.values())


def test_a_part_alone_is_refused(tmp_path: Path) -> None:
    """A part without the others, or under another name, is refused, with its number and the names that are missing."""
    first, second = write_parts(tmp_path)
    renamed = shutil.copy(first, tmp_path / "whole.gguf")
    with pytest.raises(q4.CheckpointError, match=r"part 1 of 2.*llama-gguf-split --merge") as caught:
        q4.open(renamed)
    assert (caught.value.name, caught.value.value) == ("name", "whole.gguf")
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(second, tmp_path / "alone" / second.name)
    with pytest.raises(q4.CheckpointError, match=r"part 2 of 2.*llama-gguf-split --merge") as caught:
        q4.open(alone)
    assert (caught.value.name, caught.value.value) == ("parts", "without m-00001-of-00002.gguf")
    assert caught.value.where == str(alone)


def test_parts_of_two_models_are_refused(tmp_path: Path) -> None:
    """A part that says another number or count, or has a tensor that is there already, is refused by name."""
    first, second = write_parts(tmp_path)
    shutil.copy(first, second)
    with pytest.raises(q4.CheckpointError, match=r"split\.no") as caught:
        q4.open(first)
    assert caught.value.where == str(second)
    write_whole(second, no=1, count=3, tensors_count=3)
    with pytest.raises(q4.CheckpointError, match=r"split\.count"):
        q4.open(first)
    write_whole(second, no=1, count=2, tensors_count=3)
    with pytest.raises(q4.CheckpointError, match=r"unique: m-00001-of-00002\.gguf has it, too"):
        q4.open(first)
    second.unlink()
    second.symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(q4.CheckpointError, match="without m-00002-of-00002"):
        q4.open(first)


def test_a_part_by_its_name_is_refused(tmp_path: Path) -> None:
    """Where the header does not speak of parts, the name of a part does."""
    with pytest.raises(q4.CheckpointError, match=r"part 2 of 3.*--merge"):
        q4.open(write_whole(tmp_path / "m-00002-of-00003.gguf"))
    with q4.open(write_whole(tmp_path / "m-00001-of-00001.gguf")) as checkpoint:
        assert list(checkpoint.dense) == ["output_norm.weight"]


def test_a_merged_file_opens(tmp_path: Path) -> None:
    """A file whose header says that it was merged is whole; one that lacks tensors of that number is refused."""
    with q4.open(write_whole(tmp_path / "m-00001-of-00002.gguf", count=0, tensors_count=1)) as checkpoint:
        assert list(checkpoint.dense) == ["output_norm.weight"]
    with pytest.raises(q4.CheckpointError, match=r"split\.tensors\.count") as caught:
        q4.open(write_whole(tmp_path / "m.gguf", count=0, tensors_count=2))
    assert caught.value.value == 1
