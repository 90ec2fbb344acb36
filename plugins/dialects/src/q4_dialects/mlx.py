"""MLX: affine codes of 1 … 8 bits, MXFP4 and NVFP4; and ``metal`` of transformers, which stores the same.

``<module>.weight`` uint32 [N, K * bits / 32], its bits code after code from the lowest on; ``scales`` [N, K / G];
``biases`` [N, K / G] (``qbiases`` in ``metal``) for affine codes: ``code * scale + bias``. Scales may be negative.
MXFP4 and NVFP4 have uint8 scales (e8m0 and e4m3), no biases and no global scale. Embeddings and heads are layers, too;
experts are [E, N, …]. Codes of 4 and 8 bits are read as they lie in the file; other widths are spread.

``config.json`` has ``quantization``, repeated as ``quantization_config`` without a ``quant_method``: bits, group size
and mode, with a mapping or ``false`` for single modules; such a mapping inherits nothing. AutoRound writes a
``quant_method`` of its own. Without a config several widths have the same shapes (4 bits in groups of 64, 8 bits in
groups of 32): sizes of other tensors decide, or the option ``mlx_bits``; else the layer is ambiguous.

Reference:
    mlx 0.32.4 and mlx-lm 0.32.2 (mx.dequantize on CPUs); transformers 5.23.0: integrations/metal_quantization.py.
"""

from __future__ import annotations

import collections
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from q4_dialects.experts import expert_layers, expert_of, has_experts
from q4_dialects.layer_keys import assumed_dtype
from q4core import (
    Catalogue,
    Dialect,
    DialectError,
    Feature,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    ScaleKind,
    WrittenLayer,
    find_format,
    pack_codes,
)
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from q4core import TensorInfo, WeightSpec

__all__ = ["Mlx"]

_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_NIBBLE, _BYTE, _WORD = 4, 8, 32
_RANKS = {2, 3}
_OPTION = "mlx_bits"
_CONFIG = "config.json's quantization"


@attrs.frozen
class _Mode:
    """One of MLX's modes: its format for 4 bits, what it is without a statement, and its scales."""

    format: str
    bits: int
    group: int
    kind: ScaleKind = ScaleKind.PLAIN
    dtype: torch.dtype | None = None
    """What the bytes of scales are."""


_MODES = {
    "affine": _Mode("q4_1", 4, 64),
    "mxfp4": _Mode("mxfp4", 4, 32, ScaleKind.E8M0, torch.float8_e8m0fnu),
    "nvfp4": _Mode("nvfp4", 4, 16, ScaleKind.E4M3, torch.float8_e4m3fn),
    "mxfp8": _Mode("mxfp8", 8, 32, ScaleKind.E8M0, torch.float8_e8m0fnu),
}
_UNREAD = "mxfp8"
_BY_FORMAT = {"q4_1": ("affine", 4), "q8_affine": ("affine", 8), "mxfp4": ("mxfp4", 4), "nvfp4": ("nvfp4", 4)}
_OFFSETS = ("biases", "qbiases")


@attrs.frozen
class _Layout:
    """How the codes of one layer are stored."""

    mode: str
    bits: int
    group: int

    @property
    def format(self) -> str:
        """The format of the weight."""
        return "q8_affine" if self.mode == "affine" and self.bits > _NIBBLE else _MODES[self.mode].format

    def columns(self, words: int) -> int | None:
        """Return K, or None where the words hold no whole number of groups."""
        return None if words * _WORD % (self.bits * self.group) else words * _WORD // self.bits

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.mode}, {self.bits} bits in groups of {self.group}"


