"""``Checkpoint``: an open checkpoint as a lazy mapping of module names to packed weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from q4core.diagnostics.describe_exception import describe_exception
from q4core.errors import (
    CheckpointError,
    DialectError,
    FormatError,
    LifecycleError,
    Q4Error,
    WeightError,
    closest_name,
)
from q4core.weight import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    import torch

    from q4core.checkpoint.contract import CheckpointSource
    from q4core.schema import Schema, TensorInfo

__all__ = ["Checkpoint", "DenseTensors"]


class Checkpoint(Mapping[str, PackedWeight]):
    """Module name → ``PackedWeight``, read when asked for, as views of the mapped file; use it with ``with``.

    A weight that is alive is given again instead of being read twice. After ``close`` the weights already given stay
    valid; asking for more is a ``LifecycleError``.

    Args:
        source: The reader's own object.
        reader: Name of the reader.
    """

    def __init__(self, source: CheckpointSource, reader: str) -> None:
        self._source: CheckpointSource | None = source
        self._reader = reader
        self._path = source.path
        self._schema = source.schema
        self._metadata = dict(source.metadata)
        self._alive: weakref.WeakValueDictionary[str, PackedWeight] = weakref.WeakValueDictionary()
        self.dense = DenseTensors(self)
        """The tensors that belong to no layer, by name; lazy too."""

    @property
    def path(self) -> Path:
        """What was opened."""
        return self._path

    @property
    def reader(self) -> str:
        """Name of the reader that opened it, such as ``"safetensors"``."""
        return self._reader

    @property
    def schema(self) -> Schema:
        """The layers and how they are stored, the dense tensors, and what can be listed but not read."""
        return self._schema

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The header's metadata by key."""
        return self._metadata

    @property
    def source(self) -> CheckpointSource:
        """The reader's own object.

        Raises:
            LifecycleError: The checkpoint is closed.
        """
        if self._source is None:
            raise LifecycleError("checkpoint", name="checkpoint", rule="open", value="closed", where=str(self._path))
        return self._source

    def __getitem__(self, module: str) -> PackedWeight:
        """Return one layer's weight.

        Raises:
            KeyError: There is no such layer.
            CheckpointError: The layer can't be read, or holds illegal numbers; names file, key, rule and value.
            LifecycleError: The checkpoint is closed.
        """
        source = self.source
        if module not in self._schema.layers:
            self._refuse(module)
        weight = self._alive.get(module)
        if weight is None:
            try:
                weight = source.read(module)
                weight.check_values()
            except (WeightError, DialectError, FormatError) as error:
                raise self._blame(module, error) from error
            except Q4Error:
                raise
            except (MemoryError, OSError, RuntimeError) as error:
                raise self._unread(f"layer {module!r}", self._schema.layers[module].nbytes, error) from error
            self._alive[module] = weight
        return weight

    def __contains__(self, module: object) -> bool:
        """Return whether there is a layer of that name, without reading it."""
        return module in self._schema.layers

    def __iter__(self) -> Iterator[str]:
        """Iterate over module names in the order of the file."""
        return iter(self._schema.layers)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._schema.layers)

    def close(self) -> None:
        """Let go of the file; weights and tensors already given stay valid. Closing twice is fine."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> Checkpoint:  # noqa: PYI034  # Self needs Python 3.11
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Return path, number of layers and dialects."""
        state = "" if self._source is not None else ", closed"
        dialects = ", ".join(self._schema.dialects) or "no dialect"
        return f"Checkpoint({str(self._path)!r}, {len(self)} layers in {dialects}{state})"

    def _refuse(self, module: str) -> None:
        for problem in self._schema.unsupported:
            if problem.key == module:
                raise CheckpointError(
                    f"layer {module!r}", name=module, rule=problem.rule, value=problem.value, where=str(self._path)
                )
        close = closest_name(module, self._schema.layers)
        raise KeyError(f"no layer {module!r} in {self._path}" + (f"; did you mean {close!r}?" if close else ""))

    def _unread(self, what: str, nbytes: int | None, error: BaseException) -> CheckpointError:
        """Return the error for what torch or the system could not read, for want of memory as a rule."""
        size = "" if nbytes is None else f"It takes {nbytes} bytes in the file."
        return CheckpointError(
            what,
            name="data",
            rule="readable here",
            value=describe_exception(error),
            where=str(self._path),
            hint=size or None,
        )

    def _blame(self, module: str, error: Q4Error) -> CheckpointError:
        """Say the same of the file: the field becomes the key under which the file has it."""
        keys = self._schema.layers[module].keys
        field, bracket, place = (error.name or "").partition("[")
        given: dict[str, Any] = {"value": error.value} if error.has_value else {}
        return CheckpointError(
            f"layer {module!r}",
            name=f"{keys.get(field, field or module)}{bracket}{place}",
            rule=error.rule or str(error),
            where=str(self._path),
            hint=error.hint,
            **given,
        )


class DenseTensors(Mapping[str, "torch.Tensor"]):
    """Name → tensor for what belongs to no layer, loaded when asked for, as views of the mapped file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._infos = dict(checkpoint.source.dense)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """dtype and shape by name, without loading."""
        return self._infos

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            KeyError: There is no such dense tensor.
            CheckpointError: It can't be read.
            LifecycleError: The checkpoint is closed.
        """
        source = self._checkpoint.source
        if name not in self._infos:
            raise KeyError(f"no dense tensor {name!r} in {self._checkpoint.path}")
        try:
            return source.load(name)
        except Q4Error:
            raise
        except (MemoryError, OSError, RuntimeError) as error:
            raise self._checkpoint._unread(f"tensor {name!r}", self._infos[name].nbytes, error) from error  # noqa: SLF001  # its part

    def __contains__(self, name: object) -> bool:
        """Return whether there is a dense tensor of that name, without loading it."""
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of the file."""
        return iter(self._infos)

    def __len__(self) -> int:
        """Return the number of dense tensors."""
        return len(self._infos)
