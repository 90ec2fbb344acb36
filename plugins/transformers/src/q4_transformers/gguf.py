"""GGUF files for models of transformers: the header and the names as q4_lm reads them, and packed weights.

transformers' own loader dequantises such a file, and ignores most of its header. Here what transformers' model of that
kind does not compute is an error. q4_lm's names say what each tensor is; rows of q and k that the file permutes are put
in transformers' order, packed as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
import transformers
from torch import nn

import q4core as q4
from q4_lm import Metadata
from q4_lm.exchange.header_to_hf import header_to_hf, order_of_rows
from q4_lm.models.gguf_names import names_of
from q4_lm.models.gguf_rope import FACTORS, LONG, SHORT
from q4_lm.models.hf_names import to_hf_name
from q4_transformers.experts import place_experts
from q4_transformers.names import Names
from q4_transformers.places import Place, fitting_problem, raise_unfit, shape_of, skipped_modules
from q4core import CheckpointError, PackedWeight, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from q4_lm import TransformerConfig
    from q4core import Checkpoint

__all__ = ["GgufFile", "config_of", "open_gguf"]

_IN_CONFIG = frozenset({FACTORS, LONG, SHORT})
"""Tensors that the config has from the file."""
_EXPERTS = ".mlp.experts."
_STACKED = 3
"""Dimensions of a tensor of all experts' matrices."""


@attrs.frozen
class GgufFile:
    """A GGUF file, and what of it goes where in one model.

    Args:
        path: The file.
        places: The place of each packed layer.
        rows: Layer whose rows the file interleaves → their order in transformers.
        experts: Names of the experts' layers, packed or not.
        reasons: Module whose packed weight is made dense → why.
    """

    path: Path
    places: tuple[Place, ...]
    rows: Mapping[str, torch.Tensor]
    experts: tuple[str, ...] = ()
    reasons: Mapping[str, str] = attrs.field(factory=dict)

    def weight(self, checkpoint: Checkpoint, stored: str) -> PackedWeight:
        """Return a layer's weight, with its rows in transformers' order."""
        weight = checkpoint[stored]
        return weight.take_rows(self.rows[stored]) if stored in self.rows else weight


def open_gguf(path: Path, wanted: Sequence[str] = ()) -> tuple[Any, type[Any], GgufFile, dict[str, torch.Tensor]]:
    """Return config, model class, places and dense tensors of a GGUF file; the latter are views of the file.

    A packed matrix of a module that is no linear layer (the embedding, in which rows are looked up; a router) becomes
    a dense one. Where the head shares the embedding, the head stays packed, and the two are no longer tied.

    Args:
        path: The file.
        wanted: Names of modules whose packed weights are made dense, as in ``modules_to_not_convert``.

    Raises:
        ConfigError: A name fits no module.
        CheckpointError: The file is malformed, or of an architecture that is not supported.
        SchemaError: A tensor has no place in the model, or is of a type that is not read.
    """
    with q4.open(path) as checkpoint:
        own, config = _configs_of(checkpoint)
        with torch.device("meta"):
            model = _auto(own).from_config(config, **_options(own))
        raise_unfit(model, checkpoint, checkpoint.schema.unsupported)
        if not checkpoint.schema.layers:
            _refuse(str(path), "layers", "packed, some of them at least", "dense ones alone")
        filling = _Filling(own, config, model, checkpoint, wanted)
        filling.fill()
        file = GgufFile(path, tuple(filling.places), filling.rows, tuple(filling.experts), filling.reasons)
        return config, type(model), file, filling.state


def _auto(own: TransformerConfig) -> Any:
    return transformers.AutoModelForCausalLM if own.causal else transformers.AutoModel


def _options(own: TransformerConfig) -> dict[str, bool]:
    """Return arguments of the model's class beyond the config: a file of an encoder has no pooler."""
    return {} if own.causal else {"add_pooling_layer": False}


