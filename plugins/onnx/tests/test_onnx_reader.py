"""ONNX files: layers of MatMulNBits and GatherBlockQuantized, dense tensors, and what is listed but not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch

import q4core as q4
from tests.support import onnx_models as models
from tests.support.onnx_models import field, graph, initializer, node, packed

if TYPE_CHECKING:
    from pathlib import Path

F32 = np.zeros(4, np.float32)


def _same(found: torch.Tensor, value: np.ndarray[Any, Any]) -> bool:
    return torch.equal(found.view(torch.int32), torch.from_numpy(np.ascontiguousarray(value)).view(torch.int32))


def _open(path: Path, nodes: list[bytes], tensors: list[bytes]) -> q4.Checkpoint:
    path.write_bytes(models.model(nodes, tensors))
    return q4.open(path)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("zero", ["none", "bytes", "middle", "floats"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(10))
def test_weight_is_what_its_numbers_mean(tmp_path: Path, seed: int, bits: int, zero: str, kind: str) -> None:
    """(q - z) * scale in float32, bit for bit: short last blocks, flat and shaped scales, every kind of zero point."""
    matrix = packed(seed, bits=bits, zero=zero, flat=bool(seed % 2), kind=kind)
    checkpoint = q4.open(models.write(tmp_path / "model.onnx", matrix))
    ((name, layer),) = checkpoint.schema.layers.items()
    assert (name, layer.format, layer.dialect) == ("proj", f"int{bits}", "onnx")
    assert (checkpoint.schema.dense, checkpoint.schema.unsupported) == ((), ())
    weight = checkpoint["proj"]
    if zero in {"none", "middle"}:
        assert weight.zero is None
    weight.check_values()
    assert _same(q4.dequantize(weight, torch.float32), matrix.value)


def test_codes_are_views_of_the_file(tmp_path: Path) -> None:
    """What is written into the codes of one reading is seen in another of the same source, and never in the file."""
    path = models.write(tmp_path / "model.onnx", packed(3))
    before = path.read_bytes()
    checkpoint = q4.open(path)
    one, other = (checkpoint.source.read("proj") for _ in range(2))
    assert one.qdata.data_ptr() == other.qdata.data_ptr()
    one.qdata.fill_(0x11)
    assert path.read_bytes() == before
    checkpoint.close()
    assert bool((other.qdata == 0x11).all())
    with pytest.raises(q4.LifecycleError):
        checkpoint["proj"]


@pytest.mark.parametrize("copy", [False, True])
def test_external_data_is_found_next_to_the_model(tmp_path: Path, *, copy: bool) -> None:
    """Offsets and lengths of tensors in another file are used, with or without a stated length."""
    matrix, stem = packed(5, zero="floats"), "proj.MatMul.weight"
    (tmp_path / "weights").mkdir()
    held, tensors = bytearray(b"\0" * 7), []
    for part, array in matrix.parts.items():
        place = {"location": "weights/model.onnx_data", "offset": str(len(held)), "length": str(array.nbytes)}
        if part == "_scales":
            del place["length"]
        tensors.append(initializer(stem + part, array, kind=matrix.kinds.get(part), place=place))
        held += array.tobytes()
    (tmp_path / "weights" / "model.onnx_data").write_bytes(held)
    path = tmp_path / "model.onnx"
    path.write_bytes(models.model([node("MatMulNBits", matrix.names(stem), numbers=matrix.numbers)], tensors))
    weight = q4.open(path, copy=copy)["proj"]
    assert _same(q4.dequantize(weight, torch.float32), matrix.value)


@pytest.mark.parametrize(
    ("codes", "name", "module"),
    [
        ("model.layers.0.attn.q_proj.MatMul.weight_Q4", "", "model.layers.0.attn.q_proj"),
        ("model.layers.0.mlp.up_proj.weight_quantized", "", "model.layers.0.mlp.up_proj"),
        ("/model/layers.1/mlp/MatMul_quant", "", "model.layers.1.mlp"),
        ("lm_head.MatMul.weight_Q8G32", "", "lm_head"),
        ("onnx::MatMul_42_Q4", "/model/layers.0/k_proj/MatMul_Q4", "model.layers.0.k_proj"),
        ("onnx::MatMul_42_Q4", "", "_out"),
        ("weight", "", "weight"),
    ],
)
def test_layer_has_the_name_of_its_codes_or_its_node(tmp_path: Path, codes: str, name: str, module: str) -> None:
    """What marks packed codes is no part of the name; where that is a number, the node names the layer."""
    matrix = packed(1, zero="none")
    tensors = [initializer(codes, matrix.parts["_Q4"]), initializer("s", matrix.parts["_scales"])]
    opened = _open(tmp_path / "a.onnx", [node("MatMulNBits", ("x", codes, "s"), name, numbers=matrix.numbers)], tensors)
    assert list(opened.schema.layers) == [module]


def test_nodes_that_share_tensors_are_one_layer(tmp_path: Path) -> None:
    """Two nodes of one matrix are a layer; two matrices of the same name have the whole names of their codes."""
    matrix = packed(1, zero="none")
    names = matrix.names("a.weight")
    nodes = [node("MatMulNBits", names, place, numbers=matrix.numbers) for place in ("one", "two")]
    opened = _open(tmp_path / "a.onnx", nodes, matrix.tensors("a.weight"))
    assert list(opened.schema.layers) == ["a"]
    nodes.append(node("MatMulNBits", matrix.names("a.MatMul.weight"), "three", numbers=matrix.numbers))
    tensors = [*matrix.tensors("a.weight"), *matrix.tensors("a.MatMul.weight")]
    opened = _open(tmp_path / "b.onnx", nodes, tensors)
    assert list(opened.schema.layers) == ["a.weight_Q4", "a.MatMul.weight_Q4"]


@pytest.mark.parametrize("seed", range(20))
def test_embedding_is_read_like_a_matrix(tmp_path: Path, seed: int) -> None:
    """GatherBlockQuantized with bytes along rows has the same layout; a matrix may be its codes through a Reshape."""
    matrix = packed(seed, bits=4 if seed % 2 else 8)
    sizes, codes = matrix.numbers, matrix.parts["_Q4"]
    rows, columns = sizes["N"], codes.shape[1] * sizes["block_size"]
    stored = codes if seed % 3 else codes.reshape(rows, -1)
    names = ("flat_out" if seed % 3 else "emb_Q4", "ids", "emb_scales", "emb_zero_points")
    numbers = {"bits": sizes["bits"], "block_size": sizes["block_size"], "quantize_axis": 1}
    nodes = [
        node("Reshape", ("emb_Q4", "shape"), "flat", domain=""),
        node("GatherBlockQuantized", names, numbers=numbers),
    ]
    parts = {**matrix.parts, "_Q4": stored}
    opened = _open(tmp_path / "a.onnx", nodes, attrs.evolve(matrix, parts=parts).tensors("emb"))
    weight = opened["emb"]
    assert weight.shape == (rows, columns)
    assert _same(q4.dequantize(weight, torch.float32)[:, : sizes["K"]], matrix.value)


def test_other_initializers_are_dense(tmp_path: Path) -> None:
    """Each dtype is read, aligned or not, as raw bytes, packed floats or varints; a bias too."""
    matrix = packed(2, zero="none")
    half = np.array([1.5, -2, 65504], np.float16)
    typed = {
        "f": field(1, 2) + field(2, 1) + field(8, "f") + field(4, np.array([1, -2.5], np.float32).tobytes()),
        "i": field(1, 3) + field(2, 7) + field(8, "i") + field(7, b"".join(map(models.varint, (-1, 300, 2**62)))),
        "h": field(1, 3)
        + field(2, 10)
        + field(8, "h")
        + field(5, b"".join(models.varint(int(word)) for word in half.view(np.uint16))),
        "b": field(1, 2) + field(2, 9) + field(8, "b") + field(5, b"\x01\x00"),
        "empty": field(1, 0) + field(2, 1) + field(8, "empty"),
    }
    bias = np.arange(matrix.numbers["N"], dtype=np.float32)
    names = (*matrix.names("p"), "", "p.bias")
    tensors = [initializer("x" * odd, np.arange(3.0)) for odd in (1, 2, 3)]
    tensors += [*matrix.tensors("p"), *typed.values(), initializer("p.bias", bias)]
    opened = _open(tmp_path / "a.onnx", [node("MatMulNBits", names, numbers=matrix.numbers)], tensors)
    wanted = {
        "f": torch.tensor([1, -2.5]),
        "i": torch.tensor([-1, 300, 2**62]),
        "h": torch.from_numpy(half),
        "b": torch.tensor([True, False]),
        "empty": torch.empty(0),
        "p.bias": torch.from_numpy(bias),
        **{"x" * odd: torch.arange(3, dtype=torch.float64) for odd in (1, 2, 3)},
    }
    assert set(opened.schema.dense) == wanted.keys()
    for name, tensor in wanted.items():
        found = opened.dense[name]
        assert torch.equal(found, tensor)
        assert (found.dtype, tuple(found.shape)) == (opened.dense.infos[name].dtype, opened.dense.infos[name].shape)


def test_graphs_in_attributes_are_read(tmp_path: Path) -> None:
    """Models that were merged have their operators in the branches of an If."""
    matrix = packed(4)
    inner = graph([node("MatMulNBits", matrix.names("p"), "n", numbers=matrix.numbers)], [])
    branch = field(1, "then_branch") + field(6, inner) + field(20, 5)
    outer = field(1, "cond") + field(2, "y") + field(4, "If") + field(5, branch)
    opened = _open(tmp_path / "a.onnx", [outer], matrix.tensors("p"))
    assert _same(q4.dequantize(opened["p"], torch.float32), matrix.value)


def test_branches_may_use_the_same_names(tmp_path: Path) -> None:
    """Each branch of an If has initializers of its own, and its operators mean these."""
    one, other = packed(4), packed(5)
    then, alternative = (
        graph([node("MatMulNBits", item.names("p"), name, numbers=item.numbers)], item.tensors("p"))
        for item, name in ((one, "n"), (other, "m"))
    )
    branches = [(b"then_branch", then), (b"else_branch", alternative)]
    attributes = [field(5, field(1, name.decode()) + field(6, inner) + field(20, 5)) for name, inner in branches]
    outer = field(1, "cond") + field(2, "y") + field(4, "If") + b"".join(attributes)
    opened = _open(tmp_path / "a.onnx", [outer], [])
    found = [q4.dequantize(opened[module], torch.float32) for module in opened]
    assert len(found) == 2
    assert _same(found[0], one.value)
    assert _same(found[1], other.value)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("operator", ["MatMulInteger", "DequantizeLinear", "QMoE", "MatMulBnb4"])
def test_bytes_of_other_operators_are_named(tmp_path: Path, operator: str) -> None:
    """A byte matrix of any other operator is packed data that is not read, and never dense."""
    good = packed(0)
    tensors = [*good.tensors("p"), initializer("w", np.zeros((4, 8), np.int8)), initializer("s", F32)]
    nodes = [node("MatMulNBits", good.names("p"), numbers=good.numbers), node(operator, ("x", "w", "s"), domain="")]
    opened = _open(tmp_path / "a.onnx", nodes, tensors)
    assert opened.schema.dense == ("s",)
    assert [(item.key, item.value) for item in opened.schema.unsupported] == [("w", f"int8 of {operator}")]


def _changed(**numbers: int) -> dict[str, Any]:
    return {"numbers": numbers}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": (_changed(bits=3), "3-bit"),
    "block of 8": (_changed(block_size=8), "power of two"),
    "block of 48": (_changed(block_size=48), "power of two"),
    "negative block": (_changed(block_size=-16), "power of two"),
    "no rows": (_changed(N=0), "N and K"),
    "huge": (_changed(K=2**62), "N and K"),
    "other rows": (_changed(N=200), "of shape"),
    "prepacked": (_changed(weight_prepacked=1), "one kernel"),
    "scales of integers": ({"_scales": np.zeros((1, 1), np.int32)}, "float32, float16 or bfloat16"),
    "more scales": ({"_scales": np.zeros((77, 3), np.float32)}, "of shape"),
    "more zero points": ({"_zero_points": np.zeros((77, 3), np.uint8)}, "of shape"),
    "signed codes": ({"_Q4": np.zeros((1, 1, 8), np.int8)}, "uint8 codes"),
    "no scales": ({"_scales": None}, "scales"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layer_that_cannot_be_read_says_why(tmp_path: Path, case: str) -> None:
    """Wrong widths, sizes and dtypes are each named, next to a layer that is read, and none of its parts is dense."""
    changes, rule = REFUSED[case]
    good, bad = packed(0), packed(9)
    changes = dict(changes)
    bad = attrs.evolve(bad, numbers={**bad.numbers, **changes.pop("numbers", {})})
    parts = {**bad.parts, **changes}
    bad = attrs.evolve(bad, parts={key: part for key, part in parts.items() if part is not None}, kinds={})
    nodes = [
        node("MatMulNBits", item.names(stem), numbers=item.numbers) for item, stem in ((good, "good"), (bad, "bad"))
    ]
    opened = _open(tmp_path / "a.onnx", nodes, [*good.tensors("good"), *bad.tensors("bad")])
    assert (list(opened.schema.layers), opened.schema.dense) == (["good"], ())
    (problem,) = opened.schema.unsupported
    assert problem.key.startswith("bad")
    assert rule in str(problem)


@pytest.mark.parametrize("is_plain", [True, False])
def test_index_of_groups_is_read_where_it_says_nothing(tmp_path: Path, *, is_plain: bool) -> None:
    """``g_idx`` in order changes nothing; any other is refused by name."""
    matrix = packed(11)
    groups = np.arange(matrix.numbers["K"], dtype=np.int32) // matrix.numbers["block_size"]
    groups = groups if is_plain else groups[::-1] + 1
    names = (*matrix.names("p"), "p.g_idx")
    nodes = [
        node("MatMulNBits", names, numbers=matrix.numbers),
        node("MatMulNBits", packed(0).names("q"), numbers=packed(0).numbers),
    ]
    tensors = [*matrix.tensors("p"), initializer("p.g_idx", groups), *packed(0).tensors("q")]
    opened = _open(tmp_path / "a.onnx", nodes, tensors)
    assert ("p" in opened.schema.layers) == is_plain
    assert ["g_idx" in str(item.value) for item in opened.schema.unsupported] == [True] * (not is_plain)


def test_rounding_of_inputs_is_noted(tmp_path: Path) -> None:
    """ONNX Runtime may round inputs to 8 bits at accuracy level 4; the layer's notes say that nothing here does."""
    matrix = packed(0)
    for level, is_noted in ((0, False), (1, False), (4, True)):
        matrix = attrs.evolve(matrix, numbers={**matrix.numbers, "accuracy_level": level})
        opened = q4.open(models.write(tmp_path / f"{level}.onnx", matrix))
        assert ["int8" in note for note in opened.schema.layers["proj"].notes] == [True] * is_noted


