"""How ``Q4Linear`` is saved: strict keys in no dialect.

``weight.spec`` (uint8, the JSON of ``WeightSpec``) and one ``weight.<field>`` per tensor field of ``PackedWeight``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import WeightError
from q4core.weight import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

    from q4core.formats import Format
    from q4core.weight import PackedWeight

__all__ = ["load_weight", "save_weight", "split_state"]

_STATE = "weight."
_SPEC = "weight.spec"


def save_weight(weight: PackedWeight, destination: MutableMapping[str, Any], prefix: str) -> None:
    """Put a weight's spec and tensors into a state dict."""
    text = WeightSpec.of(weight).to_json()
    destination[prefix + _SPEC] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for field, tensor in weight.tensors():
        destination[prefix + _STATE + field] = tensor


def split_state(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of a layer's weight, and all others."""
    start = prefix + _STATE
    own = {key: value for key, value in state.items() if key.startswith(start)}
    return own, {key: value for key, value in state.items() if not key.startswith(start)}


def load_weight(  # noqa: PLR0913  # the facts of one load
    own: Mapping[str, Any],
    prefix: str,
    shape: tuple[int, int],
    device: torch.device | None,
    formats: Iterable[Format],
    missing_keys: list[str],
    unexpected_keys: list[str],
) -> PackedWeight | None:
    """Return the weight of [N, K] that ``split_state`` found, in tensors of its own on ``device`` (None: on theirs).

    Keys that are missing, or should not be there, are added to the lists; None is returned where one is missing.

    Raises:
        WeightError: The spec or a tensor is not legal, or is that of a layer of another shape.
    """
    entries, key = dict(own), prefix + _SPEC
    if key not in entries:
        missing_keys.append(key)
        unexpected_keys.extend(entries)
        return None
    stored = _checked(key, entries.pop(key), needs_data=True)
    if stored.dtype != torch.uint8:
        raise WeightError("load_state_dict", name=key, rule="of dtype uint8", value=stored.dtype)
    text = bytes(stored.cpu().reshape(-1).tolist()).decode("utf-8", errors="replace")
    spec = WeightSpec.from_json(text, formats=formats, where=key)
    if (spec.out_features, spec.in_features) != shape:
        rule, got = f"that of a {shape[0]}×{shape[1]} weight", f"{spec.out_features}×{spec.in_features}"
        raise WeightError("load_state_dict", name=key, rule=rule, value=got)
    expected = [f"{prefix}{_STATE}{field}" for field in spec.fields]
    absent = [key for key in expected if key not in entries]
    missing_keys.extend(absent)
    unexpected_keys.extend(key for key in entries if key not in expected)
    if absent:
        return None
    tensors = [_checked(key, entries[key], needs_data=device is not None).detach() for key in expected]
    # Copies: a caller's later writes to the state dict must not reach the layer.
    owned = [tensor.to(device or tensor.device).clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return spec.build(owned, name=prefix.rstrip(".") or None)


def _checked(key: str, value: object, *, needs_data: bool) -> torch.Tensor:
    """Return an entry, once it is known to be a strided tensor, with data where that is needed."""
    if not isinstance(value, torch.Tensor):
        raise WeightError("load_state_dict", name=key, rule="a tensor", value=value)
    if value.layout is not torch.strided or (needs_data and value.is_meta):
        rule = "a strided tensor with data" if needs_data else "a strided tensor"
        raise WeightError("load_state_dict", name=key, rule=rule, value=f"{value.layout} on {value.device}")
    return value
