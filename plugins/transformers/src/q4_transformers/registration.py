"""Registration in transformers: names that are added, two wrapped methods, and names that are replaced.

Nobody who did not ask for it notices: new names are added (``q4``, and ``modelopt``, which transformers can't load),
``merge_quantization_configs`` is passed on unless the caller's configuration is a ``Q4Config``, ``num_parameters`` adds
packed weights to its count, and names of other libraries are taken over only where ``take_over`` or the environment
variable ``Q4_TRANSFORMERS`` says so. The names of experts for PEFT are in ``peft.keep_names_of_experts``.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

import transformers
from transformers.modeling_utils import ModuleUtilsMixin
from transformers.quantizers import auto

from q4_transformers.config import METHOD, Q4Config
from q4_transformers.linear import HfLinear
from q4_transformers.quantizer import Q4Quantizer
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["VARIABLE", "check_version", "give_back", "is_merging", "register", "take_over"]

VARIABLE = "Q4_TRANSFORMERS"
"""Environment variable: names to take over when this package is imported, with commas between them, or ``all``."""
_ADDED = (METHOD, "modelopt")
_METHODS = {
    "bitsandbytes": "bitsandbytes_4bit",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "mxfp4",
    "torchao": "torchao",
}
"""Library whose name can be taken over → transformers' key."""
_MERGED = ["quantization_config", "quantization_config_from_args"]
_MAJOR = 5
_taken: dict[str, Any] = {}


def check_version(version: str = transformers.__version__) -> None:
    """Refuse a version of transformers that loads models in another way.

    Raises:
        ConfigError: It is not 5.x.
    """
    major = version.partition(".")[0]
    if major != str(_MAJOR):
        hint = f"pip install 'transformers>={_MAJOR}.0,<{_MAJOR + 1}'"
        raise ConfigError("q4_transformers", name="transformers", rule=f"version {_MAJOR}.x", value=version, hint=hint)


def register() -> None:
    """Add our names, accept ``Q4Config`` as an option, take over what the environment says; twice is allowed."""
    check_version()
    for name in _ADDED:
        if name not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
            auto.register_quantization_config(name)(Q4Config)
        if name == METHOD and name not in auto.AUTO_QUANTIZER_MAPPING:
            auto.register_quantizer(name)(Q4Quantizer)
    _wrap_merging()
    _wrap_support()
    _wrap_counting()
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if names:
        take_over(*(() if names == ["all"] else names))


def is_merging() -> bool:
    """Return whether ``from_pretrained`` takes a ``Q4Config`` for a checkpoint that names another library."""
    return getattr(auto.AutoHfQuantizer.merge_quantization_configs, "q4", False)


def _wrap_merging() -> None:
    """Use a caller's ``Q4Config`` where the checkpoint's own entry names another library, and ignore that entry.

    Where transformers' method has other arguments than those known, it is left alone: ``config_for`` works without.
    """
    original = auto.AutoHfQuantizer.merge_quantization_configs
    if is_merging() or list(inspect.signature(original).parameters) != _MERGED:
        return

    @functools.wraps(original)
    def merge(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        del cls
        if isinstance(quantization_config_from_args, Q4Config):
            return quantization_config_from_args
        return original(quantization_config, quantization_config_from_args)

    merge.q4 = True  # type: ignore[attr-defined]  # our mark
    auto.AutoHfQuantizer.merge_quantization_configs = classmethod(merge)


def _wrap_support() -> None:
    """Let an entry without a ``quant_method`` (MLX's) come to the merging, which refuses it without a ``Q4Config``."""
    original = auto.AutoHfQuantizer.supports_quant_method
    if getattr(original, "q4", False):
        return

    @functools.wraps(original)
    def supports(entry: Any) -> bool:
        is_nameless = isinstance(entry, dict) and not {"quant_method", "load_in_4bit", "load_in_8bit"} & entry.keys()
        return is_nameless or bool(original(entry))

    supports.q4 = True  # type: ignore[attr-defined]  # our mark
    auto.AutoHfQuantizer.supports_quant_method = staticmethod(supports)


def _wrap_counting() -> None:
    """Make ``num_parameters`` count the numbers of packed weights, as it does those of bitsandbytes."""
    original = ModuleUtilsMixin.num_parameters
    if getattr(original, "q4", False):
        return

    @functools.wraps(original)
    def count(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:  # noqa: FBT001, FBT002  # transformers' signature
        found: int = original(self, only_trainable, exclude_embeddings)
        if only_trainable:
            return found
        return found + sum(module.weight.numel() for module in self.modules() if isinstance(module, HfLinear))

    count.q4 = True  # type: ignore[attr-defined]  # our mark
    ModuleUtilsMixin.num_parameters = count


def take_over(*names: str) -> tuple[str, ...]:
    """Load checkpoints of other libraries by q4core in this process, for programs that can't be edited.

    Args:
        names: ``bitsandbytes`` (4-bit), ``compressed-tensors``, ``mxfp4``, ``torchao``. Defaults to all of them.

    Returns:
        The names that are taken over now.

    Raises:
        ConfigError: A name is none of these.
    """
    for name in names:
        if name not in _METHODS:
            raise ConfigError("take_over", name="name", rule=f"one of {', '.join(_METHODS)}", value=name)
    for name in names or _METHODS:
        key = _METHODS[name]
        if name not in _taken:
            _taken[name] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[key]
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[key] = Q4Config
    return tuple(_taken)


def give_back(*names: str) -> None:
    """Undo ``take_over``, for some names or all."""
    for name in names or tuple(_taken):
        if name in _taken:
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[_METHODS[name]] = _taken.pop(name)


def taken_over() -> Iterable[str]:
    """Return the names that are taken over."""
    return tuple(_taken)
