"""``Q4Config``: the layers that the checkpoint holds packed, and what vLLM's loader must leave out."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

import q4core as q4
from q4_vllm.checks import check_folder, check_fusions, check_platform, check_version, raise_unplaced
from q4_vllm.experts import Q4ExpertsMethod, parts_of_experts
from q4_vllm.gguf import open_folder, source_of
from q4_vllm.linear import Q4EmbeddingMethod, Q4LinearMethod
from q4_vllm.prepared import RankLayers
from q4_vllm.report import rank_of, report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4_vllm.gguf import GgufFolder

__all__ = ["Q4Config"]

logger = init_logger("vllm.q4")
_OWN = {"checkpoint", "_layers"}
"""What each process has for itself: mapped files can't be pickled, and need not be."""


class Q4Config(QuantizationConfig):  # type: ignore[misc]  # vLLM has no types here
    """A checkpoint that q4core opens; its headers are believed, not the entry of ``config.json``.

    vLLM makes it in the process that the user sees, where ``maybe_update_config`` checks the folder, and pickles it to
    its workers, each of which opens the folder again, once a layer is needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = ""
        self._stored: dict[str, str] = {}  # vLLM's name → the checkpoint's
        self._placed: set[str] = set()
        self._waiting: set[str] = set()
        self._layers: dict[torch.dtype, RankLayers] = {}

    @functools.cached_property
    def checkpoint(self) -> q4.Checkpoint | GgufFolder:
        """The folder, open."""
        return open_folder(Path(self.folder))

    def layers(self, dtype: torch.dtype) -> RankLayers:
        """Return this process's layers for activations of a dtype; ``Q4_*`` variables choose backend and precision."""
        if dtype not in self._layers:
            session = q4.Session(q4.SessionConfig(device="cpu", compute_dtype=dtype), name="vllm")
            config = get_current_vllm_config_or_none()
            cut = "1" if config is None else str(config.parallel_config.tensor_parallel_size)
            place = {"engine": "vllm", "rank": "{} of {}".format(*rank_of()), "tensor_parallel": cut}
            self._layers[dtype] = RankLayers(source_of(Path(self.folder)), session, place)
        return self._layers[dtype]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what each process has for itself."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no layers."""
        self.__dict__.update(state, _layers={})

    # -- what vLLM asks before it makes a model

    def get_name(self) -> str:
        """Return the name for ``--quantization``."""
        return "q4"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of activations."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return a number below every GPU's."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return none: headers say how layers are stored."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Q4Config:
        """Return a config; the entry of config.json is not read."""
        del config
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return ``q4`` where the user asked for it, whichever library the checkpoint names."""
        del hf_quant_cfg, hf_config
        return "q4" if user_quant == "q4" else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check version, platform and folder, where vLLM first names them.

        Raises:
            ConfigError: Another version of vLLM, another platform than CPUs, or a folder without 4-bit layers.
            CheckpointError: No folder, or one without a config.json.
            SchemaError: A form that is not read, or dense layers inside a fusion.
        """
        del revision
        check_version()
        check_platform(current_platform)
        with check_folder(model_name) as checkpoint:
            for name in getattr(hf_config, "architectures", None) or ():
                entry = ModelRegistry.models.get(name)
                fusions = getattr(entry.load_model_cls(), "packed_modules_mapping", None) if entry else None
                check_fusions(checkpoint, checkpoint.dense, fusions or {})
            self._stored = {name: name for name in checkpoint}
        self.folder = model_name

    # -- names

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Name layers as the model does, without its fusions, which ``packed_modules_mapping`` has."""
        renaming = WeightsMapper(
            orig_to_new_regex=hf_to_vllm_mapper.orig_to_new_regex,
            orig_to_new_substr=hf_to_vllm_mapper.orig_to_new_substr,
            orig_to_new_prefix=hf_to_vllm_mapper.orig_to_new_prefix,
        )
        self._stored = {renaming.map_name(name) or name: name for name in self._stored.values()}

    def get_checkpoint_weight_mapper(self) -> Any:
        """Return a mapper that drops the tensors of packed layers: vLLM's loader never reads them."""
        layers = self.checkpoint.schema.layers.values()
        keys = sorted({re.escape(key) for layer in layers for key in layer.keys.values()})
        return WeightsMapper(orig_to_new_regex={re.compile(f"^(?:{'|'.join(keys)})$"): None})

    def shape(self, stored: str) -> tuple[int, int]:
        """Return (N, K) of a layer of the checkpoint."""
        return self.checkpoint[stored].shape

    def parts_of(self, prefix: str) -> list[str]:
        """Return the checkpoint's layers that vLLM's layer is made of; none where it is dense.

        Raises:
            SchemaError: Some of them are dense.
        """
        head, _, last = prefix.rpartition(".")
        names = [f"{head}.{part}" if head else part for part in self.packed_modules_mapping.get(last, [last])]
        if prefix in self._stored:  # stored as one matrix, which others store in parts
            names = [prefix]
        found = [name for name in names if name in self._stored]
        if found and len(found) != len(names):
            check_fusions(found, [f"{name}.weight" for name in names], {last: [n.rpartition(".")[2] for n in names]})
        return [self._stored[name] for name in found]

    # -- layers

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return how a layer runs: packed, or as vLLM runs it."""
        if isinstance(layer, RoutedExperts):
            experts = parts_of_experts(layer, prefix.removesuffix(".routed_experts"), self._stored)
            if experts is None:
                return None
            self._take(name for parts in experts for name in parts)
            return Q4ExpertsMethod(self, layer.moe_config, experts, prefix)
        parts = self.parts_of(prefix)
        self._take(parts)
        if isinstance(layer, LinearBase) or (isinstance(layer, ParallelLMHead) and parts):
            return Q4LinearMethod(self, parts, prefix) if parts else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return Q4EmbeddingMethod(self, parts[0]) if parts else UnquantizedEmbeddingMethod()
        return None

    def _take(self, names: Iterable[str]) -> None:
        """Note the stored layers that have a place."""
        found = set(names)
        if found:
            config = get_current_vllm_config_or_none()
            if config is not None and config.lora_config is not None:
                hint = "Serve adapters by q4-transformers, or merge them into the checkpoint first."
                raise q4.ConfigError("vLLM's --quantization q4", name="LoRA", rule="off", value="on", hint=hint)
        self._placed |= found
        self._waiting |= found

    def finish(self, names: Iterable[str]) -> None:
        """Note stored layers that are prepared; after the last one log the report of this worker.

        Raises:
            SchemaError: The model had no place for some layer of the checkpoint.
        """
        config = get_current_vllm_config_or_none()
        is_split = config is not None and config.parallel_config.pipeline_parallel_size > 1
        if not is_split:  # each stage has some of the layers
            raise_unplaced(sorted(set(self._stored.values()) - self._placed), self.folder)
        self._waiting -= set(names)
        if not self._waiting:
            for layers in self._layers.values():
                layers.finish()
            report((layers.session for layers in self._layers.values()), logger)
            self.checkpoint.close()
            del self.checkpoint
