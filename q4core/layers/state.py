"""State of ``Q4Linear``: state dicts, as its docstring describes them, and tensors shared with other processes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.diagnostics.events import emit
from q4core.errors import LifecycleError, WeightError
from q4core.memory import provider_of
from q4core.ops.prepared_weight import LayerWeight, PreparedWeight
from q4core.weight import PackedWeight, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4core.formats import Format

STATE = "weight."
_SPEC = "weight.spec"


# -- state dicts


def weight_entries(weight: PackedWeight, prefix: str) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict for a weight."""
    text = WeightSpec.of(weight).to_json()
    spec = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return {prefix + _SPEC: spec, **{f"{prefix}{STATE}{field}": tensor for field, tensor in weight.tensors()}}


def weight_of_entries(  # noqa: PLR0913  # one argument per fact
    own: Mapping[str, Any],
    prefix: str,
    missing_keys: list[str],
    unexpected_keys: list[str],
    *,
    shape: tuple[int, int],
    device: torch.device | None,
    formats: Iterable[Format],
) -> PackedWeight | None:
    """Return a state dict's weight in tensors of its own, on a device, or where they are.

    Keys that are missing, or should not be there, are added to the lists; None is returned where one is missing.

    Raises:
        WeightError: The spec or a tensor is not legal, or is that of a layer of another shape.
    """
    key = prefix + _SPEC
    if key not in own:
        missing_keys.append(key)
        unexpected_keys.extend(own)
        return None
    stored = _checked(key, own[key], needs_data=True)
    if stored.dtype != torch.uint8:
        raise WeightError("load_state_dict", name=key, rule="of dtype uint8", value=stored.dtype)
    text = bytes(stored.cpu().reshape(-1).tolist()).decode("utf-8", errors="replace")
    spec = WeightSpec.from_json(text, formats=formats, where=key)
    if (spec.out_features, spec.in_features) != shape:
        rule = f"that of a {shape[0]}×{shape[1]} weight"
        got = f"{spec.out_features}×{spec.in_features}"
        raise WeightError("load_state_dict", name=key, rule=rule, value=got)
    fields = [f"{prefix}{STATE}{field}" for field in spec.fields]
    absent = [field for field in fields if field not in own]
    missing_keys.extend(absent)
    unexpected_keys.extend(field for field in own if field not in {key, *fields})
    if absent:
        return None
    tensors = [_checked(field, own[field], needs_data=device is not None).detach() for field in fields]
    # Copies: a caller's later writes to the state dict must not reach the layer.
    copies = [tensor.to(device or tensor.device).clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return spec.build(copies, name=prefix.rstrip(".") or None)


def _checked(key: str, value: object, *, needs_data: bool) -> torch.Tensor:
    """Return an entry, once it is known to be a strided tensor, with data where that is needed."""
    if not isinstance(value, torch.Tensor):
        raise WeightError("load_state_dict", name=key, rule="a tensor", value=value)
    if value.layout is not torch.strided or (needs_data and value.is_meta):
        rule = "a strided tensor with data" if needs_data else "a strided tensor"
        raise WeightError("load_state_dict", name=key, rule=rule, value=f"{value.layout} on {value.device}")
    return value


# -- shared memory


def shared_with_others(weight: LayerWeight, buffers: Iterable[torch.Tensor]) -> PreparedWeight | None:
    """Return a layer's weight if ``share_memory`` has shared its buffers with other processes, else None."""
    is_shared = weight.device.type == "cpu" and any(buffer.is_shared() for buffer in buffers)
    return weight if is_shared and isinstance(weight, PreparedWeight) else None


def to_shared(weight: PreparedWeight, name: str) -> PreparedWeight:
    """Return a layer's weight in shared memory, without touching the layer: another thread may be using it.

    Raises:
        LifecycleError: The buffers are in a memory provider's memory.
    """
    owner = next((found for tensor in weight.tensors if (found := provider_of(tensor))), None)
    if owner is not None:
        raise LifecycleError(
            f"Layer {name!r} can't be shared: its buffers are in memory of {owner.name}. "
            "Make it with unified_memory='disabled'."
        )
    return attrs.evolve(weight, tensors=tuple(tensor.clone().share_memory_() for tensor in weight.tensors))


def written_to(shared: PreparedWeight, weight: LayerWeight) -> LayerWeight:
    """Write a weight to tensors that other processes use, as torch loads a shared parameter."""
    for tensor, loaded in zip(shared.tensors, weight.tensors, strict=True):
        tensor.copy_(loaded)
    return attrs.evolve(weight, tensors=shared.tensors)


def over_shared(weight: LayerWeight, layer: str, stem: str, buffers: tuple[torch.Tensor, ...]) -> LayerWeight:
    """Return an unpickled weight over the buffers that came with it, if they came shared and the plan is the same."""
    # From a file, or a copy within this process, they did not come shared.
    if isinstance(weight, PreparedWeight) and all(buffer.is_shared() for buffer in buffers):
        if weight.plan.stem == stem:
            return attrs.evolve(weight, tensors=buffers)
        emit("q4.share", level=logging.WARNING, layer=layer, shared=stem, prepared=weight.plan.stem)
    return weight
