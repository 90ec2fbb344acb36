"""``Q4Experts``: the experts of a layer as linear layers of their own, which may be packed ones.

transformers has the experts of a layer in parameters of three dimensions, which no packed layer can replace. A
``Q4Experts`` takes the place of such a module: each expert has its own linear layers, named as the checkpoint names
them, ``experts.0.gate_proj`` or ``experts.gate_up_proj.0``.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

from q4core import PackedWeightError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from q4_transformers.names import Names

__all__ = [
    "GPT_OSS",
    "Q4Experts",
    "are_experts",
    "drop_conversions",
    "has_experts",
    "is_fused",
    "is_stacked",
    "merged_experts",
    "place_experts",
    "with_stacked_experts",
    "without_experts",
]

_EACH = re.compile(r"(?P<holder>.+)\.(?P<leaf>\d+\.(?P<part>w[123]|gate_proj|up_proj|down_proj|gate_up_proj))")
_FUSED = re.compile(r"(?P<holder>.+)\.(?P<leaf>(?P<part>gate_up_proj|gate_proj|up_proj|down_proj)\.\d+)")
_STACKED = re.compile(r"(.+\.experts\.\w+)\.(\d+)(_blocks|_scales)")
_DOWN = "down_proj"
GPT_OSS = "gpt-oss-mxfp4"
"""The dialect that has a layer's experts in one tensor."""
_RANK, _ARGUMENTS = 3, 4


