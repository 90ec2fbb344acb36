"""``WeightInfo``: the facts of a packed layer's weight, without a dense one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils._pytree import tree_map

from q4core.errors import PackedWeightError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from q4core.weight import PackedWeight, WeightSpec

__all__ = ["WeightInfo"]

_OPERATORS = (
    "getitem", "setitem", "iter", "neg", "abs", "pow", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv",
    "rtruediv", "matmul", "rmatmul", "lt", "le", "gt", "ge",
)  # fmt: skip


@attrs.frozen
class WeightInfo:
    """What ``Q4Linear.weight`` answers: the facts of a dense weight, without one.

    Each tensor that a state dict holds as ``weight.<field>`` is an attribute too (``layer.weight.qdata``), exported
    when it is asked for; torch's distributed checkpoints look the keys of a state dict up in this way. Its numbers are
    not there: an operator, a function of torch or another method of a tensor raises ``PackedWeightError``.

    Args:
        shape: (N, K).
        dtype: dtype of the activations that the layer takes.
        device: Where it runs.
        format: Name of the format; empty before there is a weight, as ``nbytes`` is 0 and ``spec`` None.
        nbytes: Bytes that the packed weight takes.
        requires_grad: False.
        spec: What the packed weight is but for its tensors.
        read: Exports the packed weight.
        layer: Name of the layer, for messages.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    format: str
    nbytes: int
    requires_grad: bool = False
    spec: WeightSpec | None = attrs.field(kw_only=True, repr=False)
    read: Callable[[], PackedWeight] = attrs.field(kw_only=True, repr=False, eq=False)
    layer: str = attrs.field(kw_only=True, default="layer", repr=False)

    def __getattr__(self, name: str) -> Any:
        """Return a tensor of the packed weight, or what ``dense_for`` has under a name of ``torch.Tensor``."""
        if name == "spec":  # of one that torch.compile made without its fields
            raise AttributeError(name)
        if self.spec is not None and name in self.spec.fields:
            return getattr(self.read(), name)
        if hasattr(torch.Tensor, name):
            return getattr(self.dense_for(name), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def dense_for(self, name: str) -> torch.Tensor:
        """Refuse to be a dense weight for a method of a tensor, or a function of torch.

        Raises:
            PackedWeightError: In any case.
        """
        hint = (
            "Call the layer for its product, take q4core.dequantize(layer.packed_weight()) for the numbers, or leave "
            f"the layer dense where the model is converted: skip=[{self.layer.rpartition('.')[2]!r}]."
        )
        kind = f"a weight packed as {self.format}" if self.format else "no weight yet"
        raise PackedWeightError(
            f"layer {self.layer!r}", name="weight", rule=f"a dense tensor for {name!r}", value=kind, hint=hint
        )

    @classmethod
    def __torch_function__(cls, func: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with what ``dense_for`` gives for it."""
        name = "out" if "out" in (kwargs or {}) else getattr(func, "__name__", str(func))
        dense: Any = functools.partial(_dense, name)
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    @property
    def data(self) -> Any:
        """These facts."""
        return self

    @property
    def ndim(self) -> int:
        """2."""
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        """Whether the layer runs on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:
        """Whether the layer waits for its state on the meta device."""
        return self.device.type == "meta"

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one extent of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 2."""
        return len(self.shape)

    def numel(self) -> int:
        """Return N × K."""
        return self.shape.numel()

    nelement = numel

    def element_size(self) -> int:
        """Return the bytes of one element of ``dtype``; ``nbytes`` are those of the packed weight."""
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Return True, as for the dense weight."""
        return self.dtype.is_floating_point

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # noqa: FBT001, FBT002  # as torch's
        """Return this, which needs no gradient.

        Raises:
            PackedWeightError: It should need one.
        """
        if requires_grad:
            self.dense_for("requires_grad_")
        return self

    def __len__(self) -> int:
        """Return N."""
        return self.shape[0]

    def __bool__(self) -> bool:
        """Return True: there is a weight."""
        return True


def _set(self: WeightInfo, name: str, value: object) -> None:
    """Accept that no gradient is needed, which is so, and nothing else."""
    if name != "requires_grad" or value:
        self.dense_for(f"{name} =")


def _dense(name: str, item: Any) -> Any:
    return item.dense_for(name) if isinstance(item, WeightInfo) else item


def _operator(name: str) -> Callable[..., Any]:
    """Return an operator of tensors for weights, as Python looks for operators in the class alone."""

    def operate(self: WeightInfo, *args: Any) -> Any:
        return getattr(self.dense_for(name), name)(*args)

    return operate


setattr(WeightInfo, "__setattr__", _set)  # noqa: B010  # attrs allows none of its own in a frozen class
for _name in _OPERATORS:
    setattr(WeightInfo, f"__{_name}__", _operator(f"__{_name}__"))
