"""Damaged and hostile files: nothing crashes, hangs or allocates absurdly, and every error is a typed one."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import q4core as q4
from q4_onnx import OnnxSource
from tests.support import onnx_models as models
from tests.support.limits import scaled
from tests.support.onnx_models import field, graph, initializer, node, packed, varint

if TYPE_CHECKING:
    from pathlib import Path

_NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
_EACH = 100


def _whole() -> bytes:
    """Return a model with every kind of field: layers, an embedding, a branch, dense tensors of each storage."""
    one, two = packed(0), packed(1, bits=8, zero="floats")
    names = ("emb_Q4", "ids", "emb_scales", "emb_zero_points")
    inner = graph([node("MatMulNBits", two.names("two"), "n", numbers=two.numbers)], [initializer("c", np.zeros(3))])
    branch = field(1, "then_branch") + field(6, inner) + field(20, 5)
    nodes = [
        node("MatMulNBits", one.names("one"), numbers=one.numbers),
        node("GatherBlockQuantized", names, numbers={"bits": 4, "block_size": one.numbers["block_size"]}),
        field(1, "cond") + field(2, "y") + field(4, "If") + field(5, branch),
        node("MatMulInteger", ("x", "w")),
    ]
    typed = field(1, 3) + field(2, 7) + field(8, "i") + field(7, b"".join(map(varint, (-1, 300, 2**62))))
    tensors = [*one.tensors("one"), *two.tensors("two"), *one.tensors("emb"), typed]
    tensors += [initializer("w", np.zeros((4, 4), np.int8)), initializer("norm", np.ones(5, np.float16))]
    place = {"location": "data.bin", "offset": "8", "length": "16"}
    tensors.append(initializer("far", np.zeros(4, np.float32), place=place))
    return models.model(nodes, tensors) + field(14, field(1, "key") + field(2, "text"))


def _mutant(data: bytes, chance: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, fault = chance.randrange(len(mutant)), chance.randrange(6)
        if fault == 0:
            mutant[at] ^= 1 << chance.randrange(8)
        elif fault == 1:
            mutant[at] = chance.randrange(256)
        elif fault == 2:
            del mutant[max(at, 1) :]
        elif fault == 3:
            mutant[at : at + 10] = varint(chance.choice(_NUMBERS))
        elif fault == 4:
            del mutant[at : at + chance.randrange(1, 9)]
        else:
            mutant[at:at] = mutant[max(0, at - 40) : at]
    return bytes(mutant)


def _read_all(path: Path) -> int:
    """Read all that a file has; return how many tensors that were."""
    source = OnnxSource(path)
    weights = [source.read(module) for module in source.schema.layers]
    values = [q4.dequantize(weight, torch.float32) for weight in weights]
    dense = [source.load(name) for name in source.schema.dense]
    for name, tensor in zip(source.schema.dense, dense, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (source.dense[name].dtype, source.dense[name].shape)
    return len(values) + len(dense)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 16))])
def test_mutant_is_read_or_refused_by_a_typed_error(tmp_path: Path, seed: int) -> None:
    """Flipped, cut, doubled and overwritten bytes: an error of q4core, soon and in little memory, or a model."""
    chance, data, path = random.Random(seed), _whole(), tmp_path / "model.onnx"
    (tmp_path / "data.bin").write_bytes(bytes(24))
    path.write_bytes(data)
    assert _read_all(path) == 7
    refused = 0
    tracemalloc.start()
    for _ in range(_EACH):
        path.write_bytes(_mutant(data, chance))
        start = time.process_time()
        try:
            _read_all(path)
        except q4.Q4Error:
            refused += 1
        assert time.process_time() - start < scaled(2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > _EACH // 4
    assert peak < 16 << 20


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "/etc/hostname",
        "a/../../secret",
        "..",
        "C:\\secret",
        "\\\\host\\share",
        "a\\..\\..\\secret",
        "",
        "a\0b",
    ],
)
def test_external_data_elsewhere_is_refused(tmp_path: Path, location: str) -> None:
    """A location that leaves the model's folder is an error before any file is opened."""
    (tmp_path / "secret").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    tensor = initializer("w", np.zeros(4, np.float32), place={"location": location})
    (folder / "model.onnx").write_bytes(models.model([], [tensor]))
    with pytest.raises(q4.CheckpointError, match="folder, or below it") as caught:
        q4.open(folder / "model.onnx")
    assert "'w'" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ({"location": "absent.bin"}, "path|absent"),
        ({"location": "data.bin", "offset": "10"}, "within the file's 24 bytes"),
        ({"location": "data.bin", "offset": str(2**63)}, "within the file's 24 bytes"),
        ({"location": "data.bin", "offset": "-8"}, "a whole number from 0"),
        ({"location": "data.bin", "offset": "٣"}, "a whole number from 0"),
        ({"location": "data.bin", "offset": "9" * 400}, "a whole number from 0"),
        ({"location": "data.bin", "length": "15"}, "16, as float32"),
        ({"location": "folder"}, "regular file"),
    ],
)
def test_external_data_out_of_range_is_refused(tmp_path: Path, place: dict[str, str], rule: str) -> None:
    """Missing files, and offsets and lengths that don't fit, are errors when the model is opened."""
    (tmp_path / "data.bin").write_bytes(bytes(24))
    (tmp_path / "folder").mkdir()
    path = tmp_path / "model.onnx"
    path.write_bytes(models.model([], [initializer("w", np.zeros(4, np.float32), place=place)]))
    with pytest.raises(q4.CheckpointError, match=rule):
        q4.open(path)