class Q4Experts(nn.Module):
    """Experts with linear layers of their own, which replace a module that transformers builds.

    It computes what that module does, with the model's own activation and its biases: each token's sum over its experts
    of weight times ``down(gated(gate_up(x)))``. Experts without a token are not run.

    Args:
        experts: The module of transformers, on the meta device: with ``down_proj`` and ``gate_up_proj`` or ``up_proj``.
        parts: Names of the layers of each expert: gate and up (or both in one, or up alone), then down.
        fused: Whether the checkpoint numbers experts below the parts (``gate_up_proj.0``), not above (``0.gate_proj``).

    Raises:
        ValueError: The parts are not those of such experts.
    """

    act_fn: Any

    def __init__(self, experts: nn.Module, parts: tuple[str, ...], *, fused: bool) -> None:
        super().__init__()
        self.kind, self.parts, self.fused = type(experts), parts, fused
        self._own = (experts,)  # no child of this module; on the meta device it takes nothing
        self._take(experts)
        for name, item in experts.named_parameters(recurse=False):
            if item.dim() == _RANK and not (fused and name in parts):
                setattr(self, name, _Split(name))
        weights: Any = experts
        self.has_gate = "gate_up_proj" in dict(experts.named_parameters())
        self.is_transposed = getattr(experts, "is_transposed", False)
        count, hidden, inner = weights.down_proj.shape
        if self.is_transposed:
            hidden, inner = inner, hidden
        self.num_experts = count
        if len(parts) not in ((2, 3) if self.has_gate else (2,)):
            raise ValueError(f"parts must be 2, or 3 with a gate by itself, got {parts}")
        wide = inner * 2 if self.has_gate and len(parts) == 2 else inner  # noqa: PLR2004  # gate and up in one
        sizes = [(hidden, wide)] * (len(parts) - 1) + [(inner, hidden)]
        for outer in parts if fused else map(str, range(count)):
            self.add_module(outer, nn.Module())
            self._modules[outer].__dict__["_is_hf_initialized"] = True  # as for ``_Split``
        for name, size in zip(parts, sizes, strict=True):
            for index in range(count):
                holder, leaf = (name, str(index)) if fused else (str(index), name)
                linear = nn.Linear(*size, bias=False, device="meta", dtype=weights.down_proj.dtype)
                self.get_submodule(holder).add_module(leaf, linear)

    def _take(self, experts: nn.Module) -> None:
        """Copy all but the weights: biases, the activation with its numbers, and what else its gate needs."""
        plain = {name: value for name, value in vars(experts).items() if not name.startswith("_")}
        biases = {name: item for name, item in experts.named_parameters(recurse=False) if name.endswith("_bias")}
        for name, value in {**plain, **dict(experts.named_children()), **biases}.items():
            setattr(self, name, value)

    def leaf(self, part: str, expert: int) -> Any:
        """Return one linear layer of an expert."""
        return self.get_submodule(f"{part}.{expert}" if self.fused else f"{expert}.{part}")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: [T, hidden], float.
            top_k_index: [T, k] integer: each token's experts; a number past the last one means none.
            top_k_weights: [T, k] float: the weight of each; or [T, E], of every expert (Phi-MoE of transformers 5.0).

        Returns:
            [T, hidden], in the dtype of ``hidden_states``.
        """
        if top_k_weights.shape != top_k_index.shape:
            top_k_weights = top_k_weights.gather(1, top_k_index.clamp(max=self.num_experts - 1))
        y = torch.zeros_like(hidden_states)
        if torch.compiler.is_compiling():  # in a graph, which tokens an expert has is not known: it runs on all
            for expert in range(self.num_experts):
                weight = torch.where(top_k_index == expert, top_k_weights, 0).sum(-1, keepdim=True)
                y = y + (self._expert(expert, hidden_states) * weight).to(y.dtype)
            return y
        for expert in top_k_index.unique().tolist():
            if expert < self.num_experts:
                tokens, place = torch.where(top_k_index == expert)
                part = self._expert(expert, hidden_states[tokens]) * top_k_weights[tokens, place, None]
                y.index_add_(0, tokens, part.to(y.dtype))
        return y

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        *ins, down = (self.leaf(part, expert) for part in self.parts)
        outs = [layer(x) for layer in ins]
        if len(outs) == 1:
            inner = outs[0]
        elif getattr(self, "is_concatenated", True):
            inner = torch.cat(outs, -1)
        else:
            inner = torch.stack(outs, -1).flatten(-2)
        inner = self._with_bias(inner, "gate_up_proj_bias" if self.has_gate else "up_proj_bias", expert)
        if not self.has_gate:
            inner = self.act_fn(inner)
        elif hasattr(self.kind, "_apply_gate"):
            inner = self.kind._apply_gate(self, inner)  # noqa: SLF001  # transformers' own hook, for any module
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.act_fn(gate) * up
        return self._with_bias(down(inner), f"{_DOWN}_bias", expert)

    def _with_bias(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        bias = getattr(self, name, None)
        return x if bias is None else x + bias[expert]


class _Split:
    """A placeholder of a merged parameter, for which transformers draws nothing at random (Qwen3-Omni's blocks do)."""

    _is_hf_initialized = True

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        """Refuse what a tensor would answer."""
        if name.startswith("__"):
            raise AttributeError(name)
        hint = "Quantise with modules_to_not_convert=['experts'], which leaves them dense."
        raise PackedWeightError(f"experts with layers of their own have no {self.name}, and so no {name!r}", hint=hint)


def merged_experts(experts: Q4Experts) -> nn.Module:
    """Return transformers' own module with the weights of a ``Q4Experts``, all of whose layers are dense by now."""
    (module,) = experts._own  # noqa: SLF001  # as it came
    *ins, down = (
        torch.stack([experts.leaf(part, expert).weight.detach() for expert in range(experts.num_experts)])
        for part in experts.parts
    )
    wide = ins[0]
    if len(ins) > 1 and getattr(experts, "is_concatenated", True):
        wide = torch.cat(ins, 1)
    elif len(ins) > 1:
        wide = torch.stack(ins, 2).flatten(1, 2)
    filled = {"gate_up_proj" if experts.has_gate else "up_proj": wide, _DOWN: down}
    for name, weight in filled.items():
        turned = weight.transpose(1, 2).contiguous() if experts.is_transposed else weight
        module.register_parameter(name, nn.Parameter(turned, requires_grad=False))
    for name, bias in experts.named_parameters(recurse=False):
        module.register_parameter(name, bias)
    return module.train(experts.training)


def place_experts(
    model: Any, stored: Iterable[str], names: Names, skipped: Collection[str] = (), *, is_dense: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Replace each experts module that layers of the checkpoint belong to by a ``Q4Experts``.

    Args:
        model: The model, on the meta device.
        stored: Names of layers of the checkpoint, ``….experts.0.w1`` or ``….experts.down_proj.0``; others are ignored.
        names: What transformers makes of the checkpoint's names.
        skipped: Paths of modules to leave as they are.
        is_dense: Whether the checkpoint is. A module is left as it is, too, where a part has no names of that kind
            (Inkling's files have gate and up interleaved).

    Returns:
        Stored name → path of its linear layer in the model; and the paths of those that no stored name fills.
    """
    found: dict[str, dict[str, str]] = {}
    modules = dict(model.named_modules())
    for name in stored:
        hit = _FUSED.fullmatch(name) or _EACH.fullmatch(name)
        # a release may rename the holder, or only what it merges
        keys = (f"{hit['holder']}.{_DOWN}", f"{name}.weight") if hit else ()
        path = next((path for path in map(names.holder, keys) if path in modules), "")
        if hit and path not in skipped and are_experts(modules[path]):
            found.setdefault(path, {})[hit["leaf"]] = name
    places: dict[str, str] = {}
    missing: list[str] = []
    for path, leaves in found.items():
        fused = not next(iter(leaves))[0].isdigit()
        own = {leaf.split(".")[0 if fused else 1] for leaf in leaves}
        has_gate = "gate_up_proj" in dict(modules[path].named_parameters())
        parts = _parts(own, has_gate=has_gate)
        if is_dense and {*parts} - own:
            continue
        experts = Q4Experts(modules[path], parts, fused=fused)
        model.set_submodule(path, experts)
        legal = {name for name, module in experts.named_modules() if isinstance(module, nn.Linear)}
        places |= {name: f"{path}.{leaf}" for leaf, name in leaves.items() if leaf in legal}
        missing += [f"{path}.{leaf}" for leaf in sorted(legal - leaves.keys())]
    return places, missing


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has a ``Q4Experts``."""
    return any(isinstance(module, Q4Experts) for module in model.modules())


def without_experts(conversions: Iterable[Any]) -> list[Any]:
    """Return transformers' conversions of names and tensors, without those that merge experts or rename their parts."""
    return [item for item in conversions if not any(map(_is_of_experts, item.target_patterns))]


def _is_of_experts(pattern: str) -> bool:
    return "experts" in pattern and is_fused(pattern.rstrip("$"))


def drop_conversions(model: Any) -> None:
    """Make transformers split no merged experts as it saves a model in which each has layers of its own."""
    if has_experts(model):
        conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
        model._weight_conversions = without_experts(conversions)  # noqa: SLF001  # where transformers stores them


def is_fused(name: str) -> bool:
    """Return whether a tensor of that name has all experts of one part."""
    return _FUSED.fullmatch(f"{name}.0") is not None


def is_stacked(stored: str) -> bool:
    """Return whether a layer of that name in a checkpoint is one of gpt-oss's experts, which are stacked."""
    hit = _FUSED.fullmatch(stored)
    return hit is not None and hit["holder"].endswith(".experts")


def with_stacked_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state in which the blocks and scales of gpt-oss's experts are one tensor each, ``[E, …]``."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    others: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        hit = _STACKED.fullmatch(key)
        if hit:
            stacks.setdefault(hit[1] + hit[3], {})[int(hit[2])] = tensor
        else:
            others[key] = tensor
    return others | {key: torch.stack([found[index] for index in sorted(found)]) for key, found in stacks.items()}


def are_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts in parameters of 3 dimensions, and is called with each token's choice."""
    own = dict(module.named_parameters(recurse=False))
    down = own.get(_DOWN)
    return (
        down is not None
        and down.dim() == _RANK
        and ("gate_up_proj" in own or "up_proj" in own)
        and len(inspect.signature(type(module).forward).parameters) == _ARGUMENTS
        and not getattr(module, "has_post_expert_norm", False)
    )


def _parts(own: set[str], *, has_gate: bool) -> tuple[str, ...]:
    """Return the names of an expert's layers, in order, given those that the checkpoint has."""
    if own & {"w1", "w2", "w3"}:
        return ("w1", "w3", "w2") if has_gate else ("w1", "w2")
    if not has_gate:
        return ("up_proj", _DOWN)
    return ("gate_up_proj", _DOWN) if "gate_up_proj" in own else ("gate_proj", "up_proj", _DOWN)
