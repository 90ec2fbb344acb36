"""``ToyKernel``: a right kernel backend in numpy, small enough that faults can be planted in it one at a time.

It reads packed codes a slice of out-features at a time and never holds a dense weight, so that it is a kernel by the
kit's own measure. It serves every format, packing, scale kind and feature, exactly or with int8 activations.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from q4_conformance.oracle.decoding import code_positions, decode_offsets, decode_scales
from q4core import (
    BUILTIN_FORMATS,
    BlockOrder,
    Capabilities,
    Feature,
    Form,
    KernelPath,
    PackedWeight,
    PathKind,
    Precision,
    PrepareContext,
    Prepared,
    Request,
    ScaleKind,
    Support,
    Tier,
    WeightSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from q4core import Packing

__all__ = ["Calls", "Floats", "Spoils", "ToyKernel", "function_of"]

Floats: TypeAlias = "NDArray[np.float32]"

_SLICE_ELEMENTS = 1 << 13
_PIECE_ROWS = 32
"""With slices of that size too little for BLAS to share among threads, which wait long for one another when the
machine is busy."""
_INT8_BLOCK = 32
_GEMV_ROWS = 16


@functools.lru_cache(maxsize=8)
def _positions(count: int, packing: Packing) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    byte, shift = code_positions(count, packing)
    return byte, shift.astype(np.uint8)


class ToyKernel:
    """The backend; planted faults override single methods.

    Args:
        name: Its name.
        **capabilities: Fields of the manifest that differ.
    """

    api_version = (2, 0)

    def __init__(self, name: str = "toy", **capabilities: Any) -> None:
        self.name = name
        self.held: dict[Any, Any] = {}  # state of a fault between calls
        declared: dict[str, Any] = {
            "formats": frozenset(BUILTIN_FORMATS),
            "scale_kinds": frozenset(ScaleKind),
            "devices": {"cpu"},
            "dtypes": {torch.float32, torch.bfloat16, torch.float16},
            "precisions": {Precision.W4A32, Precision.W4A16, Precision.W4A8},
            "features": frozenset(Feature),
        }
        self.capabilities = Capabilities(**(declared | capabilities))

    # -- the contract

    def check(self, request: Request) -> Support:
        """Offer a path for few rows and one for many, and an int8 path for all."""
        exact = Precision.W4A32 if request.dtype == torch.float32 else Precision.W4A16
        kind = PathKind.KERNEL
        paths = [
            KernelPath(f"gemv_{exact.value}", (1, _GEMV_ROWS), kind, exact, Tier.GENERIC),
            KernelPath(f"gemm_{exact.value}", (_GEMV_ROWS + 1, None), kind, exact, Tier.GENERIC),
        ]
        if Precision.W4A8 in self.capabilities.precisions:
            paths.append(KernelPath("dot_w4a8", (1, None), kind, Precision.W4A8, Tier.TUNED))
        return Support.yes(paths, native_state="numpy")

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Copy the packed tensors, and resolve the scales."""
        del request, context
        self.on_prepare(weight)
        tensors = [tensor.clone() for _, tensor in weight.tensors()]
        return self.prepared(weight, Prepared((*tensors, torch.from_numpy(self.scales(weight))), WeightSpec.of(weight)))

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> PackedWeight:
        """Return the weight, whole or some rows of it."""
        weight = self.weight(self.own(prepared))
        return weight if rows is None else weight.take_rows(rows)

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        """Compute in float32 and round once."""
        prepared = self.own(prepared)
        y = self.product(self.weight(prepared), prepared.tensors[-1].numpy(), x, path)
        if bias is not None:
            y = self.add_bias(y, bias.detach().to(torch.float32).numpy())
        self.write(torch.from_numpy(y), out)

    # -- the parts that faults override

    def on_prepare(self, weight: PackedWeight) -> None:
        """Act before a weight is prepared."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        """Return what ``prepare`` returns."""
        del weight
        return prepared

    def own(self, prepared: Prepared) -> Prepared:
        """Return what ``prepare`` gave as all else here reads it."""
        return prepared

    def weight(self, prepared: Prepared) -> PackedWeight:
        """Return the prepared tensors as a weight."""
        spec = prepared.meta
        if not isinstance(spec, WeightSpec):
            raise TypeError(f"prepared.meta must be a WeightSpec, got {type(spec).__name__}")
        return spec.build(prepared.tensors[:-1])

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        """Return x in float32, in the order of the stored columns, with its channels scaled, quantised if need be."""
        values: Floats = x.detach().to(torch.float32).numpy()
        if weight.input_channel_scale is not None:
            values = values * weight.input_channel_scale.to(torch.float32).numpy()
        if weight.input_permutation is not None:
            values = values[:, weight.input_permutation.numpy()]
        return self.quantised(values) if path == "dot_w4a8" else values

    def quantised(self, values: Floats) -> Floats:
        """Return values rounded to int8 times a scale per block, where they are finite."""
        rows, columns = values.shape
        padded = np.zeros((rows, -(-columns // _INT8_BLOCK) * _INT8_BLOCK), np.float32)
        padded[:, :columns] = values
        blocks = padded.reshape(rows, -1, _INT8_BLOCK)
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        with np.errstate(invalid="ignore", divide="ignore"):
            whole = np.where(scale > 0, np.rint(blocks / scale), 0) * scale
        result: Floats = np.where(np.isfinite(scale), whole, np.nan).astype(np.float32)
        return result.reshape(rows, -1)[:, :columns]

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        """Return ``x @ wᵀ``, float32 [M, N]."""
        values = self.inputs(weight, x, path)
        step = max(1, _SLICE_ELEMENTS // weight.in_features)
        y = np.empty((x.shape[0], weight.out_features), np.float32)
        for start in range(0, weight.out_features, step):
            stop = min(start + step, weight.out_features)
            with np.errstate(invalid="ignore", over="ignore"):
                dense = self.rows(weight, scales, start, stop)
                for row in range(0, len(y), _PIECE_ROWS):
                    piece = slice(row, row + _PIECE_ROWS)
                    y[piece, start:stop] = self.accumulate(values[piece], dense)
        return y

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        """Return ``values @ denseᵀ`` in float32."""
        result: Floats = values @ dense.T
        return result

    def scales(self, weight: PackedWeight) -> Floats:
        """Return the resolved scales."""
        return decode_scales(weight)

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the codes of rows ``start … stop``, uint8 [R, K]."""
        columns, mask = weight.in_features, 2**weight.format.bits - 1
        if weight.blocks is BlockOrder.FLAT:
            byte, shift = _positions(stop * columns, weight.packing)
            line = weight.qdata.numpy()[byte[start * columns :]] >> shift[start * columns :]
            flat: NDArray[np.uint8] = (line & mask).astype(np.uint8)
            return flat.reshape(stop - start, columns)
        byte, shift = _positions(columns, weight.packing)
        lines = weight.qdata[start:stop].reshape(stop - start, -1).numpy()
        codes: NDArray[np.uint8] = (lines.take(byte, axis=1) >> shift) & np.uint8(mask)
        return codes

    def spread(self, weight: PackedWeight, numbers: NDArray[Any], start: int, stop: int) -> Floats:
        """Return one number per element of rows ``start … stop`` from one per block."""
        columns = weight.in_features
        if weight.blocks is BlockOrder.FLAT:
            owner = np.arange(start * columns, stop * columns) // weight.block_size
            return numbers[owner].astype(np.float32).reshape(stop - start, columns)
        return np.repeat(numbers[start:stop].astype(np.float32), weight.block_size, axis=1)[:, :columns]

    def rows(self, weight: PackedWeight, scales: Floats, start: int, stop: int) -> Floats:
        """Return the weights of rows ``start … stop``, float32 [R, K]."""
        codes = self.codes(weight, start, stop)
        scale = self.spread(weight, scales, start, stop)
        if weight.format.form is Form.INTEGER:
            zero: Any = float(weight.format.middle)
            if weight.zero is not None:
                zero = self.spread(weight, _as_numpy(weight.zero), start, stop)
            integer: Floats = (codes.astype(np.float32) - zero) * scale
            return integer
        table = weight.format.codebook if weight.codebook is None else weight.codebook.tolist()
        dense: Floats = np.asarray(table, np.float32).take(codes) * scale
        return dense if weight.offset is None else self.add_offset(weight, dense, start, stop)

    def add_offset(self, weight: PackedWeight, dense: Floats, start: int, stop: int) -> Floats:
        """Return the weights with their blocks' offsets."""
        offsets = decode_offsets(weight)
        return dense if offsets is None else dense + self.spread(weight, offsets, start, stop)

    def add_bias(self, y: Floats, bias: Floats) -> Floats:
        """Return y + bias."""
        return y + bias

    def write(self, y: Tensor, out: Tensor) -> None:
        """Round to out's dtype."""
        out.copy_(y)


