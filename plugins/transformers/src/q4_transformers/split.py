"""``SplitLinear``: this process's part of a packed layer of a tensor-parallel model.

transformers' hooks around a linear layer bring it this process's part of x and its part of the bias, gather y or add
it up. So the layer has the sizes of the whole one, and computes by whole blocks that cover its part.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_transformers.experts import Q4Experts
from q4_transformers.linear import HfLinear, callers
from q4core import ConfigError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from q4_transformers.parallelism import Ranks
    from q4core import PackedWeight, SessionConfig

__all__ = ["SplitLinear", "split_style"]

_ROWS = ("colwise", "colwise_gather_output", "colwise_rep")
_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input")
_WHOLE = ("replicate", "replicated_with_grad_allreduce")
_EXPERTS = "moe_tp_experts"
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class SplitLinear(nn.Linear):
    """Part of a packed layer: N by rows of the weight, or K by its columns, for one process.

    Args:
        rows: N of the whole layer.
        columns: K of the whole layer.
        bias: [N] or None; transformers' hooks split it, or add it once.
        style: transformers' name for how the layer is split.
        ranks: The processes.
        dtype: dtype of the activations; None for torch's default.
        config: What to ask for.
        name: The layer's name in the model.
    """

    stored_name: str | None = None
    dialect: str | None = None
    is_transposed = False
    is_read = False

    def __init__(  # noqa: PLR0913  # facts of a layer
        self,
        rows: int,
        columns: int,
        bias: nn.Parameter | None,
        *,
        style: str,
        ranks: Ranks,
        dtype: torch.dtype | None,
        config: SessionConfig,
        name: str,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features, self.name = rows, columns, name
        self.register_parameter("bias", bias)
        self._hf_quantized_needs_local_tp = True  # transformers' mark: parts, not distributed tensors
        self.rows = ranks.part(rows) if style in _ROWS else range(rows)
        self.columns = ranks.part(columns) if style in _COLUMNS else range(columns)
        self.local: Any = None
        self.pad, self.cut = (0, 0), slice(None)
        self._options: Any = {"dtype": dtype, "config": config, "name": name}
        self._read: Callable[[], PackedWeight] | None = None

    @property
    def weight(self) -> Any:  # type: ignore[override]  # as for HfLinear
        """Facts of this process's part, as ``HfLinear.weight``.

        Raises:
            LifecycleError: It is not loaded yet.
            ConfigError: PEFT asks for it, which would put an adapter of the whole layer on a part.
        """
        if self.local is None:
            raise LifecycleError(f"layer {self.name!r} has no weight yet")
        if any(module.startswith("peft.tuners.") for module, _ in callers()):
            rule, hint = "one whose layers are whole", "Train in one process, or a dense model that is split."
            raise ConfigError("an adapter of PEFT", name="model", rule=rule, value=f"a part of {self.name}", hint=hint)
        return self.local.weight

    def adopt(self, weight: PackedWeight, read: Callable[[], PackedWeight]) -> None:
        """Prepare this process's part.

        Args:
            weight: The whole layer's.
            read: Returns it again, for saving.

        Raises:
            WeightError: Its in-features can't be cut.
        """
        cover = weight.cover(rows=self.rows, columns=self.columns)
        self.local = HfLinear.empty(*cover.weight.shape, **self._options).adopt(cover.weight)
        self.pad, self.cut, self._read = cover.pad, cover.cut, read

    def packed_weight(self) -> PackedWeight:
        """Return the whole layer's weight, read again from where the model came from.

        Raises:
            LifecycleError: It is not loaded yet.
        """
        if self._read is None:
            raise LifecycleError(f"layer {self.name!r} has no weight yet")
        return self._read()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's part of y, or its summand: ``x @ wᵀ + bias``, with what the hooks left of the bias."""
        y: torch.Tensor = self.local(nn.functional.pad(x, self.pad) if any(self.pad) else x)[..., self.cut]
        return y if self.bias is None else y + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  # nn.Module's signature
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


def split_style(model: Any, path: str, plan: Mapping[str, str]) -> str | None:
    """Return how a packed layer is split by a model's plan; None where each process has all of it.

    Args:
        model: The model.
        path: The layer's.
        plan: transformers' plan, with ``*`` for numbers.

    Raises:
        ConfigError: It is split in a way that packed layers can't follow.
    """
    holder = next((parent for parent in _parents(path) if isinstance(model.get_submodule(parent), Q4Experts)), None)
    style = plan.get(_NUMBER.sub(".*", path if holder is None else holder))
    if style is None or style in _WHOLE:
        return None
    if holder is not None:
        experts = model.get_submodule(holder)
        own = list(experts.parameters(recurse=False))
        if style == _EXPERTS and experts.has_gate and not experts.fused and len(experts.parts) == 3 and not own:  # noqa: PLR2004  # gate, up, down
            return "rowwise" if path.rpartition(".")[2] == experts.parts[-1] else "colwise"
    elif style in (*_ROWS, *_COLUMNS):
        return style
    rule = f"one of {', '.join((*_ROWS, *_COLUMNS))}, or experts with gate, up and down of their own"
    hint = "Leave tp_plan away: each process then loads the whole model. Or load a dense one."
    raise ConfigError("from_pretrained", name=f"tp_plan of {path!r}", rule=rule, value=style, hint=hint)


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
