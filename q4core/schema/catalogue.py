"""The names of a checkpoint with their dtypes and shapes, and how one layer is stored among them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.errors import ConfigError, SchemaError
from q4core.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MAX_SUFFIX_PARTS = 3
_MAX_SIDE_BYTES = 1 << 16
_SCALE_LIKE = re.compile(
    r"scal(e|es|ing)|absmax|amax|qparam|zero|quant_map|quant_state|codebook|nested_|g_idx|offset|qdata|packed|perm\b|lora_"
    r"|rotat|hadamard|theta\b"
)
_FLOAT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*FLOATS, torch.float64)}


def as_tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple: a converter that checkers can read, which the class is not."""
    return tuple(items)


def as_dict(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict, likewise."""
    return dict(items)


@attrs.frozen
class TensorInfo:
    """dtype and shape of a stored tensor, as torch would load it."""

    dtype: torch.dtype
    shape: tuple[int, ...] = attrs.field(converter=as_tuple)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


@attrs.frozen
class Problem:
    """One thing that is wrong with a layer.

    Args:
        code: ``missing_key``, ``unknown_key``, ``dtype``, ``shape``, ``value``, ``ambiguous``, ``dialect`` (no layer is
            in the dialect that was asked for), ``unsupported`` (recognised, but nothing here reads it) or
            ``unexplained`` (packed integers next to scales whose keys no dialect knows).
        key: The tensor's key (or the module's name).
        rule: What must hold, to be read after "must be".
        value: What was found; None where there is nothing to show.
    """

    code: str
    key: str
    rule: str
    value: object = attrs.field(default=None, hash=False, eq=repr)

    @property
    def type(self) -> str:
        """What the layer is stored as, such as ``Q5_0`` or ``gptq``, for counts; the rule where that is not known."""
        return self.value if isinstance(self.value, str) else f"not {self.rule}"

    def __str__(self) -> str:
        """Return one line: key, rule, value, code."""
        got = "" if self.value is None else f", got {self.value!r}"
        return f"{self.key} must be {self.rule}{got} ({self.code})"


@attrs.frozen(kw_only=True)
class LayerSchema:
    """How one layer is stored.

    Args:
        module: Module name, such as ``"layers.0.mlp.up_proj"``.
        dialect: Name of the dialect.
        format: Name of the format.
        keys: Role → key for every tensor of the layer, the missing required ones included. Role ``"qdata"`` is always
            there; the other roles are the dialect's own.
        shape: (N, K), or None where the names and shapes don't say (the file's side tensors do).
        block_size: In-features per scale, or None where unknown.
        problems: What is wrong with the keys themselves (missing, unknown, ambiguous).
        notes: What is assumed, for the record.
        extras: Further hashable facts that the dialect needs to read the layer.
        named: Whether metadata or ``config.json`` name this dialect for the layer, so that no other reading of the same
            keys counts.
        nbytes: Stored bytes of the layer's tensors; None where unknown (``detect`` fills it in). An expert's is its
            share of the tensors that it has in common with others; its extra ``"expert"`` is its number among them.
    """

    module: str
    dialect: str
    format: str
    keys: Mapping[str, str] = attrs.field(converter=as_dict, hash=False)
    shape: tuple[int, int] | None = None
    block_size: int | None = None
    problems: tuple[Problem, ...] = attrs.field(default=(), converter=as_tuple)
    notes: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    extras: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=as_tuple)
    named: bool = False
    nbytes: int | None = None

    @property
    def type(self) -> str | None:
        """What the file calls the layer's storage, such as ``Q4_K``; None where it has no name of its own."""
        return dict(self.extras).get("type")