class Spoils(ToyKernel):
    """Changes the result where a number of rows meets a condition."""

    def spoil(self, y: Floats) -> None:
        """Change the result."""
        raise NotImplementedError

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        """Return the product, changed."""
        y = super().product(weight, scales, x, path)
        self.spoil(y)
        return y


class Calls(ToyKernel):
    """Changes a part of a call: the bias before it, or what is in ``out`` after it; on some paths alone."""

    paths = ""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        """Compute with what is changed."""
        given = None if bias is None else self.bias(bias.detach())
        before = out.clone()
        super().linear(prepared, x, out, bias=given, path=path)
        if path.startswith(self.paths):
            self.after(x, out, before)

    def bias(self, bias: Tensor) -> Tensor:
        """Return the bias as it is read."""
        return bias

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        """Change the result; ``before`` is its earlier content."""


def _as_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as numpy knows it; bfloat16, which it does not, in float32."""
    array: NDArray[Any] = (tensor.to(torch.float32) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def function_of(backend: ToyKernel) -> Callable[..., Tensor]:
    """Return ``fn(x, weight, bias, out=None)`` that computes as a backend does, without the core around it."""

    def function(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        request = Request.for_weight(weight, dtype=x.dtype)
        prepared = backend.prepare(weight, request, PrepareContext(x.device))
        flat = x.reshape(-1, weight.in_features)
        y = torch.empty((flat.shape[0], weight.out_features), dtype=x.dtype)
        paths = backend.check(request).paths
        path = next((item.name for item in paths if item.covers(max(1, len(flat)))), paths[0].name)
        if len(flat):
            backend.linear(prepared, flat, y, bias=bias, path=path)
        y = y.reshape(*x.shape[:-1], weight.out_features)
        return y if out is None else out.copy_(y)

    return function
