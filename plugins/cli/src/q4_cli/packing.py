"""Choice, recipe and packing of the tensors of ``q4 quantize``, one at a time while they are written."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_cli.values import illegal
from q4core.plugin_api import FLOATS, find_dialect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Others", "Packing", "make_recipe", "nothing_to_pack", "split_tensors"]

_DENSE = {**dict.fromkeys(("*embed*", "*embd*", "*wte*", "*wpe*"), "an embedding"), "lm_head": "the output head"}
"""What stays dense unless it is included, as transformers' quantizers leave it."""
_PREFERRED = ("bitsandbytes", "modelopt-nvfp4", "torchao-mxfp4", "compressed-tensors", "torchao", "modelopt", "simple")
_KINDS = tuple(map(q4.ScaleKind, ("e4m3_mul", "e4m3_div", "e8m0", "plain", "e4m3", "double_quant")))
"""In this order they are tried: those with the smaller error first."""
_CHUNK_ELEMENTS = 1 << 22
_PROBE_ROWS = 128
_PROBE_COLUMNS = 1024


@attrs.frozen
class DenseTensor:
    """A tensor that stays dense, and why; ``notable`` where one would expect it packed, so that it is reported."""

    name: str
    reason: str
    nbytes: int
    notable: bool


@attrs.frozen(kw_only=True)
class Recipe:
    """How each tensor is packed; ``options`` are block_size, scale_kind and symmetric, as ``q4.quantize`` has them."""

    format: q4.Format
    dialect: q4.Dialect
    options: Mapping[str, Any]


def _is_match(name: str, pattern: str) -> bool:
    module = name.removesuffix(".weight")
    return any(fnmatch.fnmatchcase(text, pattern) for text in (name, module, module.rpartition(".")[2]))


def split_tensors(
    infos: Mapping[str, q4.TensorInfo], *, skip: Sequence[str] = (), include: Sequence[str] = ()
) -> tuple[list[str], list[DenseTensor], list[str]]:
    """Return the names to pack, the tensors that stay dense with the reasons, and the patterns that match nothing.

    Patterns are globs over the name, the module or its last part; ``skip`` wins over ``include``.
    """
    chosen: list[str] = []
    remaining: list[DenseTensor] = []
    for name, info in infos.items():
        reason, notable = _reason(name, info, skip, include)
        if reason is None:
            chosen.append(name)
        else:
            remaining.append(DenseTensor(name, reason, info.nbytes, notable=notable))
    idle = [pattern for pattern in (*skip, *include) if not any(_is_match(name, pattern) for name in infos)]
    return chosen, remaining, idle


def _reason(name: str, info: q4.TensorInfo, skip: Sequence[str], include: Sequence[str]) -> tuple[str | None, bool]:
    asked = any(_is_match(name, pattern) for pattern in include)
    if not name.endswith(".weight") or name == ".weight":
        return "not named <module>.weight", asked
    if len(info.shape) != 2 or 0 in info.shape:  # noqa: PLR2004  # a matrix
        return f"of shape {list(info.shape)}, not a matrix", asked
    if info.dtype not in FLOATS:
        return f"of dtype {str(info.dtype).removeprefix('torch.')}", True
    for pattern in skip:
        if _is_match(name, pattern):
            return f"matches --skip {pattern!r}", True
    kinds = [] if asked else [kind for pattern, kind in _DENSE.items() if _is_match(name, pattern)]
    return (f"{kinds[0]} (--include packs it)", True) if kinds else (None, False)


def make_recipe(
    format_name: str, *, dialect: str | None, scale_kind: str | None, options: Mapping[str, Any], module: str
) -> Recipe:
    """Decide how to pack, before any work is done; errors name ``module``, the first layer to pack.

    The dialect defaults to the format's usual one, the scale kind to the format's default, or the most exact one that
    the dialect writes. ``options`` are ``block_size`` and ``symmetric``, as ``q4.quantize`` has them.
    """
    kind = q4.find_format(format_name, q4.default_registry().formats().values())
    known = q4.dialects()
    candidates = [find_dialect(dialect, known)] if dialect is not None else _writers(kind, known)
    wanted: list[q4.ScaleKind | None] = [None, *(item for item in _KINDS if item in kind.scale_kinds)]
    if scale_kind is not None:
        wanted = [_scale_kind(scale_kind)]
    first: q4.Q4Error | None = None
    for candidate in candidates:
        for choice in wanted:
            try:
                return _try(kind, candidate, module, {**options, "scale_kind": choice})
            except q4.DialectError as error:
                first = first or error
    hint = "Name a format of a dialect that `q4 doctor --json` lists; GGUF files are read and not written."
    rule = "one that a dialect here writes"
    raise first or q4.DialectError("q4 quantize", name="--format", rule=rule, value=kind.name, hint=hint)


def _scale_kind(text: str) -> q4.ScaleKind:
    known = {kind.value: kind for kind in q4.ScaleKind}
    name = text.strip().lower().replace("-", "_")
    if name not in known:
        raise illegal("--scale-kind", f"one of {', '.join(known)}", text, known)
    return known[name]


