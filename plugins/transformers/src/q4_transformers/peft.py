"""Adapters of PEFT on packed layers: preparation before they are trained, and merging.

PEFT's own LoRA and DoRA layers run on an ``HfLinear`` as on any ``nn.Linear``. Its ``merge_and_unload`` would add to a
dense weight in place; a packed one raises an error, and ``merge`` here says what is lost, if anything is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

import q4core as q4
from q4_transformers.dense import dense_layer, forget_quantizer, make_dense
from q4_transformers.experts import has_experts, without_experts
from q4_transformers.linear import HfLinear
from q4core import ConfigError
from q4core.plugin_api import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4core import PackedWeight

__all__ = ["MergeReport", "MergedLayer", "keep_names_of_experts", "merge", "prepare_for_training"]


@attrs.frozen(kw_only=True)
class MergedLayer:
    """The change of a merged layer by quantising it again.

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
        return "\n".join([*lines, f"{counted(len(self.layers), 'layer')} quantised again"])


def keep_names_of_experts() -> None:
    """Make PEFT use a model's own layers where each expert has some; where PEFT is not installed, do nothing.

    PEFT knows by ``model_type`` that transformers merges Mixtral's and Qwen-MoE's experts into one parameter. It makes
    targets like ``w1`` into that parameter's name, and merges the adapters of a file to one for it. In a model with a
    ``Q4Experts`` there is no such parameter: experts would get no adapter, or lose it when it is loaded.
    """
    try:
        from peft.utils import transformers_weight_conversion as by_peft  # noqa: PLC0415  # a second, if it is there
    except ImportError:
        return
    from transformers.integrations import peft as by_transformers  # noqa: PLC0415  # as above

    for module in (by_peft, by_transformers):  # the first has both, the second what its release needs
        _wrap(module, "convert_peft_config_for_transformers", _without_config)
        _wrap(module, "get_model_conversion_mapping", _without_mapping)


def _wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(module, name, None)
    if original is not None and getattr(original, "func", None) is not wrapper:
        setattr(module, name, functools.partial(wrapper, original))


def _without_config(original: Callable[..., Any], peft_config: Any, model: Any, *args: Any, **options: Any) -> Any:
    """Leave the targets as they are for a model with experts of ours; return what transformers 5.0 asks for.

    Raises:
        ConfigError: They name the merged parameters.
    """
    if not has_experts(model):
        return original(peft_config, model, *args, **options)
    names = [name for name, _ in model.named_parameters()]
    for target in sorted(getattr(peft_config, "target_parameters", None) or ()):
        if not any(f".{name}".endswith(f".{target}") for name in names):
            rule = "parameters of the model, in which each expert has layers of its own"
            hint = "Name the layers in target_modules, or use 'all-linear'; adapters of merged experts do not fit."
            raise ConfigError("LoRA", name="target_parameters", rule=rule, value=target, hint=hint)
    return peft_config


def _without_mapping(original: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    found = original(model, *args, **options)
    return without_experts(found) if has_experts(model) else found


def prepare_for_training(model: Any) -> Any:
    """Freeze a model, cast its norms to float32 and checkpoint its activations, as adapters are trained.

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
        exact: Make every packed layer dense, in its own dtype, and experts transformers' own again. Nothing is lost but
            the last rounding to that dtype.
        requantize: Quantise each layer that has an adapter again, in the format and the block size that it had; the
            report says what that changed.

    Returns:
        The model without adapters, and the report.

    Raises:
        ConfigError: Not just one of the two is asked for, or the model has no adapters of PEFT, or others than LoRA's.
    """
    import peft  # noqa: PLC0415  # as above
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    if exact is requantize:
        hint = "exact=True gives a dense model; requantize=True a packed one, and a report of what is lost."
        value = f"exact={exact}, requantize={requantize}"
        raise ConfigError("merge", name="exact, requantize", rule="one True and one False", value=value, hint=hint)
    kinds = (
        [config.peft_type.value for config in model.peft_config.values()] if isinstance(model, peft.PeftModel) else []
    )
    if set(kinds) != {"LORA"}:
        rule, value = "a PeftModel with adapters of LoRA or DoRA alone", ", ".join(kinds) or type(model).__name__
        raise ConfigError("merge", name="model", rule=rule, value=value)
    rows = []
    layers = [(name, module) for name, module in model.get_base_model().named_modules()]
    for name, module in layers:
        if isinstance(module, LoraLayer):
            packed = module.base_layer
            if isinstance(packed, HfLinear):
                module.base_layer = dense_layer(packed, torch.float32)
            module.merge(safe_merge=True)  # by PEFT itself, on the dequantised weight
            if isinstance(packed, HfLinear) and requantize:
                rows.append(_requantise(name, packed, module.base_layer))
                module.base_layer = packed
            elif isinstance(packed, HfLinear):
                module.base_layer.to(packed.dtype)
    plain = model.unload()
    if exact:
        make_dense(plain)
        forget_quantizer(plain)
    return plain, MergeReport(tuple(rows))


def _quantised_as(base: PackedWeight, merged: torch.Tensor) -> PackedWeight:
    """Return a dense weight in the format, block size and scale kind of another one."""
    options: dict[str, Any] = {"block_size": base.block_size, "scale_kind": base.scale_kind}
    if base.format.form is q4.BUILTIN_FORMATS["int4"].form:
        options["symmetric"] = base.zero is None
    weight = q4.quantize(merged, base.format, name=base.name, **options)
    return weight.relabelled(dtype=base.dtype)


def _requantise(name: str, packed: HfLinear, dense: nn.Linear) -> MergedLayer:
    """Replace a packed layer's weight by a dense one's, and return what that loses."""
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
