"""Slips that real kernels have had: at sizes that no vector divides, at odd addresses, over what others left."""
# ruff: noqa: ARG002 - each slip looks at some of what it is given

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance_faults.boundary import Differentiates
from q4_conformance_faults.fault import Fault
from q4_conformance_faults.toy import ToyKernel
from q4core import ScaleKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import PackedWeight, PrepareContext, Prepared, Request

__all__ = ["SLIP_FAULTS"]

_VECTOR, _TILE, _ROWS, _LINE = 8, 128, 4096, 16


class _Calls(ToyKernel):
    """What of a call a slip changes: the bias before it, or what stands in ``out`` after it."""

    def linear(
        self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        given = None if bias is None else self.bias(bias.detach())
        before = out.clone()
        super().linear(prepared, x, out, bias=given, path=path)
        self.after(x, out, before)

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias as it is read."""
        return bias

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        """Change the result; ``before`` is what stood there."""


class BiasByVectors(_Calls):
    """Adds the bias by vectors of 8, and not to the columns beyond the last whole one."""

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        read = bias.clone()
        read[len(read) // _VECTOR * _VECTOR :] = 0
        return read


class BiasFromLine(_Calls):
    """Reads the bias from the multiple of 16 bytes below its address."""

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        before = min(bias.data_ptr() % _LINE // bias.element_size(), bias.storage_offset())
        return bias.as_strided(bias.shape, (1,), bias.storage_offset() - before)


class BiasByAddress(_Calls):
    """Converts each bias once, by its address."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        return self._seen.setdefault(bias.data_ptr(), (bias, bias.clone()))[1]


class StoresByLine(_Calls):
    """Leaves as many of the last elements unwritten as ``out`` begins beside a multiple of 16 bytes."""

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        beside = out.data_ptr() % _LINE // out.element_size()
        if beside:
            out.view(-1)[-beside:] = before.view(-1)[-beside:]


class StoresPastEnd(_Calls):
    """Stores each row by vectors of 8, the last one past the end."""

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        room = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset() - out.numel()
        past = min(-out.shape[1] % _VECTOR, room)
        if past:
            out.as_strided((past,), (1,), out.storage_offset() + out.numel()).zero_()


class LeavesZeroRowsOut(_Calls):
    """Takes rows of zeros for padding that nobody reads."""

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        zero = (x == 0).all(dim=1)
        out[zero] = before[zero]


class DividesByZeroBlocks(ToyKernel):
    """Makes NaN of int8 blocks that are all zeros, by the largest of them."""

    def quantised(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        result = super().quantised(values)
        blocks = values.reshape(len(values), -1, _VECTOR)
        result.reshape(blocks.shape)[~blocks.any(axis=-1)] = np.nan
        return result


class LosesCornerTile(_Calls):
    """Computes no tile that is beyond the first of 128 both ways."""

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        out[_TILE:, _TILE:] = 0


class LosesRowsBeyond4096(_Calls):
    """Has a grid for 4,096 rows."""

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        out[_ROWS:] = 0


class LosesRowsOf64(_Calls):
    """Leaves the last 8 rows out in its code for 49 to 64 of them."""

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        if 49 <= len(out) <= 64:  # noqa: PLR2004  # as it says
            out[-8:] = 0


class SplitsUnevenly(ToyKernel):
    """Splits long rows among 8 by whole blocks, and leaves the rest of these to nobody."""

    def accumulate(self, values: NDArray[np.float32], dense: NDArray[np.float32]) -> NDArray[np.float32]:
        columns = values.shape[1]
        kept = columns // _TILE // _VECTOR * _TILE * _VECTOR if columns >= _ROWS else columns
        return super().accumulate(values[:, :kept], dense[:, :kept])


class AddsInAnyOrder(ToyKernel):
    """Adds eight parts of long rows in the order in which they are ready."""

    def accumulate(self, values: NDArray[np.float32], dense: NDArray[np.float32]) -> NDArray[np.float32]:
        if values.shape[1] < _ROWS:
            return super().accumulate(values, dense)
        pieces = zip(np.array_split(values, _VECTOR, axis=1), np.array_split(dense, _VECTOR, axis=1), strict=True)
        parts = [super(AddsInAnyOrder, self).accumulate(*piece) for piece in pieces]
        total = np.zeros_like(parts[0])
        for index in np.random.default_rng().permutation(_VECTOR):
            total += parts[index]
        return total


class GoesThroughHalf(ToyKernel):
    """Takes bfloat16 through float16."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        return super().inputs(weight, x.to(torch.float16) if x.dtype is torch.bfloat16 else x, path)


class FlushesSmall(ToyKernel):
    """Takes activations below 2^-24 for zero."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        values = super().inputs(weight, x, path)
        return np.where(np.abs(values) < 2.0**-24, np.float32(0), values)


class TakesScalesForHalf(ToyKernel):
    """Takes the bytes of bfloat16 scales for float16."""

    def scales(self, weight: PackedWeight) -> NDArray[np.float32]:
        if weight.scale.dtype is torch.bfloat16 and weight.scale_kind is ScaleKind.PLAIN:
            weight = attrs.evolve(weight, scale=weight.scale.view(torch.float16))
        return super().scales(weight)


class CountsBlocksInBytes(ToyKernel):
    """Counts within a block in 8 bits."""

    def spread(self, weight: PackedWeight, numbers: NDArray[Any], start: int, stop: int) -> NDArray[np.float32]:
        spread = super().spread(weight, numbers, start, stop)
        return spread if weight.block_size <= 256 else np.roll(spread, 256, axis=1)  # noqa: PLR2004  # 8 bits


class ReadsThroughGaps(ToyKernel):
    """Reads scales as if their rows followed one another without a gap."""

    def scales(self, weight: PackedWeight) -> NDArray[np.float32]:
        scale = weight.scale
        if not scale.is_contiguous():
            shape = scale.shape
            weight = attrs.evolve(weight, scale=scale.as_strided((shape.numel(),), (1,)).view(shape).clone())
        return super().scales(weight)


class KeepsLastBlockSize(ToyKernel):
    """Keeps the block size of the layer that was prepared last for all of them."""

    _block_size = 0

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        self._block_size = weight.block_size
        return super().prepare(weight, request, context)

    def spread(self, weight: PackedWeight, numbers: NDArray[Any], start: int, stop: int) -> NDArray[np.float32]:
        columns = weight.in_features
        owner = np.minimum(np.arange(columns) // self._block_size, numbers.shape[-1] - 1)
        if numbers.ndim == 1:  # flat blocks
            return super().spread(weight, numbers, start, stop)
        return numbers[start:stop].astype(np.float32)[:, owner]


class PadsOverLeavings(ToyKernel):
    """Pads rows in a scratch that is cleared once only: what another layer left there meets weights of zero."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._scratch = threading.local()

    def accumulate(self, values: NDArray[np.float32], dense: NDArray[np.float32]) -> NDArray[np.float32]:
        rows, columns = values.shape
        scratch = self._scratch.__dict__.setdefault("values", np.zeros((32, 512), np.float32))
        if columns > scratch.shape[1]:
            return super().accumulate(values, dense)
        scratch[:rows, :columns] = values
        padded = np.zeros((len(dense), scratch.shape[1]), np.float32)
        padded[:, :columns] = dense
        return super().accumulate(scratch[:rows], padded)


class MakesTableInDefaultDtype(ToyKernel):
    """Rounds scales to torch's default dtype."""

    def scales(self, weight: PackedWeight) -> NDArray[np.float32]:
        scales = torch.from_numpy(super().scales(weight))
        dtype = torch.get_default_dtype()
        return (scales.to(dtype) if dtype.itemsize < scales.itemsize else scales).to(torch.float32).numpy()


class SeedsInPrepare(ToyKernel):
    """Seeds torch's generator for the inputs that it tunes by."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        torch.manual_seed(0)
        return super().prepare(weight, request, context)


class KeepsOneThread(_Calls):
    """Tells torch to use one thread, and never tells it back."""

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        torch.set_num_threads(1)


class DiesWithItsThreads(_Calls):
    """Waits for threads that were made at its first call, which a forked process does not have."""

    _owner = 0

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        self._owner = self._owner or os.getpid()
        if os.getpid() != self._owner:
            threading.Event().wait()


class KeepsScratchPerRows(_Calls):
    """Keeps a result for each number of rows that it ever saw."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: dict[int, torch.Tensor] = {}

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        self._kept.setdefault(len(out), out.clone())


class KeepsScratchPerThread(_Calls):
    """Keeps 256 KiB for each thread that ever called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._own = threading.local()
        self._kept: list[NDArray[np.uint8]] = []

    def after(self, x: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> None:
        if "scratch" not in self._own.__dict__:
            self._own.scratch = np.ones(1 << 18, np.uint8)
            self._kept.append(self._own.scratch)


class _CoarseCalls(ToyKernel):
    """What a slip does in calls of the int8 path alone."""

    def linear(
        self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if path == "dot_w4a8":
            self.after_int8(out)

    def after_int8(self, out: torch.Tensor) -> None:
        """Do it."""


class SeedsInInt8(_CoarseCalls):
    """Seeds torch's generator in each int8 call."""

    def after_int8(self, out: torch.Tensor) -> None:
        torch.manual_seed(0)


class KeepsInt8PerRows(_CoarseCalls):
    """Keeps an int8 result for each number of rows that it ever saw."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: dict[int, torch.Tensor] = {}

    def after_int8(self, out: torch.Tensor) -> None:
        self._kept.setdefault(len(out), out.clone())


class RoundsInt8ToDefault(_CoarseCalls):
    """Rounds int8 results to torch's default dtype."""

    def after_int8(self, out: torch.Tensor) -> None:
        out.copy_(out.to(torch.get_default_dtype()))


class LosesInt8InForks(_CoarseCalls):
    """Raises in int8 calls of a process that was forked from the one that made it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._home = os.getpid()

    def after_int8(self, out: torch.Tensor) -> None:
        if os.getpid() != self._home:
            raise RuntimeError("the pool is gone")


class GradientOf64Rows(Differentiates):
    """Leaves out what lies beyond 64 rows in its gradient."""

    def input_gradient(self, prepared: Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
        super().input_gradient(prepared, grad, out, path=path)
        out[64:] = 0


_NF4 = "nf4-plain-high_first-48x256b64-s0"
_TAIL = "nf4-plain-high_first-67x192b64-s0"
_LONG = "nf4-plain-high_first-8x14400b64-s0"
_WITH_CORE: dict[str, Any] = {"is_numeric": False}
_SEEN_BY_PROBE: dict[str, Any] = {"passes_probe": False}

SLIP_FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format="nf4", caught_by=case, says=says, **facts)
    for name, make, case, says, facts in (
        ("adds-bias-by-vectors", BiasByVectors, f"TC-09/bias/{_TAIL}/float32/exact", "out_of_bound", _WITH_CORE),
        ("reads-bias-from-line", BiasFromLine, f"TC-09/bias/{_NF4}/float32/exact", "non_finite", _WITH_CORE),
        (
            "converts-bias-by-address",
            BiasByAddress,
            f"EX-03/changed/{_NF4}/float32/exact",
            "another x and bias",
            _WITH_CORE,
        ),
        ("stores-by-line", StoresByLine, f"TC-09/out/{_NF4}/float32/exact", "non_finite", _WITH_CORE),
        ("stores-past-end", StoresPastEnd, f"EX-08/unmodified/{_TAIL}/float32/exact", "beside out=", _WITH_CORE),
        ("leaves-zero-rows-out", LeavesZeroRowsOut, f"EX-10/zeros/{_NF4}/float32/exact", "non_finite", _WITH_CORE),
        ("divides-by-zero-blocks", DividesByZeroBlocks, f"EX-10/zeros/{_NF4}/float32/int8", "non_finite", _WITH_CORE),
        ("loses-corner-tile", LosesCornerTile, "EX-01/tiles", "M = 131: out_of_bound", _WITH_CORE),
        ("loses-rows-beyond-4096", LosesRowsBeyond4096, "EX-01/many", "M = 4099: out_of_bound", _WITH_CORE),
        ("loses-rows-of-64", LosesRowsOf64, f"EX-01/rows/{_NF4}/float32/exact", "M = 50", _WITH_CORE),
        ("splits-unevenly", SplitsUnevenly, f"EX-01/long/{_LONG}/float32/exact", "probe_failed", _SEEN_BY_PROBE),
        ("adds-in-any-order", AddsInAnyOrder, f"EX-03/repeat/{_LONG}/float32/exact", "other bits", {}),
        ("goes-through-half", GoesThroughHalf, f"EX-10/large/{_NF4}/bfloat16/exact", "non_finite", {}),
        ("flushes-small", FlushesSmall, f"EX-10/small/{_NF4}/float32/exact", "all_zero", {}),
        (
            "takes-scales-for-half",
            TakesScalesForHalf,
            "TC-09/values/nf4-plain-high_first-48x256b64-scale_bfloat16-s0/float32/exact",
            "probe_failed",
            _SEEN_BY_PROBE,
        ),
        (
            "counts-blocks-in-bytes",
            CountsBlocksInBytes,
            "TC-09/values/nf4-plain-high_first-5x1024b512-s0/float32/exact",
            "probe_failed",
            _SEEN_BY_PROBE,
        ),
        (
            "reads-through-gaps",
            ReadsThroughGaps,
            f"TC-11/cut/{_NF4}/float32/exact",
            "probe_failed",
            {**_SEEN_BY_PROBE, **_WITH_CORE},
        ),
        ("keeps-last-block-size", KeepsLastBlockSize, f"EX-04/neighbours/{_NF4}/float32/exact", "among", _WITH_CORE),
        ("pads-over-leavings", PadsOverLeavings, f"EX-04/neighbours/{_NF4}/float32/exact", "non_finite", _WITH_CORE),
        ("makes-table-in-default-dtype", MakesTableInDefaultDtype, "EX-03/modes", "default dtype bfloat16", _WITH_CORE),
        (
            "seeds-in-prepare",
            SeedsInPrepare,
            "EX-08/settings",
            "making the first layer changed torch's random state",
            _WITH_CORE,
        ),
        ("keeps-one-thread", KeepsOneThread, "EX-08/settings", "changed the number of threads", _WITH_CORE),
        ("dies-with-its-threads", DiesWithItsThreads, "EX-15/forked", "forked after a call", _WITH_CORE),
        ("keeps-scratch-per-rows", KeepsScratchPerRows, "TC-18/varied", "numbers of rows", _WITH_CORE),
        ("keeps-scratch-per-thread", KeepsScratchPerThread, "TC-18/varied", "threads", _WITH_CORE),
        (
            "seeds-in-int8",
            SeedsInInt8,
            f"EX-08/settings/{_NF4}/float32/int8",
            "changed torch's random state",
            _WITH_CORE,
        ),
        ("keeps-int8-per-rows", KeepsInt8PerRows, f"TC-18/varied/{_NF4}/float32/int8", "numbers of rows", _WITH_CORE),
        (
            "rounds-int8-to-default",
            RoundsInt8ToDefault,
            f"EX-03/modes/{_NF4}/float32/int8",
            "default dtype bfloat16",
            _WITH_CORE,
        ),
        (
            "loses-int8-in-forks",
            LosesInt8InForks,
            f"EX-15/forked/{_NF4}/float32/int8",
            "the pool is gone",
            _WITH_CORE,
        ),
        (
            "gradient-of-64-rows",
            GradientOf64Rows,
            f"EX-05/gradient/{_TAIL}/float32/exact",
            "M = 129, gradient",
            _WITH_CORE,
        ),
    )
)