class Mlx(Dialect):
    """MLX's quantised layers."""

    name: ClassVar[str] = "mlx"
    formats: ClassVar[frozenset[str]] = frozenset(_BY_FORMAT)
    options: ClassVar[frozenset[str]] = frozenset({_OPTION})
    config_names: ClassVar[tuple[str, ...]] = ("quantization", "quantization_config")
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite", "offset": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with packed words and scales or biases, or with scales alone where the config is MLX's."""
        bits = catalogue.options.get(_OPTION)
        if bits is not None and bits not in _WIDTHS:
            raise DialectError(self.name, name=_OPTION, rule=f"one of {', '.join(map(str, _WIDTHS))}", value=bits)
        config = _config(catalogue)
        sizes: collections.Counter[int] | None = None
        for module in catalogue.modules_with("weight", "scales", *_OFFSETS):
            if not _is_own(module, catalogue, named=config is not None):
                continue
            if config is None and sizes is None:
                sizes = _sizes(catalogue)
            layer = self._layer(module, catalogue, config, sizes or collections.Counter())
            codes = catalogue.get(layer.keys["qdata"])
            if codes is not None and has_experts(catalogue, layer.keys["qdata"]):
                yield from expert_layers(layer, codes.shape[0], catalogue)
            else:
                yield layer

    def _layer(
        self, module: str, catalogue: Catalogue, config: Mapping[str, Any] | None, sizes: collections.Counter[int]
    ) -> LayerSchema:
        codes, scale = catalogue.get(f"{module}.weight"), catalogue.get(f"{module}.scales")
        layout, problems, notes = _layout(module, catalogue, config, sizes)
        keys = {"qdata": f"{module}.weight", "scale": f"{module}.scales"}
        stored = [name for name in _OFFSETS if f"{module}.{name}" in catalogue]
        if layout.mode == "affine":
            keys["offset"] = f"{module}.{stored[0] if stored else _OFFSETS[0]}"
            stored = stored[1:]
        rule = f"absent from a layer that is {layout}"
        problems += [Problem("unknown_key", f"{module}.{name}", rule) for name in stored]
        problems += catalogue.unknown_scales(module, ("bias", "scales", *_OFFSETS))
        if layout.mode == _UNREAD:
            problems.append(Problem("unsupported", module, "of 4-bit or affine codes to be read", f"mlx {_UNREAD}"))
        shape = None
        if codes is not None and len(codes.shape) in _RANKS:
            columns = layout.columns(codes.shape[-1])
            shape = None if columns is None else (codes.shape[-2], columns)
        dtype, assumed = (scale.dtype, ()) if scale is not None and scale.dtype in FLOATS else assumed_dtype(catalogue)
        return LayerSchema(
            module=module,
            dialect=self.name,
            format=layout.format if layout.mode != _UNREAD else "unknown",
            keys=keys,
            shape=shape,
            block_size=layout.group,
            problems=problems,
            notes=(*notes, *assumed),
            extras=(("layout", layout), ("dtype", dtype)),
            named=config is not None,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys, layout = layer.keys, dict(layer.extras)["layout"]
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        first = codes if codes is not None else scale
        experts = first.shape[:1] if first is not None and len(first.shape) == max(_RANKS) else ()
        yield from self.expect(catalogue, keys["qdata"], dtypes={torch.uint32}, shape=(*experts, None, None))
        if codes is not None and len(codes.shape) in _RANKS and layer.shape is None:
            rule = f"[N, K * {layout.bits} / 32] with K a multiple of {layout.group} ({layout})"
            yield Problem("shape", keys["qdata"], rule, list(codes.shape))
        rows, columns = layer.shape or (None, None)
        blocks = (*experts, rows, None if columns is None else columns // layout.group)
        dtypes = FLOATS if layout.mode == "affine" else {torch.uint8}
        yield from self.expect(catalogue, keys["scale"], dtypes=dtypes, shape=blocks)
        yield from self.expect(catalogue, keys.get("offset"), dtypes=FLOATS, shape=blocks)

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the numbers of scales that are bytes."""
        dtype = _MODES[dict(layer.extras)["layout"].mode].dtype
        if stored.dtype == torch.uint8 and dtype is not None:
            return stored.view(dtype)
        return super().stored_numbers(layer, role, stored, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight: codes of 4 and 8 bits and all scales as views."""
        facts, expert = dict(layer.extras), expert_of(layer)
        layout: _Layout = facts["layout"]
        parts = {role: load(key) for role, key in layer.keys.items()}
        if expert is not None:
            parts = {role: part[expert] for role, part in parts.items()}
        codes, mode, scale = parts["qdata"].view(torch.uint8), _MODES[layout.mode], parts["scale"]
        width = _NIBBLE if layout.bits <= _NIBBLE else _BYTE
        if layout.bits != width:
            codes = _spread(codes, layout.bits)
            codes = codes if width == _BYTE else pack_codes(codes, Packing.LOW_FIRST)
        return PackedWeight(
            format=find_format(layer.format),
            qdata=codes,
            scale=scale if mode.dtype is None else scale.view(mode.dtype),
            out_features=codes.shape[0],
            in_features=codes.shape[1] * _BYTE // width,
            block_size=layout.group,
            scale_kind=mode.kind,
            packing=Packing.LOW_FIRST if width == _NIBBLE else Packing.BYTES,
            offset=parts.get("offset"),
            dtype=facts["dtype"],
            name=layer.module,
            dialect=layer.dialect,
            notes=layer.notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors that ``mx.quantized_matmul`` takes; codes of other widths become 4 or 8 bits wide.

        Raises:
            DialectError: Another format, another group size, a short last group, scale levels that MLX has no place
                for, or any feature.
        """
        self.check_writable(module, weight, features=(Feature.OFFSET,))
        mode, bits = _BY_FORMAT[weight.format.name]
        total = weight.global_scale
        if mode == "nvfp4" and weight.scale_kind is not ScaleKind.E4M3 and (total is None or bool((total != 1).any())):
            rule = "e4m3 without a global scale, or with one of 1"
            raise self.refusal(module, "scale levels", rule, weight.scale_kind.value)
        if mode == "affine" and (weight.block_size not in _GROUPS or weight.in_features % weight.block_size):
            rule = f"one of {', '.join(map(str, _GROUPS))}, and a divisor of K = {weight.in_features}"
            raise self.refusal(module, "block_size", rule, weight.block_size)
        if weight.in_features % (_WORD // bits):
            raise self.refusal(module, "in_features", f"a multiple of {_WORD // bits}", weight.in_features)
        if mode == "affine":
            weight = weight.with_plain_scale()
        codes = self.row_bytes(weight, Packing.LOW_FIRST if bits == _NIBBLE else Packing.BYTES)
        codes = codes.reshape(weight.out_features, -1).contiguous()
        codes = codes.clone() if codes.storage_offset() % 4 else codes
        scale = weight.scale if mode == "affine" else weight.scale.view(torch.uint8)
        tensors = {"weight": codes.view(torch.uint32), "scales": scale}
        if weight.offset is not None:
            tensors["biases"] = weight.offset
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return MLX's ``quantization``: the commonest layout for all, and a mapping for each layer of another one."""
        del unquantised  # a layer is quantised where its scales are there
        stated = {module: _entry(spec) for module, spec in layers.items()}
        (common, _), *_ = Counter(tuple(entry.items()) for entry in stated.values()).most_common(1)
        return {**dict(common), **{module: entry for module, entry in stated.items() if tuple(entry.items()) != common}}


def _entry(spec: WeightSpec) -> dict[str, Any]:
    mode, bits = _BY_FORMAT[spec.format.name]
    return {"group_size": spec.block_size, "bits": bits, "mode": mode}


def _config(catalogue: Catalogue) -> Mapping[str, Any] | None:
    """Return what ``config.json`` says of MLX's layers, or None where it says nothing of them."""
    found = catalogue.config.get("quantization")
    if isinstance(found, dict) and not {"bits", "group_size", "mode"}.isdisjoint(found):
        return found
    found = catalogue.quantization_config
    method, packing = found.get("quant_method"), found.get("packing_format")
    is_own = method in ("mlx", "metal") or (method == "auto-round" and packing in ("mlx", "auto_round:mlx"))
    is_bare = method is None and {"bits", "group_size"} <= set(found)
    return found if is_own or is_bare else None


def _is_own(module: str, catalogue: Catalogue, *, named: bool) -> bool:
    """Return whether a module's keys and dtypes are MLX's: words with scales or biases, or what is left of them."""
    stem = f"{module}."
    if any(stem + other in catalogue for other in ("qweight", "W_q", "weight_packed", "codebooks")):
        return False
    codes, scale = catalogue.get(f"{stem}weight"), catalogue.get(f"{stem}scales")
    has_offset = any(stem + name in catalogue for name in _OFFSETS)
    if codes is None:
        return (scale is not None and has_offset) or (named and (scale is not None or has_offset))
    if codes.dtype == torch.uint32:
        return scale is not None or has_offset or (named and len(codes.shape) in _RANKS)
    if scale is None or codes.dtype.is_floating_point:
        return scale is not None and has_offset
    return has_offset or named or not scale.dtype.is_floating_point


def _layout(
    module: str, catalogue: Catalogue, config: Mapping[str, Any] | None, sizes: collections.Counter[int]
) -> tuple[_Layout, list[Problem], tuple[str, ...]]:
    """Return how a layer is stored, with what is wrong with what the config says, and what is assumed."""
    if config is None:
        return _inferred(module, catalogue, sizes)
    where, own, problems = _CONFIG, config.get(module), []
    if isinstance(own, dict):
        config, where = own, f"{_CONFIG}[{module!r}]"
    elif own is False:
        rule = f"of a floating dtype, as {_CONFIG} says that the module is not quantised"
        codes = catalogue.get(f"{module}.weight")
        problems.append(Problem("dtype", f"{module}.weight", rule, None if codes is None else str(codes.dtype)[6:]))
    extra = config.get("extra_config")
    if isinstance(extra, dict) and isinstance(extra.get(module), dict):
        config, where = {**config, **extra[module]}, f"{_CONFIG}.extra_config[{module!r}]"
    mode = config.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _MODES:
        problems.append(Problem("value", f"{where}.mode", f"one of {', '.join(_MODES)}", mode))
        mode = "affine"
    facts = {"bits": _MODES[mode].bits, "group_size": _MODES[mode].group}
    legal: dict[str, Collection[int]] = {name: (number,) for name, number in facts.items()}
    if mode == "affine":
        legal = {"bits": _WIDTHS, "group_size": _GROUPS}
    for name, numbers in legal.items():
        stated = config.get(name, facts[name])
        if isinstance(stated, int) and not isinstance(stated, bool) and stated in numbers:
            facts[name] = stated
        else:
            rule = f"one of {', '.join(map(str, numbers))} for mode {mode}"
            problems.append(Problem("value", f"{where}.{name}", rule, stated))
    return _Layout(mode, facts["bits"], facts["group_size"]), problems, ()


def _inferred(
    module: str, catalogue: Catalogue, sizes: collections.Counter[int]
) -> tuple[_Layout, list[Problem], tuple[str, ...]]:
    """Return the layout that shapes and dtypes allow, where no config says it."""
    codes, scale = catalogue.get(f"{module}.weight"), catalogue.get(f"{module}.scales")
    words, groups = _last(codes), _last(scale)
    product = words * _WORD // groups if groups and words * _WORD % groups == 0 else 0
    has_offset = any(f"{module}.{name}" in catalogue for name in _OFFSETS)
    if scale is not None and scale.dtype == torch.uint8 and not has_offset:
        modes = [_Layout(name, mode.bits, mode.group) for name, mode in _MODES.items() if mode.dtype is not None]
        return next((layout for layout in modes if layout.bits * layout.group == product), modes[0]), [], ()
    stated = catalogue.options.get(_OPTION)
    fitting = [_Layout("affine", bits, group) for bits in _WIDTHS for group in _GROUPS if bits * group == product]
    if stated is not None:
        fitting = [layout for layout in fitting if layout.bits == stated] or [_Layout("affine", stated, 64)]
    below = (size for key in catalogue.children(module).values() for size in _widths_of(key, catalogue))
    own = collections.Counter(below)  # a layer's rows say nothing of its columns
    others = [size for size, count in sizes.items() if count > own[size]]
    chosen, note = _likeliest(fitting, words, others)
    if chosen is not None:
        return chosen, [], note
    rule = f"of one reading, which config.json's quantization or the option {_OPTION} names"
    return fitting[0], [Problem("ambiguous", module, rule, " or ".join(map(str, fitting)))], ()


def _likeliest(
    fitting: Sequence[_Layout], words: int, sizes: Collection[int]
) -> tuple[_Layout | None, tuple[str, ...]]:
    """Return the one layout whose K is the size of another tensor, with a note that says so; None where none is."""
    if len(fitting) < 2:  # noqa: PLR2004  # no choice
        return (fitting[0] if fitting else _Layout("affine", 4, 64)), ()
    known = [layout for layout in fitting if layout.columns(words) in sizes]
    if len(known) == 1:
        return known[0], (f"{known[0]}, by the sizes of other tensors: no config.json says it",)
    return None, ()


def _last(info: TensorInfo | None) -> int:
    return info.shape[-1] if info is not None and len(info.shape) in _RANKS else 0


def _sizes(catalogue: Catalogue) -> collections.Counter[int]:
    """Return widths that layers may have, and how many tensors say each: see ``_widths_of``."""
    return collections.Counter(size for name in catalogue.tensors for size in _widths_of(name, catalogue))


def _widths_of(name: str, catalogue: Catalogue) -> set[int]:
    """Return the widths that a tensor says: of a norm, a bias or a dense matrix, or the rows of a packed one."""
    info, suffix = catalogue.tensors[name], name.rpartition(".")[2]
    if info.dtype == torch.uint32 and len(info.shape) in _RANKS:
        return {info.shape[-2]}
    return {*info.shape} if info.dtype in FLOATS and suffix not in {"scales", *_OFFSETS} else set()


def _spread(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of any width, stored bit after bit from the lowest on, one per byte: uint8 [R, B * 8 / bits]."""
    groups = torch.unflatten(stored, 1, (-1, bits))  # 8 codes in ``bits`` bytes
    codes = torch.empty((*groups.shape[:2], _BYTE), dtype=torch.uint8, device=stored.device)
    for place in range(_BYTE):
        byte, low = divmod(place * bits, _BYTE)
        code = groups[..., byte] >> low
        if low + bits > _BYTE:
            code = code | (groups[..., byte + 1] << (_BYTE - low))
        codes[..., place] = code & ((1 << bits) - 1)
    return codes.flatten(1)
