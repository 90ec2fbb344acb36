"""Stand-ins for the parts of vLLM that q4-vllm builds on, with vLLM's signatures: ``nox -s vllm`` compares them.

A class has only what the plugin reads or overrides. ``MODULES`` says where vLLM has it.
"""

from __future__ import annotations

import enum
import importlib.machinery
import logging
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

__all__ = ["MODULES", "install", "moe_config", "parallel"]

QUANTIZATION_METHODS: list[str] = ["awq"]
QUANTIZATION: dict[str, type] = {}
RANKS = types.SimpleNamespace(rank=0, size=1)
"""What ``parallel`` sets."""
CURRENT = types.SimpleNamespace(
    lora_config=None, parallel_config=types.SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1)
)


def register_quantization_config(quantization: str) -> Any:
    """Return a decorator that adds a class."""

    def add(kind: type) -> type:
        QUANTIZATION_METHODS.append(quantization)
        QUANTIZATION[quantization] = kind
        return kind

    return add


def get_current_vllm_config_or_none() -> Any:
    """Return the configuration in use."""
    return CURRENT


def init_logger(name: str) -> logging.Logger:
    """Return a logger."""
    return logging.getLogger(name)


class QuantizeMethodBase:
    """How a layer is run."""

    def create_weights(self, layer: Any, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Allocate."""

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run."""

    def embedding(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Look up."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Share."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare."""


class QuantizationConfig:
    """A method of quantisation."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    def get_name(self) -> str:
        """Name."""
        raise NotImplementedError

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Types."""
        raise NotImplementedError

    @classmethod
    def get_min_capability(cls) -> int:
        """GPUs."""
        raise NotImplementedError

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Files."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make."""
        raise NotImplementedError

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        """Take over."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Choose."""
        raise NotImplementedError

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Drop."""

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename."""

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Look."""


class LinearMethodBase(QuantizeMethodBase):
    """How a linear layer is run."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate."""

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """Run."""


class UnquantizedLinearMethod(LinearMethodBase):
    """A dense layer."""


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    """A dense embedding."""


class FusedMoEMethodBase(QuantizeMethodBase):
    """How experts are run."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate."""

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Facts for kernels."""

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> Any:
        """Run."""


class MoEActivation(enum.Enum):
    """Activations of experts."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    RELU2 = "relu2"


class LinearBase(torch.nn.Module):
    """A linear layer of one rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, prefix: str = "") -> None:
        super().__init__()
        del bias
        self.input_size, self.output_size, self.prefix = input_size, output_size, prefix
        self.tp_rank, self.tp_size = RANKS.rank, RANKS.size
        self.bias = None


class ReplicatedLinear(LinearBase):
    """The whole of it on each rank."""

    def sizes(self) -> tuple[int, list[int]]:
        """In-features and out-features of this rank."""
        return self.input_size, [self.output_size]


class ColumnParallelLinear(LinearBase):
    """Cut by out-features."""

    def sizes(self) -> tuple[int, list[int]]:
        """In-features and out-features of this rank."""
        return self.input_size, [self.output_size // self.tp_size]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several, each cut by out-features."""

    def __init__(self, input_size: int, output_sizes: list[int], prefix: str = "") -> None:
        super().__init__(input_size, sum(output_sizes), prefix=prefix)
        self.output_sizes = output_sizes

    def sizes(self) -> tuple[int, list[int]]:
        """In-features and out-features of this rank."""
        return self.input_size, [size // self.tp_size for size in self.output_sizes]


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values, cut by heads; keys are there again where ranks outnumber their heads."""

    def __init__(
        self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int, prefix: str = ""
    ) -> None:
        super().__init__(hidden_size, 0, prefix=prefix)
        self.head_size = self.v_head_size = head_size
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, total_num_kv_heads
        self.num_heads = total_num_heads // self.tp_size
        self.num_kv_heads = max(1, total_num_kv_heads // self.tp_size)
        self.num_kv_head_replicas = max(1, self.tp_size // total_num_kv_heads)
        self.output_sizes = [
            count * head_size * self.tp_size for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        ]
        self.output_size = sum(self.output_sizes)

    def sizes(self) -> tuple[int, list[int]]:
        """In-features and out-features of this rank."""
        return self.input_size, [size // self.tp_size for size in self.output_sizes]


class RowParallelLinear(LinearBase):
    """Cut by in-features; results of ranks are summed."""

    def sizes(self) -> tuple[int, list[int]]:
        """In-features and out-features of this rank."""
        return self.input_size // self.tp_size, [self.output_size]


class VocabParallelEmbedding(torch.nn.Module):
    """Cut by words, of which there are more than the model has."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_size: int = 64, prefix: str = "") -> None:
        super().__init__()
        self.prefix, self.tp_size, self.input_size = prefix, RANKS.size, embedding_dim
        padded = -(-num_embeddings // padding_size) * padding_size
        self.num_embeddings_per_partition = padded // RANKS.size
        first = RANKS.rank * self.num_embeddings_per_partition
        self.shard_indices = types.SimpleNamespace(
            org_vocab_start_index=min(first, num_embeddings),
            org_vocab_end_index=min(first + self.num_embeddings_per_partition, num_embeddings),
        )

    def sizes(self) -> tuple[int, list[int]]:
        """In-features and out-features of this rank."""
        return self.input_size, [self.num_embeddings_per_partition]


class ParallelLMHead(VocabParallelEmbedding):
    """The output head."""


class RoutedExperts(torch.nn.Module):
    """Experts of a layer."""

    def __init__(self, moe_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.moe_config, self.prefix = moe_config, prefix
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
        self.apply_router_weight_on_input = False


class WeightsMapper:
    """Names of tensors → names of the model; None drops one."""

    def __init__(
        self,
        orig_to_new_regex: dict[Any, str | None] | None = None,
        orig_to_new_substr: dict[str, str | None] | None = None,
        orig_to_new_prefix: dict[str, str | None] | None = None,
    ) -> None:
        self.orig_to_new_regex = orig_to_new_regex or {}
        self.orig_to_new_substr = orig_to_new_substr or {}
        self.orig_to_new_prefix = orig_to_new_prefix or {}

    def map_name(self, key: str) -> str | None:
        """Return the new key."""
        for pattern, new in self.orig_to_new_regex.items():
            if pattern.search(key):
                if new is None:
                    return None
                key = pattern.sub(new, key)
        for old, new in self.orig_to_new_substr.items():
            key = key.replace(old, new or "")
        for old, new in self.orig_to_new_prefix.items():
            if key.startswith(old):
                key = (new or "") + key.removeprefix(old)
        return key


class Llama:
    """A class of a model."""

    packed_modules_mapping = {  # noqa: RUF012  # as vLLM's
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }


class Platform:
    """A device."""

    device_name = "cpu"

    def is_cpu(self) -> bool:
        """Whether it is a CPU."""
        return self.device_name == "cpu"


class Registered:
    """An entry of the registry."""

    def load_model_cls(self) -> type:
        """Return the class."""
        return Llama


ModelRegistry = types.SimpleNamespace(models={"LlamaForCausalLM": Registered()})
current_platform = Platform()
_LAYERS = "vllm.model_executor.layers"
MODULES: dict[str, list[Any]] = {
    "vllm.config": [get_current_vllm_config_or_none],
    "vllm.logger": [init_logger],
    f"{_LAYERS}.fused_moe": [RoutedExperts],
    f"{_LAYERS}.fused_moe.activation": [MoEActivation],
    f"{_LAYERS}.fused_moe.fused_moe_method_base": [FusedMoEMethodBase],
    f"{_LAYERS}.linear": [
        LinearBase,
        LinearMethodBase,
        QKVParallelLinear,
        RowParallelLinear,
        UnquantizedLinearMethod,
    ],
    f"{_LAYERS}.quantization": [register_quantization_config],
    f"{_LAYERS}.quantization.base_config": [QuantizationConfig, QuantizeMethodBase],
    f"{_LAYERS}.vocab_parallel_embedding": [ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding],
    "vllm.model_executor.models.utils": [WeightsMapper],
}
_VALUES: dict[str, dict[str, Any]] = {
    f"{_LAYERS}.quantization": {"QUANTIZATION_METHODS": QUANTIZATION_METHODS},
    "vllm.model_executor.models.registry": {"ModelRegistry": ModelRegistry},
    "vllm.platforms": {"current_platform": current_platform},
}


def install() -> None:
    """Put the stand-ins where vLLM's modules would be."""
    contents: dict[str, dict[str, Any]] = {
        name: {item.__name__: item for item in items} for name, items in MODULES.items()
    }
    for name, values in _VALUES.items():
        contents.setdefault(name, {}).update(values)
    for name, items in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            module = sys.modules.setdefault(path, types.ModuleType(path))
            module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(path, None)
        vars(sys.modules[name]).update(items)


def parallel(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Make layers from now on those of one rank."""
    monkeypatch.setattr(RANKS, "rank", rank)
    monkeypatch.setattr(RANKS, "size", size)


def moe_config(experts: int, *, has_bias: bool = False, activation: Any = MoEActivation.SILU) -> Any:
    """Return vLLM's facts of a layer of experts."""
    ranks = types.SimpleNamespace(tp_rank=RANKS.rank, tp_size=RANKS.size, use_ep=False)
    return types.SimpleNamespace(
        num_experts=experts, moe_parallel_config=ranks, activation=activation, has_bias=has_bias
    )
