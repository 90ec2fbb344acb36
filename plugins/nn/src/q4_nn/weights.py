"""A model's tensors by name: each is asked for with its shape, and what nobody asked for is an error in the end."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
from torch import nn

from q4_nn.joined import JoinedLinear
from q4core import BlockOrder, CheckpointError, PackedWeight, WeightSpec, cat

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from q4core import Checkpoint, Session

__all__ = ["DenseLinear", "Weights"]

_BLOCK_FIELDS = frozenset({"qdata", "scale", "offset", "zero"})


class DenseLinear(nn.Module):
    """A linear layer over a dense weight, for tensors that a file does not quantise.

    Args:
        weight: [N, K] float.
        bias: [N] float, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None

    def forward(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [..., N] from [..., K]; in ``out`` where given."""
        y = nn.functional.linear(x, self.weight, self.bias)
        return y if out is None else out.copy_(y)

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the rows [n, K] of an index [n]."""
        found = nn.functional.embedding(index, self.weight)
        return found if dtype is None else found.to(dtype)


@attrs.frozen(eq=False)
class _Part:
    """A matrix of the file with its bias, before it is a layer."""

    name: str
    weight: PackedWeight | torch.Tensor
    bias: torch.Tensor | None

    def join_key(self) -> Hashable:
        """Return what two neighbours must share to be one matrix of the very same numbers; itself where none can."""
        weight = self.weight
        if not isinstance(weight, PackedWeight):
            return self
        spec = attrs.evolve(WeightSpec.of(weight), out_features=1)
        if not _BLOCK_FIELDS.issuperset(spec.fields) or spec.blocks is not BlockOrder.ROW:
            return self  # what belongs to the whole matrix would have to change its form
        return spec, weight.scale.dtype, self.bias is None


def _join(parts: list[_Part]) -> _Part:
    """Return one matrix of all rows; its name is the first one's, with the last words of the others."""
    if len(parts) == 1:
        return parts[0]
    name = "+".join([parts[0].name, *(part.name.rpartition(".")[2] for part in parts[1:])])
    weights = [part.weight for part in parts if isinstance(part.weight, PackedWeight)]
    biases = [part.bias for part in parts if part.bias is not None]
    return _Part(name, cat(weights, name=name), torch.cat(biases) if biases else None)


class Weights:
    """Takes tensors out of a checkpoint and makes layers of them.

    Args:
        checkpoint: The opened file.
        session: Makes the linear layers.
        where: The file's name, for messages.
        dtype: dtype of activations, and of the dense tensors taken.
        device: Where the model computes.
    """

    def __init__(
        self, checkpoint: Checkpoint, session: Session, *, where: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._session = session
        self._where = where
        self.dtype = dtype
        self.device = device
        self._left = {*checkpoint, *checkpoint.dense}

    def _fail(self, name: str, rule: str, value: Any, hint: str | None = None) -> NoReturn:
        raise CheckpointError("model", name=f"tensor {name!r}", rule=rule, value=value, where=self._where, hint=hint)

    def _miss(self, name: str) -> NoReturn:
        """Say why a tensor can't be had: the file has it in a form that is not read, or not at all."""
        for problem in self._checkpoint.schema.unsupported:
            if problem.key in {name, name.removesuffix(".weight")}:
                self._fail(name, problem.rule, problem.value)
        self._fail(name, "present", "none")

    def has(self, name: str) -> bool:
        """Return whether a tensor of that name (with its ``.weight`` or ``.bias``) is there."""
        return name in self._checkpoint.dense or name.removesuffix(".weight") in self._checkpoint

    def vector(self, name: str, size: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a dense vector in the compute dtype (or another one), on the model's device.

        Raises:
            CheckpointError: It is missing or has another shape.
        """
        if name not in self._checkpoint.dense:
            self._miss(name)
        self._left.discard(name)
        tensor = self._checkpoint.dense[name]
        if tuple(tensor.shape) != (size,):
            self._fail(name, f"of shape [{size}], which the metadata asks for", list(tensor.shape))
        # A copy: views would keep the whole file mapped for a few kilobytes.
        return tensor.to(self.device, dtype or self.dtype, copy=True)

    def linear(self, name: str, out_features: int, in_features: int) -> nn.Module:
        """Return a linear layer over ``name.weight``, and ``name.bias`` where there is one.

        Raises:
            CheckpointError: It is missing or has another shape.
        """
        return self._layer(self._part(name, out_features, in_features))

    def joined(self, sizes: Mapping[str, int], in_features: int) -> JoinedLinear:
        """Return linear layers that share their x, those next to one another as one where their formats are equal.

        Args:
            sizes: Out-features by name, in the order in which the layers give their results.
            in_features: K of all.

        Raises:
            CheckpointError: One is missing or has another shape.
        """
        parts = (self._part(name, size, in_features) for name, size in sizes.items())
        groups = [list(group) for _, group in itertools.groupby(parts, _Part.join_key)]
        return JoinedLinear(
            [self._layer(_join(group)) for group in groups],
            [tuple(sizes[part.name] for part in group) for group in groups],
        )

    def _part(self, name: str, out_features: int, in_features: int) -> _Part:
        """Take a matrix and its bias out of the file."""
        bias = self.vector(f"{name}.bias", out_features) if f"{name}.bias" in self._checkpoint.dense else None
        is_packed = name in self._checkpoint
        key = name if is_packed else f"{name}.weight"
        if not is_packed and key not in self._checkpoint.dense:
            self._miss(key)
        self._left.discard(key)
        weight = self._checkpoint[name] if is_packed else self._checkpoint.dense[key]
        self._check_shape(name, tuple(weight.shape), (out_features, in_features))
        return _Part(name, weight, bias)

    def _layer(self, part: _Part) -> nn.Module:
        if isinstance(part.weight, PackedWeight):
            return self._session.linear(part.weight, bias=part.bias, name=part.name)
        return DenseLinear(part.weight.to(self.device, self.dtype, copy=True), part.bias)

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, int]) -> None:
        if found != wanted:
            self._fail(f"{name}.weight", f"of shape {list(wanted)}, which the metadata asks for", list(found))

    def lookup(self, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from token numbers [n] to the layer's rows [n, K] in the compute dtype."""
        rows: Any = layer.rows
        return lambda index: rows(index, self.dtype)

    def finish(self) -> None:
        """Check that every tensor was asked for.

        Raises:
            CheckpointError: One was not: the model has a part that its builder does not know.
        """
        if self._left:
            names = sorted(self._left)
            self._fail(
                names[0],
                "one that the architecture's builder knows",
                f"{len(names)} unknown: {', '.join(names[:5])}",
                "The model has parts that this version does not compute; its answers would be wrong.",
            )
