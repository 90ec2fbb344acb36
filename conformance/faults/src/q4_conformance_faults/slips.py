"""Slips that real kernels have had: at sizes that no vector divides, at odd addresses, over what others left."""
# ruff: noqa: ARG002, D102 - each slip looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance_faults.boundary import Differentiates
from q4_conformance_faults.fault import LONG, NF4, TAIL, backend_fault, numeric_fault
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import ScaleKind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from q4core import PackedWeight, PrepareContext, Prepared, Request

_VECTOR, _TILE, _ROWS, _LINE = 8, 128, 4096, 16


class _Calls(ToyKernel):
    """What of a call a slip changes: the bias before it, or what stands in ``out`` after it; of some paths alone."""

    paths = ""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        given = None if bias is None else self.bias(bias.detach())
        before = out.clone()
        super().linear(prepared, x, out, bias=given, path=path)
        if path.startswith(self.paths):
            self.after(x, out, before)

    def bias(self, bias: Tensor) -> Tensor:
        """Return the bias as it is read."""
        return bias

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        """Change the result; ``before`` is what stood there."""


@backend_fault("adds-bias-by-vectors", f"TC-09/bias/{TAIL}/float32/exact", "out_of_bound")
class BiasByVectors(_Calls):
    """Adds the bias by vectors of 8, and not to the columns beyond the last whole one."""

    def bias(self, bias: Tensor) -> Tensor:
        read = bias.clone()
        read[len(read) // _VECTOR * _VECTOR :] = 0
        return read


@backend_fault("reads-bias-from-line", f"TC-09/bias/{NF4}/float32/exact", "non_finite")
class BiasFromLine(_Calls):
    """Reads the bias from the multiple of 16 bytes below its address."""

    def bias(self, bias: Tensor) -> Tensor:
        before = min(bias.data_ptr() % _LINE // bias.element_size(), bias.storage_offset())
        return bias.as_strided(bias.shape, (1,), bias.storage_offset() - before)


@backend_fault("converts-bias-by-address", f"EX-03/changed/{NF4}/float32/exact", "another x and bias")
class BiasByAddress(_Calls):
    """Converts each bias once, by its address."""

    def bias(self, bias: Tensor) -> Tensor:
        kept: Tensor = self.kept.setdefault(bias.data_ptr(), (bias, bias.clone()))[1]
        return kept


@backend_fault("stores-by-line", f"TC-09/out/{NF4}/float32/exact", "non_finite")
class StoresByLine(_Calls):
    """Leaves as many of the last elements unwritten as ``out`` begins beside a multiple of 16 bytes."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        beside = out.data_ptr() % _LINE // out.element_size()
        if beside:
            out.view(-1)[-beside:] = before.view(-1)[-beside:]


@backend_fault("stores-past-end", f"EX-08/unmodified/{TAIL}/float32/exact", "beside out=")
class StoresPastEnd(_Calls):
    """Stores each row by vectors of 8, the last one past the end."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        room = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset() - out.numel()
        past = min(-out.shape[1] % _VECTOR, room)
        if past:
            out.as_strided((past,), (1,), out.storage_offset() + out.numel()).zero_()


@backend_fault("leaves-zero-rows-out", f"EX-10/zeros/{NF4}/float32/exact", "non_finite")
class LeavesZeroRowsOut(_Calls):
    """Takes rows of zeros for padding that nobody reads."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        zero = (x == 0).all(dim=1)
        out[zero] = before[zero]


@backend_fault("divides-by-zero-blocks", f"EX-10/zeros/{NF4}/float32/int8", "non_finite")
class DividesByZeroBlocks(ToyKernel):
    """Makes NaN of int8 blocks that are all zeros, by the largest of them."""

    def quantised(self, values: Floats) -> Floats:
        result = super().quantised(values)
        blocks = values.reshape(len(values), -1, _VECTOR)
        result.reshape(blocks.shape)[~blocks.any(axis=-1)] = np.nan
        return result


@backend_fault("loses-corner-tile", "EX-01/tiles", "M = 131: out_of_bound")
class LosesCornerTile(_Calls):
    """Computes no tile that is beyond the first of 128 both ways."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        out[_TILE:, _TILE:] = 0


@backend_fault("loses-rows-beyond-4096", "EX-01/many", "M = 4099: out_of_bound")
class LosesRowsBeyond4096(_Calls):
    """Has a grid for 4,096 rows."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        out[_ROWS:] = 0


@backend_fault("loses-rows-of-64", f"EX-01/rows/{NF4}/float32/exact", "M = 50")
class LosesRowsOf64(_Calls):
    """Leaves the last 8 rows out in its code for 49 to 64 of them."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        if 49 <= len(out) <= 64:  # noqa: PLR2004  # as it says
            out[-8:] = 0


@numeric_fault("splits-unevenly", f"EX-01/long/{LONG}/float32/exact")
class SplitsUnevenly(ToyKernel):
    """Splits long rows among 8 by whole blocks, and leaves the rest of these to nobody."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        columns = values.shape[1]
        kept = columns // _TILE // _VECTOR * _TILE * _VECTOR if columns >= _ROWS else columns
        return super().accumulate(values[:, :kept], dense[:, :kept])


@numeric_fault("adds-in-any-order", f"EX-03/repeat/{LONG}/float32/exact", "other bits")
class AddsInAnyOrder(ToyKernel):
    """Adds eight parts of long rows in the order in which they are ready."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        if values.shape[1] < _ROWS:
            return super().accumulate(values, dense)
        pieces = zip(np.array_split(values, _VECTOR, axis=1), np.array_split(dense, _VECTOR, axis=1), strict=True)
        parts = [super(AddsInAnyOrder, self).accumulate(*piece) for piece in pieces]
        total = np.zeros_like(parts[0])
        for index in np.random.default_rng().permutation(_VECTOR):
            total += parts[index]
        return total


@numeric_fault("goes-through-half", f"EX-10/large/{NF4}/bfloat16/exact", "non_finite")
class GoesThroughHalf(ToyKernel):
    """Takes bfloat16 through float16."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, x.to(torch.float16) if x.dtype is torch.bfloat16 else x, path)


@numeric_fault("flushes-small", f"EX-10/small/{NF4}/float32/exact", "all_zero")
class FlushesSmall(ToyKernel):
    """Takes activations below 2^-24 for zero."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        return np.where(np.abs(values) < 2.0**-24, np.float32(0), values)


@numeric_fault("takes-scales-for-half", "TC-09/values/nf4-plain-high_first-48x256b64-scale_bfloat16-s0/float32/exact")
class TakesScalesForHalf(ToyKernel):
    """Takes the bytes of bfloat16 scales for float16."""

    def scales(self, weight: PackedWeight) -> Floats:
        if weight.scale.dtype is torch.bfloat16 and weight.scale_kind is ScaleKind.PLAIN:
            weight = attrs.evolve(weight, scale=weight.scale.view(torch.float16))
        return super().scales(weight)


@numeric_fault("counts-blocks-in-bytes", "TC-09/values/nf4-plain-high_first-5x1024b512-s0/float32/exact")
class CountsBlocksInBytes(ToyKernel):
    """Counts within a block in 8 bits."""

    def spread(self, weight: PackedWeight, numbers: NDArray[Any], start: int, stop: int) -> Floats:
        spread = super().spread(weight, numbers, start, stop)
        return spread if weight.block_size <= 256 else np.roll(spread, 256, axis=1)  # noqa: PLR2004  # 8 bits


@backend_fault("reads-through-gaps", f"TC-11/cut/{NF4}/float32/exact")
class ReadsThroughGaps(ToyKernel):
    """Reads scales as if their rows followed one another without a gap."""

    def scales(self, weight: PackedWeight) -> Floats:
        scale = weight.scale
        if not scale.is_contiguous():
            shape = scale.shape
            weight = attrs.evolve(weight, scale=scale.as_strided((shape.numel(),), (1,)).view(shape).clone())
        return super().scales(weight)


@backend_fault("keeps-last-block-size", f"EX-04/neighbours/{NF4}/float32/exact", "among")
class KeepsLastBlockSize(ToyKernel):
    """Keeps the block size of the layer that was prepared last for all of them."""

    _block_size = 0

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        self._block_size = weight.block_size
        return super().prepare(weight, request, context)

    def spread(self, weight: PackedWeight, numbers: NDArray[Any], start: int, stop: int) -> Floats:
        columns = weight.in_features
        owner = np.minimum(np.arange(columns) // self._block_size, numbers.shape[-1] - 1)
        if numbers.ndim == 1:  # flat blocks
            return super().spread(weight, numbers, start, stop)
        return numbers[start:stop].astype(np.float32)[:, owner]


@backend_fault("pads-over-leavings", f"EX-04/neighbours/{NF4}/float32/exact", "non_finite")
class PadsOverLeavings(ToyKernel):
    """Pads rows in a scratch that is cleared once only: what another layer left there meets weights of zero."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._scratch = threading.local()

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        rows, columns = values.shape
        scratch = self._scratch.__dict__.setdefault("values", np.zeros((32, 512), np.float32))
        if columns > scratch.shape[1]:
            return super().accumulate(values, dense)
        scratch[:rows, :columns] = values
        padded = np.zeros((len(dense), scratch.shape[1]), np.float32)
        padded[:, :columns] = dense
        return super().accumulate(scratch[:rows], padded)


@backend_fault("makes-table-in-default-dtype", "EX-03/modes", "default dtype bfloat16")
class MakesTableInDefaultDtype(ToyKernel):
    """Rounds scales to torch's default dtype."""

    def scales(self, weight: PackedWeight) -> Floats:
        scales = torch.from_numpy(super().scales(weight))
        dtype = torch.get_default_dtype()
        return (scales.to(dtype) if dtype.itemsize < scales.itemsize else scales).to(torch.float32).numpy()


@backend_fault("seeds-in-prepare", "EX-08/settings", "making the first layer changed torch's random state")
class SeedsInPrepare(ToyKernel):
    """Seeds torch's generator for the inputs that it tunes by."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        torch.manual_seed(0)
        return super().prepare(weight, request, context)


@backend_fault("keeps-one-thread", "EX-08/settings", "changed the number of threads")
class KeepsOneThread(_Calls):
    """Tells torch to use one thread, and never tells it back."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        torch.set_num_threads(1)


@backend_fault("dies-with-its-threads", "EX-15/forked", "forked after a call")
class DiesWithItsThreads(_Calls):
    """Waits for threads that were made at its first call, which a forked process does not have."""

    _owner = 0

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        self._owner = self._owner or os.getpid()
        if os.getpid() != self._owner:
            threading.Event().wait()


@backend_fault("keeps-scratch-per-rows", "TC-18/varied", "numbers of rows")
class KeepsScratchPerRows(_Calls):
    """Keeps a result for each number of rows that it ever saw."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        self.kept.setdefault(len(out), out.clone())


@backend_fault("keeps-scratch-per-thread", "TC-18/varied", "threads")
class KeepsScratchPerThread(_Calls):
    """Keeps 256 KiB for each thread that ever called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._own = threading.local()

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        if "scratch" not in self._own.__dict__:
            self._own.scratch = np.ones(1 << 18, np.uint8)
            self.kept[len(self.kept)] = self._own.scratch


@backend_fault("seeds-in-int8", f"EX-08/settings/{NF4}/float32/int8", "changed torch's random state")
class SeedsInInt8(_Calls):
    """Seeds torch's generator in each int8 call."""

    paths = "dot_w4a8"

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        torch.manual_seed(0)


@backend_fault("keeps-int8-per-rows", f"TC-18/varied/{NF4}/float32/int8", "numbers of rows")
class KeepsInt8PerRows(KeepsScratchPerRows):
    """Keeps an int8 result for each number of rows that it ever saw."""

    paths = "dot_w4a8"


@backend_fault("rounds-int8-to-default", f"EX-03/modes/{NF4}/float32/int8", "default dtype bfloat16")
class RoundsInt8ToDefault(_Calls):
    """Rounds int8 results to torch's default dtype."""

    paths = "dot_w4a8"

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        out.copy_(out.to(torch.get_default_dtype()))


@backend_fault("loses-int8-in-forks", f"EX-15/forked/{NF4}/float32/int8", "the pool is gone")
class LosesInt8InForks(_Calls):
    """Raises in int8 calls of a process that was forked from the one that made it."""

    paths = "dot_w4a8"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._home = os.getpid()

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        if os.getpid() != self._home:
            raise RuntimeError("the pool is gone")


@backend_fault("gradient-of-64-rows", f"EX-05/gradient/{TAIL}/float32/exact", "M = 129, gradient")
class GradientOf64Rows(Differentiates):
    """Leaves out what lies beyond 64 rows in its gradient."""

    def input_gradient(self, prepared: Prepared, grad: Tensor, out: Tensor, *, path: str) -> None:
        super().input_gradient(prepared, grad, out, path=path)
        out[64:] = 0
