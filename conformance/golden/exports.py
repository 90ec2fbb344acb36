"""Whole models, tiny ones, exported the way users of each library export theirs.

Each folder has ``config.json``, ``model.safetensors`` and ``expected.safetensors``: the bfloat16 weight of every
quantised module, by module name, dequantised by the library.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modelopt.torch.quantization as mtq
import torch
from bitsandbytes.nn import Linear4bit
from compressed_tensors.compressors import ModelCompressor, NVFP4PackedCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from from_bitsandbytes import expected_of
from from_compressed_tensors import nvfp4_scales
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

if TYPE_CHECKING:
    from collections.abc import Callable

Expected = dict[str, torch.Tensor]


def _base() -> LlamaForCausalLM:
    """Return a one-layer model with random bfloat16 weights."""
    torch.manual_seed(20)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def _through_transformers(config: Any, folder: Path) -> torch.nn.Module:
    """Load the base model quantised by ``transformers``, save it to ``folder`` and return it."""
    with tempfile.TemporaryDirectory() as base:
        _base().save_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(
            base, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
        )
    model.save_pretrained(folder)
    return model


def _bitsandbytes(folder: Path) -> Expected:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = _through_transformers(config, folder)
    return {
        name: expected_of(module.weight.data, module.weight.quant_state, torch.bfloat16)
        for name, module in model.named_modules()
        if isinstance(module, Linear4bit)
    }


def _torchao(folder: Path) -> Expected:
    model = _through_transformers(TorchAoConfig(NVFP4WeightOnlyConfig()), folder)
    return {
        name: module.weight.dequantize(torch.bfloat16)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and isinstance(module.weight, NVFP4Tensor)
    }


def _modelopt(folder: Path) -> Expected:
    model = _base()
    tokens = torch.arange(32).reshape(2, 16)
    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda item: item(tokens))
    export_hf_checkpoint(model, export_dir=folder)
    stored = load_file(folder / "model.safetensors")
    expected = {}
    for key, scale in stored.items():
        if key.endswith(".weight_scale"):
            name = key.removesuffix(".weight_scale")
            packed = stored[f"{name}.weight"]
            shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
            expected[name] = NVFP4QTensor(shape, torch.bfloat16, packed).dequantize(
                scale=scale, double_scale=stored[f"{name}.weight_scale_2"], block_sizes={-1: 16}
            )
    return expected


def _compressed_tensors(folder: Path) -> Expected:
    model = _base()
    form = "nvfp4-pack-quantized"
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=form,
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    names = [name for name, module in model.named_modules() if getattr(module, "quantization_scheme", None)]
    for name in names:
        module = model.get_submodule(name)
        scale, total = nvfp4_scales(module.weight.data, scheme)
        module.weight_scale.data.copy_(scale)
        module.weight_global_scale.data.copy_(total)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    stored = load_file(folder / "model.safetensors")
    expected = {}
    for name in names:
        own = {key.rsplit(".", 1)[1]: value for key, value in stored.items() if key.startswith(f"{name}.")}
        expected[name] = NVFP4PackedCompressor.decompress(own, scheme)["weight"]
    return expected


MODELS: dict[str, Callable[[Path], Expected]] = {
    "bitsandbytes-nf4": _bitsandbytes,
    "compressed-tensors-nvfp4": _compressed_tensors,
    "modelopt-nvfp4": _modelopt,
    "torchao-nvfp4": _torchao,
}


def write_models(folder: Path, save: Callable[[Path, Expected], None]) -> None:
    """Write every model below ``folder``; ``save`` writes a safetensors file."""
    for name, export in MODELS.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' words about each other's versions
            with contextlib.redirect_stdout(None):
                expected = export(Path(scratch))
            for file in ("config.json", "model.safetensors"):
                (target / file).write_bytes((Path(scratch) / file).read_bytes())
        if not expected:
            raise RuntimeError(f"{name} quantised nothing")
        save(target / "expected.safetensors", {key: value.detach() for key, value in expected.items()})