class Catalogue:
    """The names of a checkpoint with their dtypes and shapes, indexed by module, with its metadata and configuration.

    Args:
        tensors: Name → anything with ``dtype`` and ``shape`` (a tensor, a meta tensor, a ``TensorInfo``).
        metadata: Header metadata (text by key).
        config: The model's ``config.json`` as a mapping (its ``quantization_config`` matters).
        load: Loads a small side tensor by name; where it is None, the tensors that hold data serve.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.

    Raises:
        SchemaError: ``tensors`` is no such mapping.
        ConfigError: Another argument is not what it must be.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        metadata: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        load: Callable[[str], torch.Tensor] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_arguments(tensors, metadata=metadata, config=config, load=load, options=options)
        self.tensors: dict[str, TensorInfo] = {name: _info_of(name, item) for name, item in tensors.items()}
        self._given = tensors
        self.metadata = dict(metadata or {})
        self.config = dict(config or {})
        self.load = load
        self.options = dict(options or {})
        self._below: dict[str, list[str]] = {}
        self._ending: dict[str, dict[str, int]] = {}  # last part of the name → names, with their places
        for place, name in enumerate(self.tensors):
            self._ending.setdefault(name.rpartition(".")[2], {})[name] = place
            cut = len(name)
            for _ in range(_MAX_SUFFIX_PARTS):
                cut = name.rfind(".", 0, cut)
                if cut < 0:
                    break
                self._below.setdefault(name[:cut], []).append(name)

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor of that name is there."""
        return name in self.tensors

    def get(self, name: str) -> TensorInfo | None:
        """Return dtype and shape of a tensor, or None."""
        return self.tensors.get(name)

    def held(self, name: str) -> torch.Tensor | None:
        """Return a tensor that was given with its data; None where only metadata, or a loader, is at hand."""
        item = self._given.get(name)
        # Meta tensors, and those of torch's fake mode, have no numbers in them.
        holds_data = isinstance(item, torch.Tensor) and not item.is_meta and not hasattr(item, "fake_mode")
        return item if holds_data else None

    def children(self, module: str) -> dict[str, str]:
        """Return suffix → key (``"weight.absmax"`` → ``"proj.weight.absmax"``) down to three names below a module."""
        return {name[len(module) + 1 :]: name for name in self._below.get(module, ())}

    def modules_with(self, *suffixes: str) -> Iterator[str]:
        """Yield each module once that has a tensor at ``module.suffix`` for one of the suffixes, in file order."""
        tails = tuple(f".{suffix}" for suffix in suffixes)
        places: dict[str, int] = {}
        for last in {suffix.rpartition(".")[2] for suffix in suffixes}:
            places |= self._ending.get(last, {})
        names = (name for name in sorted(places, key=places.__getitem__) if name.endswith(tails))
        modules = (next(name.removesuffix(tail) for tail in tails if name.endswith(tail)) for name in names)
        yield from dict.fromkeys(module for module in modules if module)

    def unknown_scales(self, module: str, known: Iterable[str]) -> tuple[Problem, ...]:
        """Return an ``unknown_key`` problem for each scale-like key of a module that is not among the known suffixes.

        A key is scale-like when its last name speaks of scales, zero points, code books and the like; only the module's
        own tensors count (``x`` and ``weight.x``), not those of the modules below it.
        """
        legal = set(known)
        return tuple(
            Problem("unknown_key", key, f"one that the dialect knows ({', '.join(sorted(legal))})")
            for suffix, key in self.children(module).items()
            if suffix not in legal
            and (("." not in suffix) or suffix.startswith("weight."))
            and _SCALE_LIKE.search(suffix.removeprefix("weight."))
        )

    def load_small(self, name: str) -> torch.Tensor | None:
        """Return a side tensor of at most 64 KiB, or None where there is none, or only metadata is at hand."""
        info = self.tensors.get(name)
        if info is None or info.nbytes > _MAX_SIDE_BYTES:
            return None
        if self.load is not None:
            return self.load(name)
        held = self.held(name)
        return held if held is not None and held.layout is torch.strided else None

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """``quantization_config`` of ``config.json`` (the text model's, where a model has several), or empty."""
        text = self.config.get("text_config")
        for holder in (self.config, text if isinstance(text, dict) else {}):
            found = holder.get("quantization_config")
            if isinstance(found, dict):
                return found
        return {}

    @property
    def dtype(self) -> torch.dtype | None:
        """The model's dtype by ``config.json``: float32, bfloat16, float16 or float64; else None."""
        name = self.config.get("dtype", self.config.get("torch_dtype"))
        return _FLOAT_DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None


def require_arguments(
    tensors: object, *, metadata: object = None, config: object = None, load: object = None, options: object = None
) -> None:
    """Refuse arguments of a wrong kind: ``tensors`` by a ``SchemaError``, the others by a ``ConfigError``."""
    if not isinstance(tensors, Mapping):
        rule = "a mapping of names to tensors"
        raise SchemaError("schema", name="tensors", rule=rule, value=type(tensors).__name__)
    for name in tensors:
        if not isinstance(name, str):
            raise SchemaError("schema", name="tensors", rule="keyed by texts", value=name)
    for argument, given in (("metadata", metadata), ("config", config), ("options", options)):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError("schema", name=argument, rule="a mapping or None", value=given)
        for name, item in (given or {}).items():
            if not isinstance(name, str):
                raise ConfigError("schema", name=argument, rule="keyed by texts", value=name)
            if given is metadata and not isinstance(item, str):
                raise ConfigError("schema", name=f"metadata[{name!r}]", rule="a text", value=item)
    if load is not None and not callable(load):
        raise ConfigError("schema", name="load", rule="a function of a name, or None", value=load)


def _info_of(name: str, item: Any) -> TensorInfo:
    """Return dtype and shape of an entry; a ``SchemaError`` where it has none, as torch counts them."""
    try:
        dtype, shape = item.dtype, tuple(item.shape)
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: nested and lazy tensors have no shape
        dtype, shape = None, ()
    if not isinstance(dtype, torch.dtype) or not all(isinstance(size, int) for size in shape):
        rule = "a tensor, or a TensorInfo of dtype and shape"
        shown = item if isinstance(item, (str, int, float, type(None))) else type(item).__name__
        raise SchemaError("schema", name=f"tensors[{name!r}]", rule=rule, value=shown)
    return item if isinstance(item, TensorInfo) else TensorInfo(dtype, shape)