def test_operators_of_other_domains_are_not_read(tmp_path: Path) -> None:
    """Only com.microsoft's operators are what their names say."""
    matrix = packed(0)
    foreign = node("MatMulNBits", matrix.names("p"), domain="other", numbers=matrix.numbers)
    with pytest.raises(q4.SchemaError, match="uint8 of MatMulNBits"):
        _open(tmp_path / "a.onnx", [foreign], matrix.tensors("p"))


def test_file_is_known_by_its_fields(tmp_path: Path) -> None:
    """Any name will do for a whole model; what only starts like one is left to others."""
    content = models.write(tmp_path / "model.onnx", packed(0)).read_bytes()
    for name, data, is_known in (
        ("model.data", content, True),
        ("model.data", content[:-1], False),
        ("model.data", b"\x08\x01\x02\x03rubbish", False),
        ("model.onnx", b"nothing of the kind", False),
    ):
        (tmp_path / name).write_bytes(data)
        if is_known:
            assert q4.open(tmp_path / name).reader == "onnx"
        else:
            with pytest.raises(q4.CheckpointError, match="exactly one installed reader"):
                q4.open(tmp_path / name)


def test_options_are_refused(tmp_path: Path) -> None:
    """The reader has no options."""
    path = models.write(tmp_path / "model.onnx", packed(0))
    with pytest.raises(q4.DialectError, match="option"):
        q4.open(path, options={"dequantize": True})
