"""What ``q4 convert`` writes loads in the libraries that own the format, and gives the numbers of the source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import safetensors
import torch
from safetensors.torch import load_file

import q4core as q4
from q4_cli.app import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

N, K = 64, 256


def convert(*words: object) -> None:
    """Run the command, which must succeed."""
    assert run(["convert", *map(str, words)]) == 0


def halves(weight: q4.PackedWeight, dtype: torch.dtype = torch.float16) -> q4.PackedWeight:
    """Return a weight whose floats are of 16 bits."""
    return weight.map_tensors(lambda item: item.to(dtype) if item.dtype in {torch.float32, torch.float16} else item)


@pytest.mark.parametrize(
    ("source", "format_name", "kind", "options"),
    [
        ("gptq", "int4", "Q4_0", {"symmetric": True, "block_size": 32}),
        ("compressed-tensors-int4", "int4", "Q4_0", {"symmetric": True, "block_size": 128}),
        ("mlx", "q4_1", "Q4_1", {"block_size": 64}),
        ("torchao-mxfp4-swizzled", "mxfp4", "MXFP4", {}),
        ("modelopt-nvfp4", "nvfp4", "NVFP4", {}),
    ],
)
def test_gguf_reads_what_was_converted(  # the facts of one file
    source: str,
    format_name: str,
    kind: str,
    options: dict[str, Any],
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``gguf`` finds the type, and computes the source's numbers from the file."""
    gguf = peer("gguf")
    weight = q4.quantize(dense(N, K, 31), format_name, **options)
    weight = halves(weight) if format_name in {"int4", "q4_1"} else weight
    q4.save_checkpoint(tmp_path / "in", {"proj": weight}, dialect=source, config={})
    convert(tmp_path / "in", tmp_path / "out.gguf", "--dialect", "gguf", "--from", source)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    found = tensors["proj.weight"]
    assert found.tensor_type.name == kind
    values = torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type))
    if "proj.scale" in tensors:
        values = values * torch.from_numpy(tensors["proj.scale"].data.copy())
    expected = q4.dequantize(weight, torch.float32)
    if kind in {"MXFP4", "NVFP4"}:  # whose code 8 it decodes as +0, and the global scale is multiplied last
        assert torch.allclose(values, expected, rtol=1e-6, atol=0)
    else:
        same_bits(values, expected, is_zero_signed=False)