def test_external_data_that_was_cut_since_is_an_error(tmp_path: Path) -> None:
    """A file that has become shorter between opening and reading is found before its bytes are."""
    (tmp_path / "data.bin").write_bytes(bytes(24))
    path = tmp_path / "model.onnx"
    path.write_bytes(models.model([], [initializer("w", np.zeros(4, np.float32), place={"location": "data.bin"})]))
    opened = q4.open(path)
    (tmp_path / "data.bin").write_bytes(bytes(3))
    with pytest.raises(q4.CheckpointError, match="within the file's 3 bytes"):
        opened.dense["w"]


def _tensor(*fields: bytes) -> bytes:
    return models.model([], [field(8, "w") + b"".join(fields)])


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no graph": (field(1, 10), "of a graph"),
    "two graphs": (field(1, 10) + 2 * field(7, graph([], [])), "of one graph"),
    "unknown field": (field(1, 10) + field(99, 1) + field(7, b""), "that ONNX defines"),
    "field 0": (field(1, 10) + b"\x00\x00", "numbered from 1"),
    "group": (field(1, 10) + b"\x0b", "kind 0, 1, 2 or 5"),
    "endless number": (b"\x08" + b"\xff" * 20, "numbers that end"),
    "large number": (b"\x08" + b"\xff" * 9 + b"\x7f", "64 bits"),
    "beyond the end": (field(1, 10) + b"\x3a" + varint(2**62), "bytes long"),
    "huge sizes": (_tensor(field(1, 2**62), field(1, 2**62), field(2, 1)), "elements"),
    "negative size": (_tensor(field(1, -4), field(2, 1)), "sizes from 0"),
    "many sizes": (_tensor(*[field(1, 1)] * 100, field(2, 1)), "64 dimensions"),
    "fewer bytes": (_tensor(field(1, 4), field(2, 1), field(9, bytes(15))), "of 16 bytes"),
    "no bytes": (_tensor(field(1, 4), field(2, 1)), "of 16 bytes"),
    "doubled bytes": (_tensor(field(1, 1), field(2, 1), 2 * field(9, bytes(4))), "in one piece"),
    "text as number": (_tensor(field(1, 1), field(2, b"\x01")), "whole number"),
    "number as bytes": (_tensor(field(1, 1), field(2, 1), field(9, 3)), "bytes"),
    "name of rubbish": (models.model([], [field(8, b"\xff\xfe")]), "UTF-8"),
    "long name": (models.model([], [field(8, "a" * 70000)]), "at most 65535"),
    "no name": (models.model([], [field(2, 1) + field(9, bytes(4))]), "not empty"),
    "same name": (models.model([], 2 * [initializer("a", np.zeros(1))]), "unique"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_with_its_rule(tmp_path: Path, case: str) -> None:
    """Each check has a message that names file, field and rule."""
    data, rule = HOSTILE[case]
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(q4.CheckpointError, match=rule) as caught:
        q4.open(path)
    assert caught.value.where == str(path)


def test_nested_graphs_end(tmp_path: Path) -> None:
    """Graphs within graphs are followed 16 deep, and no further."""
    inner = graph([], [])
    for _ in range(40):
        inner = graph([field(4, "If") + field(5, field(1, "b") + field(6, inner))], [])
    path = tmp_path / "model.onnx"
    path.write_bytes(field(1, 10) + field(7, inner))
    with pytest.raises(q4.CheckpointError, match="nested at most 16"):
        q4.open(path)


@pytest.mark.parametrize("numbers", [b"\x01", b"\x01\x02\x03\x04", b"\x01\x02\xff", b"\x80" * 12 + b"\x01\x02\x03"])
def test_numbers_of_another_count_are_an_error(tmp_path: Path, numbers: bytes) -> None:
    """A tensor stored number by number has as many as its shape says."""
    path = tmp_path / "model.onnx"
    path.write_bytes(_tensor(field(1, 3), field(2, 6), field(5, numbers)))
    opened = q4.open(path)
    with pytest.raises(q4.CheckpointError, match="of 3 numbers"):
        opened.dense["w"]
