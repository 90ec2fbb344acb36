"""What a dialect is: the mapping between a checkpoint's keys and ``PackedWeight``, in both directions.

A dialect recognises its layers from names, dtypes and shapes alone, says everything that is wrong with them, reads one
layer at a time and writes one layer at a time. Swizzled scales, key names and header metadata end here; no backend ever
sees a dialect. The two simplified dialects live in ``dialects_simple.py``; all others are plugins.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from q4core.errors import DialectError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from q4core.weight import PackedWeight

__all__ = ["Catalogue", "Dialect", "LayerSchema", "Problem", "TensorInfo", "WrittenLayer"]


@attrs.frozen
class TensorInfo:
    """dtype and shape of a stored tensor, as torch would load it."""

    dtype: torch.dtype
    shape: tuple[int, ...] = attrs.field(converter=tuple)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


@attrs.frozen
class Problem:
    """One thing that is wrong with a layer.

    Args:
        code: ``missing_key``, ``unknown_key``, ``dtype``, ``shape``, ``value``, ``ambiguous`` or ``unsupported``.
        key: The tensor's key (or the module's name).
        rule: What must hold, to be read after "must be".
        value: What was found; None where there is nothing to show.
    """

    code: str
    key: str
    rule: str
    value: object = None

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
        shape: (N, K), or None where the names and shapes can't tell (the file's side tensors will).
        block_size: In-features per scale, or None where unknown.
        problems: What is wrong with the keys themselves (missing, unknown, ambiguous).
        notes: What is assumed, for the record.
        extras: Further hashable facts that the dialect needs to read the layer.
    """

    module: str
    dialect: str
    format: str
    keys: Mapping[str, str] = attrs.field(converter=dict, hash=False)
    shape: tuple[int, int] | None = None
    block_size: int | None = None
    problems: tuple[Problem, ...] = attrs.field(default=(), converter=tuple)
    notes: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    extras: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=tuple)

    def extra(self, name: str, default: Any = None) -> Any:
        """Return one of the extras."""
        return dict(self.extras).get(name, default)


@attrs.frozen(kw_only=True)
class WrittenLayer:
    """What a dialect writes for one layer: tensors by key, and header metadata to merge (text by key)."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = attrs.field(factory=dict)


class Catalogue:
    """The names of a checkpoint with their dtypes and shapes, indexed by module, and its small print.

    Args:
        tensors: Name → anything with ``dtype`` and ``shape`` (a tensor, a meta tensor, a ``TensorInfo``).
        metadata: Header metadata (text by key).
        config: The model's ``config.json`` as a mapping (its ``quantization_config`` matters).
        load: Loads a small side tensor by name; None where only metadata is at hand.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.
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
        self.tensors: dict[str, TensorInfo] = {
            name: item if isinstance(item, TensorInfo) else TensorInfo(item.dtype, tuple(item.shape))
            for name, item in tensors.items()
        }
        self.metadata = dict(metadata or {})
        self.config = dict(config or {})
        self.load = load
        self.options = dict(options or {})
        self._children: dict[str, dict[str, str]] = {}
        for name in self.tensors:
            parts = name.split(".")
            for cut in range(1, len(parts)):
                self._children.setdefault(".".join(parts[:cut]), {})[".".join(parts[cut:])] = name
            self._children.setdefault("", {})[name] = name

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor of that name is there."""
        return name in self.tensors

    def get(self, name: str) -> TensorInfo | None:
        """Return dtype and shape of a tensor, or None."""
        return self.tensors.get(name)

    def children(self, module: str) -> dict[str, str]:
        """Return suffix → key for every tensor below a module (``"weight.absmax"`` → ``"proj.weight.absmax"``)."""
        return self._children.get(module, {})

    def modules_with(self, suffix: str) -> Iterator[str]:
        """Yield each module that has a tensor at ``module.suffix``, in the order of the file."""
        tail = f".{suffix}"
        for name in self.tensors:
            if name.endswith(tail):
                yield name[: -len(tail)]

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """``config["quantization_config"]``, or an empty mapping."""
        found = self.config.get("quantization_config")
        return found if isinstance(found, dict) else {}


class Dialect(abc.ABC):
    """One on-disk dialect. Subclasses are stateless; one instance serves every file."""

    name: ClassVar[str]
    formats: ClassVar[frozenset[str]]
    """Names of the formats that the dialect can hold."""

    @abc.abstractmethod
    def find(self, catalogue: Catalogue) -> Iterable[LayerSchema]:
        """Yield every layer that looks like this dialect's, complete or not.

        A layer whose keys are incomplete, or that has scale keys which the dialect does not know, is yielded with its
        ``problems``; one that belongs to another dialect is not yielded.
        """

    @abc.abstractmethod
    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterable[Problem]:
        """Yield *every* problem of dtype and shape (``layer.problems`` are added by the caller)."""

    @abc.abstractmethod
    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the layer's weight; tensors are used as they are (views of the mapped file), not copied.

        Args:
            layer: A layer that ``find`` gave, without problems.
            load: Key → tensor.

        Raises:
            WeightError, DialectError: The values contradict the dialect.
        """

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors and metadata that hold ``weight`` in this dialect, exactly.

        Raises:
            DialectError: The dialect can't express the weight's format, levels or features.
        """
        raise DialectError(
            f"write {module!r}",
            name="dialect",
            rule="one that q4core can write",
            value=self.name,
            where=type(weight).__name__,
        )