class _Filling:
    """Finds the place of every tensor of a file in a model on the meta device, whose experts it replaces."""

    def __init__(
        self, own: TransformerConfig, config: Any, model: Any, checkpoint: Checkpoint, wanted: Sequence[str]
    ) -> None:
        self._wanted = wanted
        self.reasons: dict[str, str] = {}
        self._own, self._config, self._model, self._checkpoint = own, config, model, checkpoint
        self._ours = names_of(own, checkpoint.metadata["general.architecture"]).ours
        self.state: dict[str, torch.Tensor] = {}
        self.places: list[Place] = []
        self.rows: dict[str, torch.Tensor] = {}
        self.experts: list[str] = []
        self._problems: list[Problem] = []
        self._merged: dict[str, torch.Tensor] = {}

    def fill(self) -> None:
        """Find all places, or raise the error that names each tensor without one, and each that is missing."""
        checkpoint, model = self._checkpoint, self._model
        self.experts = [
            self._name(name)
            for name in (*checkpoint, *self._dense_names())
            if _EXPERTS in self._name(name) and not name.endswith(".bias")
        ]
        self.experts = [name.removesuffix(".weight") for name in self.experts]
        place_experts(model, self.experts, Names(model))
        self._modules = dict(model.named_modules())
        self._skipped = skipped_modules(model, self._wanted)
        for name in checkpoint.dense:
            if name not in _IN_CONFIG:
                self._take_dense(name)
        self._join_biases()
        for stored, layer in checkpoint.schema.layers.items():
            self._take_packed(stored, layer.shape)
        filled = {*self.state, *model.all_tied_weights_keys, *(f"{place.module}.weight" for place in self.places)}
        missing = [name for name in model.state_dict() if name not in filled]
        self._problems += [
            Problem("missing_key", name, f"in the file, as {type(model).__name__} has it") for name in missing
        ]
        raise_unfit(model, checkpoint, self._problems)

    def _dense_names(self) -> Iterator[str]:
        """Yield names of dense tensors, those of the experts one by one."""
        infos: Mapping[str, Any] = self._checkpoint.dense.infos
        for name, info in infos.items():
            if len(info.shape) == _STACKED:
                yield from (f"{name.removesuffix('.weight')}.{number}.weight" for number in range(info.shape[0]))
            else:
                yield name

    def _name(self, stored: str) -> str:
        """Return transformers' name of a tensor or module of the file."""
        name = to_hf_name(f"{self._ours(stored)}.", self._own).removesuffix(".")
        return name if self._config.model_type == "gpt_oss" else name.replace(".mlp.router", ".mlp.gate")

    def _take_dense(self, name: str) -> None:
        values, target = self._checkpoint.dense[name], self._name(name)
        if values.dim() == _STACKED:
            parts = {f"{name.removesuffix('.weight')}.{number}.weight": part for number, part in enumerate(values)}
            self.state |= {self._name(one): part for one, part in parts.items()}
            return
        if _EXPERTS in target and target.endswith(".bias"):
            self._merged[target] = values
            return
        parameter = self._model.state_dict().get(target)
        if parameter is None:
            self._problems.append(Problem("unknown_key", name, f"a tensor of {type(self._model).__name__}"))
            return
        if tuple(parameter.shape) != tuple(values.shape):
            rule = f"{list(parameter.shape)}, as in the model's config"
            self._problems.append(Problem("shape", name, rule, list(values.shape)))
            return
        rows = order_of_rows(self._own, target.rpartition(".")[0], values.shape[0])
        values = values if rows is None else values[rows]
        if self._own.norm == "offset_rms" and target.endswith("norm.weight"):
            values = values.float() - 1  # which the file adds, as transformers does
        self.state[target] = values

    def _join_biases(self) -> None:
        """Give the experts' biases, one tensor for each part, as transformers has them: gate and up by turns."""
        for name, down in self._merged.items():
            if name.endswith("down_proj.bias"):
                holder = name.removesuffix("down_proj.bias")
                self.state[f"{holder}down_proj_bias"] = down
                both = [self._merged.get(f"{holder}{part}_proj.bias") for part in ("gate", "up")]
                if all(part is not None for part in both):
                    self.state[f"{holder}gate_up_proj_bias"] = torch.stack(both, -1).flatten(1)  # type: ignore[arg-type]

    def _take_packed(self, stored: str, shape: tuple[int, int] | None) -> None:
        model, name = self._model, self._name(stored)
        module = self._modules.get(name)
        weight = getattr(module, "weight", None)
        fits = weight is not None and tuple(weight.shape) == shape
        rows = order_of_rows(self._own, name, weight.shape[0]) if weight is not None and fits else None
        reason = self._skipped.get(name)
        if module is not None and shape_of(module) is None:
            reason = reason or f"{type(module).__name__} is no plain linear layer"
        if fits and reason is not None:
            packed = self._checkpoint[stored]
            dense = q4.dequantize(packed if rows is None else packed.take_rows(rows), torch.float32)
            self.state[f"{name}.weight"], self.reasons[name] = dense, f"{reason}: dequantised"
            if isinstance(module, nn.Embedding) and self._own.causal and self._config.tie_word_embeddings:
                head = next(name for name, item in self._modules.items() if item is model.get_output_embeddings())
                if head not in self._skipped:
                    self.places.append(Place(stored, head, saved=head))
                    self._config.tie_word_embeddings = False
            return
        problem = fitting_problem(stored, shape, name, self._modules, type(model).__name__)
        self._problems += [] if problem is None else [problem]
        self.places.append(Place(stored, name, saved=name))
        if rows is not None:
            self.rows[stored] = rows


def config_of(checkpoint: Checkpoint) -> Any:
    """Return transformers' config of a GGUF file's model, with all that the header says of what is computed.

    Raises:
        CheckpointError: The architecture is not supported, or transformers' model of it computes something else.
    """
    return _configs_of(checkpoint)[1]


def _configs_of(checkpoint: Checkpoint) -> tuple[TransformerConfig, Any]:
    where = str(checkpoint.path)
    try:
        own, facts = header_to_hf(checkpoint, Metadata(checkpoint.metadata, where))
    except CheckpointError as error:
        _refuse(where, str(error.name), str(error.rule), error.value)
    try:
        return own, transformers.AutoConfig.for_model(**facts)
    except Exception as error:  # noqa: BLE001  # transformers' own check of a config, of a class that depends on the release
        _refuse(where, "header", f"a config of transformers ({error})", facts["model_type"])


def _refuse(where: str, name: str, rule: str, value: object) -> NoReturn:
    hint = "q4_lm.LanguageModel.open(path) may support it."
    raise CheckpointError("GGUF file", name=name, rule=rule, value=value, where=where, hint=hint)