@pytest.mark.parametrize("back", [False, True])
def test_compressed_tensors_reads_what_was_converted(
    back: bool,
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``decompress`` computes GPTQ's numbers, also where a GGUF file lies between."""
    package = peer("compressed_tensors.compressors")
    weight = halves(q4.quantize(dense(N, K, 32), "int4", symmetric=True, block_size=32))
    source, out = tmp_path / "in", tmp_path / "out"
    q4.save_checkpoint(source, {"proj": weight}, dialect="gptq", config={"dtype": "float16"})
    if back:
        (source / "config.json").write_text(json.dumps({}))
        convert(source / "model.safetensors", tmp_path / "middle.gguf", "--dialect", "gguf", "--from", "gptq")
        convert(tmp_path / "middle.gguf", tmp_path / "out.safetensors", "--dialect", "compressed-tensors-int4")
        written = load_file(tmp_path / "out.safetensors")
        scheme = peer("compressed_tensors.quantization").QuantizationScheme.model_validate(
            {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
        )
    else:
        convert(source, out, "--dialect", "compressed-tensors-int4")
        written = load_file(out / "model.safetensors")
        entry = json.loads((out / "config.json").read_text())["quantization_config"]
        config = peer("compressed_tensors.quantization").QuantizationConfig.model_validate(entry)
        scheme = config.config_groups["group_0"]
    stored = {name.removeprefix("proj."): tensor for name, tensor in written.items()}
    theirs = package.PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    same_bits(theirs, q4.dequantize(weight, theirs.dtype), is_zero_signed=False)


def test_mlx_reads_what_was_converted(
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``dequantize`` computes torchao's numbers, in float32."""
    mlx = peer("mlx.core")
    weight = halves(q4.quantize(dense(N, K, 33), "q4_1"), torch.bfloat16)
    weight = attrs.evolve(weight, offset=-8 * weight.scale)  # a middle of 0, which torchao's dtype always has
    q4.save_checkpoint(tmp_path / "in", {"proj": weight}, dialect="torchao-int4-tile-packed", config={})
    convert(tmp_path / "in", tmp_path / "out", "--dialect", "mlx")
    found = load_file(tmp_path / "out" / "model.safetensors")
    codes = mlx.array(found["proj.weight"].view(torch.uint8).numpy()).view(mlx.uint32)
    scales, biases = (mlx.array(found[f"proj.{name}"].float().numpy()) for name in ("scales", "biases"))
    values = mlx.dequantize(codes, scales, biases, group_size=32, bits=4)
    same_bits(torch.tensor(values.tolist()), q4.dequantize(weight, torch.float32), is_zero_signed=False)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_reads_what_was_converted(
    kind: str,
    peer: Callable[[str], ModuleType],
    portable: Callable[..., torch.Tensor],
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``Params4bit`` takes the tensors of a layer that GPTQModel's flat names held, and has its numbers."""
    bnb = peer("bitsandbytes")
    weight = q4.quantize(dense(N, K, 34), kind)
    q4.save_checkpoint(tmp_path / "in", {"proj": weight}, dialect="gptqmodel-bitsandbytes", config={})
    convert(tmp_path / "in", tmp_path / "out", "--dialect", "bitsandbytes")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    data = stored.pop("proj.weight")
    statistics = {name.removeprefix("proj.weight."): item for name, item in stored.items()}
    theirs = bnb.nn.Params4bit.from_prequantized(data, statistics, device="cpu")
    same_bits(portable(theirs.data, theirs.quant_state, torch.float32), q4.dequantize(weight, torch.float32))


@pytest.mark.parametrize("source", ["modelopt-mxfp4", "mlx", "gguf"])
def test_torchao_reads_what_was_converted(
    source: str,
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """torchao makes its tensor of the file's, and dequantises it to the source's numbers."""
    support = peer("torchao.prototype.safetensors.safetensors_support")
    peer("torchao.prototype.mx_formats.mx_tensor")
    weight = q4.quantize(dense(N, K, 35), "mxfp4")
    path = tmp_path / ("in.gguf" if source == "gguf" else "in")
    q4.save_checkpoint(path, {"proj": weight}, dialect=source, config=None if source == "gguf" else {})
    convert(path, tmp_path / "out.safetensors", "--dialect", "torchao-mxfp4-swizzled")
    out = tmp_path / "out.safetensors"
    with safetensors.safe_open(out, "pt") as file:
        theirs, left = support.unflatten_tensor_state_dict(load_file(out), file.metadata())
    assert left == {}
    same_bits(theirs["proj.weight"].dequantize(torch.float32), q4.dequantize(weight, torch.float32))


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("dialect", ["compressed-tensors-mxfp4", "bitsandbytes"])
def test_transformers_opens_a_converted_gguf_file(
    dialect: str, peer: Callable[[str], ModuleType], dense: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """A Llama goes into GGUF and out again; transformers and the owner compute its logits."""
    transformers = peer("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False, dtype="bfloat16",
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    torch.manual_seed(36)
    model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    modules = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    weights = {}
    for index, name in enumerate(modules):
        shape = state.pop(f"{name}.weight").shape
        weights[name] = q4.quantize(dense(*shape, 40 + index, torch.bfloat16), "mxfp4", name=name)
    folder, file, out = tmp_path / "one", tmp_path / "two.gguf", tmp_path / "three"
    q4.save_checkpoint(
        folder, weights, dialect="modelopt-mxfp4", dense=state, config=json.loads(config.to_json_string())
    )
    convert(folder, file, "--dialect", "gguf")
    convert(file, out, "--dialect", dialect, *(["--requantize"] if dialect == "bitsandbytes" else []))
    with q4.open(out) as checkpoint:
        values = {f"{name}.weight": q4.dequantize(checkpoint[name], torch.bfloat16) for name in checkpoint}
    if dialect != "bitsandbytes":
        for name, weight in weights.items():
            assert torch.equal(values[f"{name}.weight"], q4.dequantize(weight, torch.bfloat16))
    model.load_state_dict({**state, **values})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = torch.arange(20)[None] * 5 % 128
    with torch.no_grad():
        expected, found = model(tokens).logits.float(), theirs(tokens).logits.float()
    assert float((found - expected).norm() / expected.norm()) < 2e-2  # of bfloat16
