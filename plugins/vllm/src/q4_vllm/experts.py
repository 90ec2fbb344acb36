"""``Q4ExpertsMethod``: the experts of a layer, each of packed layers of its own, cut for a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

import q4core as q4
from q4_vllm.cuts import Cut, RankLayer, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from q4_vllm.config import Q4Config

__all__ = ["Q4ExpertsMethod", "parts_of_experts"]

_ALPHA, _LIMIT = 1.702, 7.0
"""gpt-oss's gate: ``(up + 1) * gate * sigmoid(alpha * gate)``, bounded by the limit."""


def _halves(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    def run(x: torch.Tensor, layer: Any) -> torch.Tensor:
        del layer
        gate, up = x.chunk(2, -1)
        return act(gate) * up

    return run


def _gpt_oss(x: torch.Tensor, layer: Any) -> torch.Tensor:
    limit, alpha = getattr(layer, "swiglu_limit", None) or _LIMIT, getattr(layer, "swiglu_alpha", None) or _ALPHA
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    MoEActivation.SILU: _halves(torch.nn.functional.silu),
    MoEActivation.GELU: _halves(torch.nn.functional.gelu),
    MoEActivation.GELU_TANH: _halves(lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    MoEActivation.SWIGLUOAI: _gpt_oss,
}


class Q4ExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]  # vLLM has no types here
    """Runs each expert that a token chose on its tokens, by packed products.

    Args:
        config: The model's.
        moe: vLLM's facts of the layer.
        parts: For each expert its stored layers: gate, up and down, or gate and up in one, and down.
        prefix: vLLM's name.

    Raises:
        ConfigError: Experts are spread over ranks, or have an activation that is not known here.
    """

    def __init__(self, config: Q4Config, moe: Any, parts: Sequence[tuple[str, ...]], prefix: str) -> None:
        super().__init__(moe)
        self.config, self.parts, self.prefix = config, parts, prefix
        if moe.moe_parallel_config.use_ep:
            hint = "Leave --enable-expert-parallel away: each rank then has a part of every expert."
            raise q4.ConfigError(f"experts {prefix!r}", name="expert parallelism", rule="off", value="on", hint=hint)
        if moe.activation not in _ACTIVATIONS:
            known = ", ".join(item.value for item in _ACTIVATIONS)
            raise q4.ConfigError(f"experts {prefix!r}", name="activation", rule=f"one of {known}", value=moe.activation)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Allocate biases where the model has them; weights are not vLLM's."""
        layer.q4_sizes = hidden_size, intermediate_size_per_partition, params_dtype
        if self.moe.has_bias:
            sizes = {"w13_bias": 2 * intermediate_size_per_partition, "w2_bias": hidden_size}
            for name, size in sizes.items():
                bias = torch.nn.Parameter(torch.zeros(num_experts, size, dtype=params_dtype), requires_grad=False)
                layer.register_parameter(name, bias)
                for key, value in attributes.items():
                    setattr(bias, key, value)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: no kernel of vLLM's runs."""
        del layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare this rank's part of each expert."""
        hidden, inner, dtype = layer.q4_sizes
        rank = self.moe.moe_parallel_config.tp_rank
        layers, checkpoint = self.config.layers(dtype), self.config.checkpoint
        experts: list[tuple[RankLayer, RankLayer]] = []
        for number, names in enumerate(self.parts):
            rows = inner * (2 if len(names) == 2 else 1)  # noqa: PLR2004  # gate and up in one, row by row
            ins = [Cut(name, range(rank * rows, (rank + 1) * rows), range(hidden)) for name in names[:-1]]
            outs = [Cut(names[-1], range(hidden), range(rank * inner, (rank + 1) * inner))]
            label = f"{self.prefix}.{number}"
            experts.append(
                (
                    prepare(ins, 2 * inner, checkpoint, layers, f"{label}.gate_up"),
                    prepare(outs, hidden, checkpoint, layers, f"{label}.down"),
                )
            )
        layer.__dict__["q4"] = experts
        self.config.finish(name for names in self.parts for name in names)

    def apply(  # noqa: PLR0913  # vLLM's signature
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, hidden]; of this rank's part of each."""
        del shared_experts, shared_experts_input  # vLLM's runner runs those
        y = torch.zeros_like(x)
        activate = _ACTIVATIONS[self.moe.activation]
        w13, w2 = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
        for expert in topk_ids.unique().tolist():
            tokens, place = torch.where(topk_ids == expert)
            weights = topk_weights[tokens, place, None].to(x.dtype)
            gate_up, down = layer.q4[expert]
            inputs = x[tokens] * weights if layer.apply_router_weight_on_input else x[tokens]
            inner = gate_up(inputs)
            part = down(activate(inner if w13 is None else inner + w13[expert], layer))
            if w2 is not None and self.moe.moe_parallel_config.tp_rank == 0:  # the ranks' results are summed
                part = part + w2[expert]
            y.index_add_(0, tokens, part if layer.apply_router_weight_on_input else part * weights)
        return y


def parts_of_experts(layer: Any, prefix: str, stored: Mapping[str, str]) -> list[tuple[str, ...]] | None:
    """Return the stored layers of each expert; None where the checkpoint has them dense.

    Args:
        layer: vLLM's, which has the names of its parts.
        prefix: vLLM's name.
        stored: vLLM's name → the checkpoint's.

    Raises:
        SchemaError: Some are missing.
    """
    names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
    count = layer.moe_config.num_experts
    if not any(name.startswith(f"{prefix}.") for name in stored):
        return None
    forms = [
        [tuple(f"{prefix}.{number}.{name}" for name in names) for number in range(count)],
        [tuple(f"{prefix}.{name}.{number}" for name in names) for number in range(count)],
        [tuple(f"{prefix}.{name}.{number}" for name in ("gate_up_proj", "down_proj")) for number in range(count)],
    ]
    missing = [[name for parts in form for name in parts if name not in stored] for form in forms]
    best = min(range(len(forms)), key=lambda index: len(missing[index]))
    if missing[best]:
        problems = [q4.Problem("missing_key", name, "packed, as other experts are") for name in missing[best]]
        raise q4.SchemaError(f"experts {prefix!r}", problems=problems)
    return [tuple(stored[name] for name in parts) for parts in forms[best]]
