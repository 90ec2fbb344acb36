"""Adapters of PEFT on packed layers: what to do before they are trained, and how they are merged.

PEFT's own LoRA and DoRA layers run on an ``HfLinear`` as on any ``nn.Linear``. Its ``merge_and_unload`` would add to a
dense weight in place; a packed one refuses that, and ``merge`` here says what is lost, if anything is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

import q4core as q4
from q4_transformers.linear import HfLinear
from q4core import ConfigError

if TYPE_CHECKING:
    from q4core import PackedWeight

__all__ = ["MergeReport", "MergedLayer", "merge", "prepare_for_training"]


@attrs.frozen(kw_only=True)
class MergedLayer:
    """What quantising a merged layer again changed.

    Args:
        name: The layer's name in the model.
        format: Its format.
        error: ``‖stored - merged‖ / ‖merged‖`` over the weight (Frobenius): 0 is exact.
        change_error: The same difference over what the adapter had changed, ``‖merged - base‖``: above 1, more is lost
            than the adapter brought. 0 where it changed nothing.
    """

    name: str
    format: str
    error: float
    change_error: float


@attrs.frozen
class MergeReport:
    """Every layer that was quantised again, in the model's order; empty after an exact merge. Printed, a table."""

    layers: tuple[MergedLayer, ...] = ()

    def __str__(self) -> str:
        """Return the table as text."""
        width = max([len(layer.name) for layer in self.layers], default=0)
        lines = [
            f"{row.name:<{width}}  {row.format}  {row.error:8.2%} of the weight, {row.change_error:8.1%} of the change"
            for row in self.layers
        ]
        return "\n".join([*lines, f"{len(self.layers)} layers were quantised again"])


def prepare_for_training(model: Any) -> Any:
    """Freeze a model, keep its norms in float32 and checkpoint its activations, as adapters are trained.

    It is PEFT's ``prepare_model_for_kbit_training``, with what that leaves out for a model that is packed here.

    Args:
        model: A model of transformers, before ``get_peft_model``.

    Returns:
        The model.
    """
    import peft  # noqa: PLC0415  # only who trains has it

    model = peft.prepare_model_for_kbit_training(model)
    newer = getattr(model, "activation_checkpointing_enable", None)  # the older name warns where there is this one
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def merge(model: Any, *, exact: bool = False, requantize: bool = False) -> tuple[Any, MergeReport]:
    """Merge the active adapters into a model, on the base that they were trained on: the dequantised weights.

    Args:
        model: A ``PeftModel``. It is used up.
        exact: Make every packed layer dense, in its own dtype. Nothing is lost but the last rounding to that dtype.
        requantize: Quantise each layer that has an adapter again, in the format and the block size that it had; the
            report says what that changed.

    Returns:
        The model without adapters, and the report.

    Raises:
        ConfigError: Not just one of the two is asked for, or the model has no adapters of PEFT.
    """
    import peft  # noqa: PLC0415  # as above
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    if exact is requantize:
        hint = "exact=True gives a dense model; requantize=True a packed one, and a report of what is lost."
        value = f"exact={exact}, requantize={requantize}"
        raise ConfigError("merge", name="exact, requantize", rule="one True and one False", value=value, hint=hint)
    if not isinstance(model, peft.PeftModel):
        raise ConfigError("merge", name="model", rule="a PeftModel", value=type(model).__name__)
    rows = []
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            packed = module.base_layer
            if isinstance(packed, HfLinear):
                module.base_layer = _dense(packed, torch.float32)
            module.merge(safe_merge=True)  # by PEFT itself, on the dequantised weight
            if isinstance(packed, HfLinear) and requantize:
                rows.append(_requantise(name, packed, module.base_layer))
                module.base_layer = packed
            elif isinstance(packed, HfLinear):
                module.base_layer.to(packed.dtype)
    plain = model.unload()
    if exact:
        _make_dense(plain)
    return plain, MergeReport(tuple(rows))


def _dense(packed: HfLinear, dtype: torch.dtype) -> nn.Linear:
    """Return a packed layer with its weight dequantised."""
    linear = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
    linear.weight = nn.Parameter(q4.dequantize(packed.packed_weight(), dtype), requires_grad=False)
    if packed.bias is not None:
        linear.bias = nn.Parameter(packed.bias.detach().to(dtype, copy=True), requires_grad=False)
    return linear


def _quantised_as(base: PackedWeight, merged: torch.Tensor) -> PackedWeight:
    """Return a dense weight in the format, block size and scale kind of another one."""
    options: dict[str, Any] = {"block_size": base.block_size, "scale_kind": base.scale_kind}
    if base.format.form is q4.BUILTIN_FORMATS["int4"].form:
        options["symmetric"] = base.zero is None
    weight = q4.quantize(merged, base.format, name=base.name, **options)
    return weight.relabelled(dtype=base.dtype)


def _requantise(name: str, packed: HfLinear, dense: nn.Linear) -> MergedLayer:
    """Let a packed layer adopt a dense one's weight, and return what that loses."""
    base, merged = packed.packed_weight(), dense.weight.detach()
    weight = _quantised_as(base, merged)
    lost = float((q4.dequantize(weight, torch.float32) - merged).norm())
    change = float((merged - q4.dequantize(base, torch.float32)).norm())
    size = float(merged.norm())
    packed.adopt(weight)
    if packed.bias is not None:
        packed.bias.data = dense.bias.detach().to(packed.dtype)
    return MergedLayer(
        name=name,
        format=base.format.name,
        error=lost / size if size else 0.0,
        change_error=lost / change if change else 0.0,
    )


def _make_dense(model: Any) -> None:
    """Make every packed layer dense, and let transformers take the model for one that always was."""
    for name, module in list(model.named_modules()):
        if isinstance(module, HfLinear):
            model.set_submodule(name, _dense(module, module.dtype))
    model.hf_quantizer = None
    model.is_quantized = False
    for holder in (model, model.config):
        for name in ("quantization_method", "quantization_config"):
            if hasattr(holder, name):
                delattr(holder, name)
