"""``HfLinear``: a ``Q4Linear`` for code that was written for ``nn.Linear``."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import re
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_programs import EMITTERS
from q4core import PackedWeightError, Q4Linear, WeightInfo, dequantize

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HfLinear", "callers", "dense_state_only"]

_CHANGING = re.compile(r"__(i(?!ter__|nvert__|nt__|ndex__)\w+|set\w*)__|out|(?!__)\w+_|\w+ =")
"""Names of methods and of torch's functions that change a tensor."""
_DENSE_ONLY = contextvars.ContextVar("q4_transformers_dense_only", default=False)


@contextlib.contextmanager
def dense_state_only() -> Iterator[None]:
    """Leave packed weights out of ``state_dict`` inside the block: saving writes them in a dialect."""
    token = _DENSE_ONLY.set(True)
    try:
        yield
    finally:
        _DENSE_ONLY.reset(token)


class _LoadedWeight(WeightInfo):
    """Facts of a weight, marked for transformers: nothing is to be drawn at random for it. It is no tensor.

    Where the model's own code is known to read the weight, it answers with a dequantised one, made for each read.
    """

    _is_hf_initialized = True
    _layer: HfLinear

    @classmethod
    def of(cls, layer: HfLinear, info: WeightInfo) -> _LoadedWeight:
        """Return the facts of a layer's weight."""
        found = cls(**{field.name: getattr(info, field.name) for field in attrs.fields(WeightInfo)})
        object.__setattr__(found, "_layer", layer)
        return found

    @property
    def data(self) -> Any:
        """These facts; numbers for transformers, which copies them into a new head."""
        return self._layer.dequantize() if _is_resized() else self

    def dense_for(self, name: str) -> torch.Tensor:
        """Return the dequantised weight for a read by a method of a tensor, or a function of torch.

        Raises:
            PackedWeightError: It would be changed, or nothing is known to read it.
        """
        if not self._layer.is_read or not self._layer.is_prepared or _CHANGING.fullmatch(name):
            raise _refusal(name, self._layer)
        return self._layer.dequantize()


def callers() -> Iterator[tuple[str, str]]:
    """Yield module and function of each caller."""
    frame = inspect.currentframe()
    while frame is not None:
        yield str(frame.f_globals.get("__name__")), frame.f_code.co_name
        frame = frame.f_back


def _is_resized() -> bool:
    """Return whether transformers copies the weight into a new head of another size, which will be dense."""
    return any(module == "transformers.modeling_utils" and name == "_get_resized_lm_head" for module, name in callers())


def _refusal(name: str, layer: HfLinear) -> PackedWeightError:
    """Return the error for what was asked, with the kind of adapter of PEFT that asked for it."""
    found = (module.split(".") for module, _ in callers() if module.startswith("peft.tuners."))
    kind = next((parts[2] for parts in found if len(parts) > 3), None)  # noqa: PLR2004  # in the folder of a kind
    if kind is None:
        own = layer.name or "layer"
        leaf = own.rpartition(".")[2]
        hint = (
            f"If the model's own code asks, quantise with modules_to_not_convert=[{leaf!r}], which leaves it dense. "
            "Merge adapters by q4_transformers.merge(model, exact=True), or with requantize=True."
        )
        return PackedWeightError(
            f"the weight of {own!r} is packed, can't be changed in place, and has no {name!r}", hint=hint
        )
    if kind != "lora":
        hint = (
            "LoRA and DoRA run on packed layers; for another kind load the model dense, or name other target_modules."
        )
        return PackedWeightError(
            f"adapters of the kind {kind} need a dense weight, and ask for its {name!r}", hint=hint
        )
    hint = (
        "Merge adapters by q4_transformers.merge(model, exact=True), or with requantize=True; leave "
        "init_lora_weights as it is, or 'gaussian'."
    )
    return PackedWeightError(f"a packed weight can't be changed in place, and has no {name!r}", hint=hint)


class HfLinear(Q4Linear, nn.Linear):  # type: ignore[misc]  # weight acts as a parameter, but is none
    """A ``Q4Linear`` that is an ``nn.Linear``, too, and lenient about the dtype of x.

    x of another floating-point dtype is cast to the layer's, and the result back: training code keeps norms, and so
    the activations behind them, in float32. Arguments and errors are those of ``Q4Linear``. Made by
    ``HfLinear.empty``, it has no key but its bias in a state dict before it adopts a weight, so that transformers looks
    for none.
    """

    stored_name: str | None = None
    """Name of the layer in the checkpoint that it came from."""
    dialect: str | None = None
    """The dialect that it was read in."""
    is_transposed: bool = False
    """Whether it replaces a ``Conv1D`` of transformers, whose dense weight is [K, N]."""
    is_read: bool = False
    """Whether the model's own code reads its weight, which then returns a dequantised one."""
    casts_input = True

    @property
    def weight(self) -> WeightInfo:  # type: ignore[override]  # as for the class
        """Shape, dtype and device, as code written for ``nn.Linear`` asks for them."""
        return _LoadedWeight.of(self, super().weight)

    @property
    def W_q(self) -> WeightInfo:  # noqa: N802  # the name by which PEFT knows that it must ask for ``dequantize()``
        """The weight's facts; where they are there, PEFT asks for ``dequantize()`` (DoRA)."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """Return the dense weight [N, K] in the layer's dtype."""
        return dequantize(self.packed_weight(), self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the layer, but not for PEFT, which would save its copy as trained, and train nothing of it.

        Raises:
            PackedWeightError: PEFT copies it for ``modules_to_save``.
        """
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_globals.get("__name__") == "peft.utils.other" and frame.f_code.co_name == "update":
                hint = "Put an adapter on it by target_modules, or quantise with it in modules_to_not_convert."
                raise PackedWeightError(f"modules_to_save can't train {self.name!r}, which is packed", hint=hint)
            frame = frame.f_back
        return super().__deepcopy__(memo)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  # nn.Module's signature
        if self.is_prepared and not _DENSE_ONLY.get():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        elif self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


EMITTERS[HfLinear] = EMITTERS[Q4Linear]
