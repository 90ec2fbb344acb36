"""``Checkpoint``: an open checkpoint as a lazy mapping of module names to packed weights."""

from __future__ import annotations

import contextlib
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
    counted,
)
from q4core.weight import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from q4core.checkpoint.contract import CheckpointSource
    from q4core.schema import LayerSchema, TensorInfo


class Checkpoint(Mapping[str, PackedWeight]):
    """Module name → ``PackedWeight``, read when asked for, as views of the mapped file; use it with ``with``.

    A weight that is alive is given again instead of being read twice. After ``close`` the weights already given stay
    valid; asking for more is a ``LifecycleError``.
    """

    def __init__(self, source: CheckpointSource, reader: str) -> None:
        self._source: CheckpointSource | None = source
        self._alive: weakref.WeakValueDictionary[str, PackedWeight] = weakref.WeakValueDictionary()
        self.reader = reader
        """Name of the reader that opened it, such as ``"safetensors"``."""
        self.path = source.path
        """What was opened."""
        self.schema = source.schema
        """The layers and how they are stored, the dense tensors, and what can be listed but not read."""
        self.metadata: Mapping[str, Any] = dict(source.metadata)
        """The header's metadata by key."""
        self.dense = DenseTensors(self)
        """The tensors that belong to no layer, by name; lazy too."""

    @property
    def source(self) -> CheckpointSource:
        """The reader's own object.

        Raises:
            LifecycleError: The checkpoint is closed.
        """
        if self._source is None:
            raise LifecycleError(f"checkpoint {str(self.path)!r} is closed")
        return self._source

    def __getitem__(self, module: str) -> PackedWeight:
        """Return one layer's weight.

        Raises:
            KeyError: There is no such layer.
            CheckpointError: The layer can't be read, or holds illegal numbers; names file, key, rule and value.
            LifecycleError: The checkpoint is closed.
        """
        source, what = self.source, f"layer {module!r}"
        if module not in self.schema.layers:
            for problem in self.schema.unsupported:
                if problem.key == module:
                    rule, where = problem.rule, str(self.path)
                    hint = "Read another layer, or pack the original weight by `q4 quantize`."
                    raise CheckpointError(what, name=module, rule=rule, value=problem.value, where=where, hint=hint)
            if module in self.dense:
                raise KeyError(f"{module!r} is no layer but a dense tensor: checkpoint.dense[{module!r}]")
            close = closest_name(module, self.schema.layers)
            raise KeyError(f"no {what} in {self.path}" + (f"; did you mean {close!r}?" if close else ""))
        weight = self._alive.get(module)
        if weight is None:
            try:
                with _reading(what, self.path, self.schema.layers[module].nbytes):
                    weight = source.read(module)
                    weight.check_values()
            except (WeightError, DialectError, FormatError) as error:
                raise _blame(self.schema.layers[module], self.path, error) from error
            self._alive[module] = weight
        return weight

    def __contains__(self, module: object) -> bool:
        """Return whether there is a layer of that name, without reading it."""
        return module in self.schema.layers

    def __iter__(self) -> Iterator[str]:
        """Iterate over module names in the order of the file."""
        return iter(self.schema.layers)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.schema.layers)

    def close(self) -> None:
        """Close the file; weights and tensors already given stay valid. Closing twice is fine."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> Checkpoint:  # noqa: PYI034  # Self needs Python 3.11
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Return path, number of layers and dialects."""
        state = "" if self._source is not None else ", closed"
        dialects = ", ".join(self.schema.dialects) or "no dialect"
        return f"Checkpoint({str(self.path)!r}, {counted(len(self), 'layer')} in {dialects}{state})"


def _blame(layer: LayerSchema, path: Path, error: Q4Error) -> CheckpointError:
    """Say the same of the file: the field becomes the key under which the file has it."""
    field, bracket, place = (error.name or "").partition("[")
    name = layer.keys.get(field, field or layer.module) + bracket + place
    facts: dict[str, Any] = {"rule": error.rule or str(error), "where": str(path), "hint": error.hint}
    if error.has_value:
        facts["value"] = error.value
    return CheckpointError(f"layer {layer.module!r}", name=name, **facts)


@contextlib.contextmanager
def _reading(what: str, path: Path, nbytes: int | None) -> Iterator[None]:
    """Turn what torch or the system could not read, mostly for lack of memory, into an error that names it."""
    try:
        yield
    except Q4Error:
        raise
    except (MemoryError, OSError, RuntimeError) as error:
        hint = None if nbytes is None else f"Free some memory, or read the file again: it takes {nbytes} bytes there."
        facts = {"value": describe_exception(error), "where": str(path), "hint": hint}
        raise CheckpointError(what, name="data", rule="readable here", **facts) from error


class DenseTensors(Mapping[str, "torch.Tensor"]):
    """Name → tensor for what belongs to no layer, loaded when asked for, as views of the mapped file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.infos: Mapping[str, TensorInfo] = dict(checkpoint.source.dense)
        """dtype and shape by name, without loading."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            KeyError: There is no such dense tensor.
            CheckpointError: It can't be read.
            LifecycleError: The checkpoint is closed.
        """
        source = self._checkpoint.source
        if name not in self.infos:
            raise KeyError(f"no dense tensor {name!r} in {self._checkpoint.path}")
        path, decoded = self._checkpoint.path, self._checkpoint.schema.decoded
        try:
            with _reading(f"tensor {name!r}", path, self.infos[name].nbytes):
                return source.load(name)
        except (WeightError, DialectError, FormatError) as error:
            if name not in decoded:
                raise
            raise _blame(decoded[name], path, error) from error

    def __contains__(self, name: object) -> bool:
        """Return whether there is a dense tensor of that name, without loading it."""
        return name in self.infos

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of the file."""
        return iter(self.infos)

    def __len__(self) -> int:
        """Return the number of dense tensors."""
        return len(self.infos)
