"""Packs a checkpoint while it is written: each tensor is read once, packed, written and let go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_cli.packing_plan import Kept
from q4core.plugin_api import decode_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from q4_cli.packing_plan import Recipe

__all__ = ["Others", "Packing", "nothing_to_pack"]

_CHUNK_ELEMENTS = 1 << 22


def nothing_to_pack(kept: Sequence[Kept], where: str) -> q4.CheckpointError:
    """Return the error for a checkpoint of which every tensor is kept; its details have the reasons."""
    reasons = [f"{item.name}: {item.reason}" for item in kept if item.notable] or ["no matrix named <module>.weight"]
    rule, value = "a checkpoint with at least one tensor to pack", f"{len(kept)} tensors to keep"
    hint = f"{reasons[0]}."
    return q4.CheckpointError("q4 quantize", name="IN", rule=rule, value=value, where=where, hint=hint, reasons=reasons)


class Packing(Mapping[str, q4.PackedWeight]):
    """Module → ``PackedWeight``, packed while it is iterated over, one at a time; what can't be packed is left out.

    Args:
        checkpoint: Whose dense tensors are packed.
        names: Which of them.
        kept: Gets what can't be packed, with the reasons.
        recipe: How.
        strict: Raise at the first tensor that can't be packed.
        step: Called with a module's name when it is done.
    """

    def __init__(  # noqa: PLR0913  # the facts of one job
        self,
        checkpoint: q4.Checkpoint,
        names: Sequence[str],
        kept: list[Kept],
        recipe: Recipe,
        *,
        strict: bool,
        step: Callable[[str], None],
    ) -> None:
        self.dense = checkpoint.dense
        self.packed: list[dict[str, Any]] = []
        """Name, shape, dtype, bytes_before, bytes_after and relative_error (‖w − ŵ‖ / ‖w‖, Frobenius) of each layer."""
        self._where = str(checkpoint.path)
        self._names, self._kept, self._recipe = names, kept, recipe
        self._strict, self._step = strict, step
        self._current: tuple[str, q4.PackedWeight] | None = None

    def __iter__(self) -> Iterator[str]:
        """Pack one tensor after the other, and yield the module of each that could be packed; to be asked once.

        Raises:
            CheckpointError: None could.
        """
        for name in self._names:
            module = name.removesuffix(".weight")
            weight = self._pack(name, module)
            if weight is not None:
                self._current = module, weight
                yield module
                self._current = None
            self._step(module)
        if not self.packed:
            raise nothing_to_pack(self._kept, self._where)

    def _pack(self, name: str, module: str) -> q4.PackedWeight | None:
        dense, recipe = self.dense[name], self._recipe
        nbytes = dense.numel() * dense.element_size()
        try:
            weight = q4.quantize(dense, recipe.format, name=module, **recipe.options)
            recipe.dialect.write(module, weight)
        except q4.Q4Error as error:
            if self._strict:
                raise
            self._kept.append(Kept(name, str(error), nbytes, notable=True))
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
        """Return the weight of the module that iteration stands at."""
        if self._current is None or self._current[0] != module:
            raise KeyError(module)
        return self._current[1]

    def __len__(self) -> int:
        """Return the number of tensors to pack."""
        return len(self._names)


class Others(Mapping[str, torch.Tensor]):
    """The tensors that stay dense, known once packing is complete; loaded one at a time."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of the file."""
        packed = {item["name"] for item in self._packing.packed}
        return (name for name in self._packing.dense if name not in packed)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        return self._packing.dense[name]

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._packing.dense) - len(self._packing.packed)


def _relative_error(dense: torch.Tensor, weight: q4.PackedWeight) -> float:
    """Return ‖w − ŵ‖ / ‖w‖, a slice of rows at a time."""
    rows, columns = weight.shape
    chunk = max(1, _CHUNK_ELEMENTS // columns)
    error = norm = 0.0
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        part = dense[start:stop].to(torch.float32)
        error += float((part - decode_rows(weight, start, stop)).to(torch.float64).square().sum())
        norm += float(part.to(torch.float64).square().sum())
    return float((error / norm) ** 0.5) if norm else 0.0