def _writers(kind: q4.Format, known: Iterable[q4.Dialect]) -> list[q4.Dialect]:
    """Return the dialects that write a format, the widest used first."""

    def rank(item: q4.Dialect) -> tuple[int, str]:
        places = [place for place, head in enumerate(_PREFERRED) if item.name.startswith(head)]
        return (places[0] if places else len(_PREFERRED)), item.name

    return sorted((d for d in known if kind.name in d.formats and type(d).write is not q4.Dialect.write), key=rank)


def _try(kind: q4.Format, dialect: q4.Dialect, module: str, options: dict[str, Any]) -> Recipe:
    """Pack and write a small made-up weight, so that a dialect rejects it before the work begins."""
    block = max(1, options["block_size"] or kind.block_size)
    columns = -(-max(_PROBE_COLUMNS, block) // block) * block
    dense = torch.linspace(-1, 1, _PROBE_ROWS * columns).reshape(_PROBE_ROWS, columns)
    weight = q4.quantize(dense, kind, name=module, **options)
    dialect.write(module, weight)
    chosen = {**options, "block_size": weight.block_size, "scale_kind": weight.scale_kind}
    return Recipe(format=kind, dialect=dialect, options=chosen)


def nothing_to_pack(remaining: Sequence[DenseTensor], where: str) -> q4.CheckpointError:
    """Return the error for a checkpoint of which every tensor stays dense; its details have the reasons."""
    reasons = [f"{item.name}: {item.reason}" for item in remaining if item.notable] or [
        "no matrix named <module>.weight"
    ]
    rule, value = "a checkpoint with at least one tensor to pack", f"{len(remaining)} tensors that stay dense"
    hint = f"Name the original dense checkpoint, or --include an embedding. {reasons[0]}."
    return q4.CheckpointError("q4 quantize", name="IN", rule=rule, value=value, where=where, hint=hint, reasons=reasons)


@attrs.define(eq=False)
class Packing(Mapping[str, q4.PackedWeight]):
    """Module → ``PackedWeight``, packed while it is iterated over, one at a time.

    What can't be packed is left out and added to ``remaining``, or raises under ``strict``; ``step`` gets each module
    after it was written.
    """

    dense: Mapping[str, torch.Tensor]
    names: Sequence[str]
    remaining: list[DenseTensor]
    recipe: Recipe
    where: str
    strict: bool
    step: Callable[[str], None]
    packed: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    """Name, shape, dtype, bytes_before, bytes_after and relative_error (‖w − ŵ‖ / ‖w‖, Frobenius) of each layer."""
    _current: tuple[str, q4.PackedWeight] | None = attrs.field(default=None, init=False)

    def __iter__(self) -> Iterator[str]:
        """Pack one tensor after the other, and yield the module of each that could be packed; works once."""
        for name in self.names:
            module = name.removesuffix(".weight")
            weight = self._pack(name, module)
            if weight is not None:
                self._current = module, weight
                yield module
                self._current = None
            self.step(module)
        if not self.packed:
            raise nothing_to_pack(self.remaining, self.where)

    def _pack(self, name: str, module: str) -> q4.PackedWeight | None:
        dense, recipe = self.dense[name], self.recipe
        nbytes = dense.numel() * dense.element_size()
        try:
            weight = q4.quantize(dense, recipe.format, name=module, **recipe.options)
            recipe.dialect.write(module, weight)
        except q4.Q4Error as error:
            if self.strict:
                raise
            self.remaining.append(DenseTensor(name, str(error), nbytes, notable=True))
            return None
        self.packed.append(
            {
                "name": name,
                "shape": weight.shape,
                "dtype": str(dense.dtype).removeprefix("torch."),
                "bytes_before": nbytes,
                "bytes_after": weight.nbytes,
                "relative_error": _relative_error(dense, weight),
            }
        )
        return weight

    def __getitem__(self, module: str) -> q4.PackedWeight:
        """Return the weight of the current module of the iteration."""
        if self._current is None or self._current[0] != module:
            raise KeyError(module)
        return self._current[1]

    def __len__(self) -> int:
        """Return the number of tensors to pack."""
        return len(self.names)


@attrs.frozen(eq=False)
class Others(Mapping[str, torch.Tensor]):
    """The tensors that stay dense, known once packing is complete; loaded one at a time."""

    packing: Packing

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of the file."""
        packed = {item["name"] for item in self.packing.packed}
        return (name for name in self.packing.dense if name not in packed)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        return self.packing.dense[name]

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.packing.dense) - len(self.packing.packed)


def _relative_error(dense: torch.Tensor, weight: q4.PackedWeight) -> float:
    """Return ‖w − ŵ‖ / ‖w‖, a slice of rows at a time."""
    rows, columns = weight.shape
    chunk = max(1, _CHUNK_ELEMENTS // columns)
    error = norm = 0.0
    for start in range(0, rows, chunk):
        some = slice(start, start + chunk)
        part = dense[some].to(torch.float32)
        error += float((part - q4.dequantize(weight, torch.float32, rows=some)).to(torch.float64).square().sum())
        norm += float(part.to(torch.float64).square().sum())
    return float((error / norm) ** 0.5) if norm else 0.0
