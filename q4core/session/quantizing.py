"""``quantize``, by the quantiser that has the format's rule; plugins bring them through the hook ``q4_quantizers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from q4core.checkpoint.opening import way_to
from q4core.diagnostics.describe_exception import describe_exception
from q4core.errors import PLUGIN_FAULTS, FormatError, PluginError, Q4Error
from q4core.formats import BUILTIN_FORMATS, Format, find_format
from q4core.plugins.registry import default_registry
from q4core.policy.config import Rounding, to_option
from q4core.weight import PackedWeight

if TYPE_CHECKING:
    from q4core.formats import Packing, ScaleKind
    from q4core.plugins.registry import Registry


class Quantizer(Protocol):
    """Turns dense weights into packed ones, for the formats whose rules it has."""

    name: str
    """A unique name, such as ``"reference"``."""
    rules: frozenset[str]
    """What ``Format.rule`` may name; no two quantisers have one rule."""

    def quantize(self, dense: torch.Tensor, kind: Format, **options: Any) -> PackedWeight:
        """Return ``dense`` in a format; the options are all the named ones of ``quantize`` below, as it got them.

        Only ``registry`` and ``rounding`` are made what they mean first: a ``Registry`` and a ``Rounding``.
        """


def quantize(  # noqa: PLR0913  # one argument per option
    dense: torch.Tensor,
    format: str | Format,  # noqa: A002  # the contract's name
    *,
    block_size: int | None = None,
    scale_kind: ScaleKind | None = None,
    packing: Packing | None = None,
    symmetric: bool = False,
    name: str | None = None,
    rounding: Rounding | str = Rounding.NEAREST,
    seed: int = 0,
    registry: Registry | None = None,
) -> PackedWeight:
    """Return a dense weight in four bits: on CUDA by a proven native quantiser, else by the reference.

    Rounded to nearest, all quantisers write the same bytes. The event ``q4.quantize`` says who did. The package
    q4-quantize brings the rules of the built-in formats.

    Args:
        dense: float32, bfloat16 or float16 [N, K], any strides, finite; it is only read.
        format: Name of the format, or a ``Format``.
        block_size: In-features per scale. Defaults to the format's own.
        scale_kind: How scales are stored. Defaults to the format's own. SUPER_BLOCK makes Q4_K of q4_1, Q6_K of q8_0.
        packing: The nibble order. Defaults to the format's own.
        symmetric: For INTEGER formats: no zero points, code 8 stands for 0.
        name: The layer's name, for messages.
        rounding: By chance only where a backend's quantiser declares it: the reference has none.
        seed: For rounding by chance, 0 … 2^31 - 1: equal seeds give equal bytes.
        registry: The plugins to choose among. Defaults to the process's.

    Raises:
        PluginError: No loaded plugin quantises to the format, or two do; it names the package that is missing.
        InputError: ``dense`` is not a finite float matrix, or holds values that the format's scales can't reach; or the
            seed is not legal.
        FormatError: The format is unknown or has no rule, or the block size, scale kind, packing or K is not legal for
            it.
        ConfigError: The rounding is unknown.
        BackendUnavailableError: Nobody rounds by chance here; the rejections say why not.
        BackendError: The native quantiser failed.
    """
    plugins = registry or default_registry()
    kind = format if isinstance(format, Format) else find_format(format, plugins.formats().values())
    chosen = to_option(Rounding, rounding, "quantize", "rounding")
    if not kind.rule:
        names = ", ".join(name for name, item in plugins.formats().items() if item.rule)
        raise FormatError("quantize", name="format", rule=f"one with a rule ({names})", value=kind.name, where=name)
    found: dict[str, Quantizer] = plugins.items("q4_quantizers")
    fitting = [item for item in found.values() if kind.rule in item.rules]
    if len(fitting) != 1:
        names = ", ".join(item.name for item in fitting or found.values()) or "none"
        rule = f"one that a single loaded quantiser has (here: {names})"
        is_own = kind.rule in {item.rule for item in BUILTIN_FORMATS.values()} and not fitting
        hint = way_to("quantize", {item.name: item.state for item in plugins.records()}) if is_own else None
        raise PluginError(f"quantize to {kind}", name="rule", rule=rule, value=kind.rule, where=name, hint=hint)
    (quantizer,) = fitting
    try:
        packed: object = quantizer.quantize(
            dense, kind, block_size=block_size, scale_kind=scale_kind, packing=packing, symmetric=symmetric, name=name,
            rounding=chosen, seed=seed, registry=plugins,
        )  # fmt: skip
    except (Q4Error, MemoryError, torch.OutOfMemoryError):
        raise
    except PLUGIN_FAULTS as error:
        what = f"quantizer {quantizer.name!r} raised {describe_exception(error)}"
        raise PluginError(what, where=name) from error
    if not isinstance(packed, PackedWeight) or (packed.out_features, packed.in_features) != tuple(dense.shape):
        value = packed.shape if isinstance(packed, PackedWeight) else type(packed).__name__
        rule = f"a PackedWeight of {list(dense.shape)}"
        raise PluginError(f"quantizer {quantizer.name!r}", name="result", rule=rule, value=value, where=name)
    return packed
