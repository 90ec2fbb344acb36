"""GGUF files for models of transformers: its own tables of names and configs, and the packed weights as they are.

transformers' loader dequantises such a file. Its tables say what the parts are called and how the file orders rows of q
and k; with these, packed rows are put in order as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
import transformers
from torch import nn
from transformers import modeling_gguf_pytorch_utils as tables

import q4core as q4
from q4_transformers.places import Place, fitting_problem, raise_unfit
from q4core import CheckpointError, PackedWeight, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from q4core import Checkpoint

__all__ = ["GgufFile", "open_gguf"]

_PERMUTED = (".attn_q", ".attn_k")
_TURNED = "rope_freqs.weight"


@attrs.frozen
class GgufFile:
    """A GGUF file, and what of it goes where in one model.

    Args:
        path: The file.
        places: The place of each packed layer.
        heads: Layer whose rows the file interleaves → heads that it has.
    """

    path: Path
    places: tuple[Place, ...]
    heads: Mapping[str, int]

    def weight(self, checkpoint: Checkpoint, stored: str) -> PackedWeight:
        """Return a layer's weight, with its rows in transformers' order."""
        weight = checkpoint[stored]
        if stored not in self.heads:
            return weight
        rows = torch.arange(weight.out_features).view(self.heads[stored], -1, 2)
        return weight.take_rows(rows.transpose(1, 2).reshape(-1))


def open_gguf(path: Path) -> tuple[Any, type[Any], GgufFile, dict[str, torch.Tensor]]:
    """Return config, model class, places and dense tensors of a GGUF file; the latter are views of the file.

    A packed embedding becomes a dense one, in which transformers looks rows up; where the head shares its weight, the
    head stays packed, and the two are no longer tied.

    Raises:
        CheckpointError: The file is malformed, or of an architecture that is not served.
        SchemaError: A tensor has no place in the model, or is of a type that is not read.
    """
    with q4.open(path) as checkpoint:
        kind = _processor(checkpoint, path)
        try:
            config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        except ValueError as error:
            raise _refusal(path, "general.architecture", "one that transformers reads", str(error)) from error
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        processor = kind(config=config.to_dict())
        names: dict[str, str] = tables.get_gguf_hf_weights_map(model, processor)
        modules = dict(model.named_modules())
        state: dict[str, torch.Tensor] = {}
        places, problems = [], list(checkpoint.schema.unsupported)
        for name in checkpoint.dense:
            if name in names:
                values = checkpoint.dense[name]
                found = processor.process(
                    weights=values.float().numpy(), name=name, tensor_key_mapping=names, parsed_parameters={}
                )
                state[names[name]] = torch.from_numpy(found.weights)
            else:
                problems.append(Problem("unknown_key", name, f"a tensor of {type(model).__name__}"))
        for stored, layer in checkpoint.schema.layers.items():
            module = names.get(f"{stored}.weight", "").removesuffix(".weight")
            if isinstance(modules.get(module), nn.Embedding):
                state[f"{module}.weight"] = q4.dequantize(checkpoint[stored], torch.float32)
                if config.tie_word_embeddings:
                    head = next(name for name, item in modules.items() if item is model.get_output_embeddings())
                    places.append(Place(stored, head))
                    config.tie_word_embeddings = False
                continue
            problem = fitting_problem(stored, layer.shape, module, modules, type(model).__name__)
            problems += [] if problem is None else [problem]
            places.append(Place(stored, module))
        raise_unfit(model, checkpoint, problems)
        heads = {}
        if issubclass(kind, tables.LlamaTensorProcessor):
            q, k = config.num_attention_heads, config.num_key_value_heads
            heads = {
                place.stored: q if place.stored.endswith(_PERMUTED[0]) else k
                for place in places
                if place.stored.endswith(_PERMUTED)
            }
    return config, type(model), GgufFile(path, tuple(places), heads), state


def _processor(checkpoint: Checkpoint, path: Path) -> type[Any]:
    """Return transformers' way with the file's tensors, where it leaves matrices as they are, or orders their rows."""
    architecture = str(checkpoint.metadata.get("general.architecture"))
    kind: type[Any] = tables.TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)
    if kind not in {tables.TensorProcessor, tables.LlamaTensorProcessor, tables.Gemma2TensorProcessor}:
        raise _refusal(path, "general.architecture", "one whose matrices transformers takes as they are", architecture)
    if _TURNED in checkpoint.dense:
        raise _refusal(
            path, _TURNED, "absent, as transformers passes over it", list(checkpoint.dense.infos[_TURNED].shape)
        )
    return kind


def _refusal(path: Path, name: str, rule: str, value: object) -> CheckpointError:
    hint = "q4_nn.LanguageModel.open(path) may serve it."
    return CheckpointError("GGUF file", name=name, rule=rule, value=value, where=str(path), hint=hint)
