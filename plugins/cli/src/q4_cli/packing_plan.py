"""Which tensors ``q4 quantize`` packs, and how: by name, rank and dtype, and by what the dialect can hold."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_cli.options import illegal
from q4core.plugin_api import FLOATS, find_dialect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Kept", "Recipe", "make_recipe", "split_tensors"]

_EMBEDDINGS = ("*embed*", "*embd*", "*wte*", "*wpe*")
_PREFERRED = ("bitsandbytes", "modelopt", "compressed-tensors", "torchao", "simple")
_KINDS = (
    q4.ScaleKind.E4M3_MUL,
    q4.ScaleKind.E4M3_DIV,
    q4.ScaleKind.E8M0,
    q4.ScaleKind.PLAIN,
    q4.ScaleKind.E4M3,
    q4.ScaleKind.DOUBLE_QUANT,
)
"""In this order they are tried: those with the smaller error first."""
_PROBE_ROWS = 128
_PROBE_COLUMNS = 1024


@attrs.frozen
class Kept:
    """A tensor that stays dense, and why; ``notable`` where one would expect it packed, so that people are told."""

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
) -> tuple[list[str], list[Kept], list[str]]:
    """Return the names to pack, the tensors to keep with the reasons, and the patterns that match nothing.

    Args:
        infos: Name → dtype and shape.
        skip: Globs over the name, the module or its last part; they win over ``include``.
        include: Globs of embeddings to pack too.
    """
    chosen: list[str] = []
    kept: list[Kept] = []
    for name, info in infos.items():
        reason, notable = _reason(name, info, skip, include)
        if reason is None:
            chosen.append(name)
        else:
            kept.append(Kept(name, reason, info.nbytes, notable=notable))
    idle = [pattern for pattern in (*skip, *include) if not any(_is_match(name, pattern) for name in infos)]
    return chosen, kept, idle


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
    if not asked and any(_is_match(name, pattern) for pattern in _EMBEDDINGS):
        return "an embedding (--include packs it)", True
    return None, False


def make_recipe(
    format_name: str, *, dialect: str | None, scale_kind: str | None, options: Mapping[str, Any], module: str
) -> Recipe:
    """Decide how to pack, before any work is done.

    Where the scale kind is not given, it is the format's default, or the most exact one that the dialect writes.

    Args:
        format_name: As the user typed it.
        dialect: Its name; the format's usual one unless given.
        scale_kind: Its name, or None.
        options: ``block_size`` and ``symmetric``, as ``q4.quantize`` has them.
        module: The first layer to pack, which errors name.

    Raises:
        FormatError: The format, block size or scale kind is unknown or not legal.
        DialectError: The dialect is unknown or can't hold the format; or no dialect can.
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
    if first is not None:
        raise first
    hint = "Dialects that hold a format are listed by `q4 doctor --json`; GGUF files are read and not written."
    raise q4.DialectError(
        "q4 quantize", name="--format", rule="one that a dialect here writes", value=kind.name, hint=hint
    )


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
    """Pack and write a small made-up weight, so that what a dialect refuses is known before the work begins."""
    block = max(1, options["block_size"] or kind.block_size)
    columns = -(-max(_PROBE_COLUMNS, block) // block) * block
    dense = torch.linspace(-1, 1, _PROBE_ROWS * columns).reshape(_PROBE_ROWS, columns)
    weight = q4.quantize(dense, kind, name=module, **options)
    dialect.write(module, weight)
    chosen = {**options, "block_size": weight.block_size, "scale_kind": weight.scale_kind}
    return Recipe(format=kind, dialect=dialect, options=chosen)
