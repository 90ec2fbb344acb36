"""``SparseWeight``: the synapses that exist, each with a weight of four bits and a delay of its own.

Synapses are entries, sorted by source, then by target, in the order that they were given where both are the same. An
entry has the distance from the target before it (a byte, or two where few pairs are joined), a delay (a byte), and a
code of four bits; 32 entries share a scale and an offset (Q4_1). Where a distance is larger than its byte holds,
entries without a delay, which are no synapses, take it in parts. So a synapse takes 2.63 bytes and its source 12 more,
however many targets there are; and whoever computes some targets alone finds their entries of a source in one stretch.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

import q4core as q4

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["BLOCK", "MOST_DELAY", "SparseBuilder", "SparseWeight", "add_in_order"]

BLOCK = 32
"""Entries that share a scale and an offset; there are whole blocks of them."""
MOST_DELAY = 255
_FIELDS = {
    "starts": (torch.int64,),
    "first": (torch.int32,),
    "gaps": (torch.uint8, torch.int16),
    "steps": (torch.uint8,),
    "codes": (torch.uint8,),
    "levels": (torch.int16,),
}
_GAPS = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF)}
_WIDE_FROM = 192
"""Mean distance from which two bytes for each take less than one and the entries that hold what is over."""
_PIECE = 1 << 18
"""Entries that are looked at together, so that no other number of them is ever in memory."""
_KEY, _PREFIX, _MARK = "q4_sparse", "synapses.", "sparse synapses 1"
_MOST = 1 << 31


@attrs.frozen(eq=False, slots=False)
class SparseWeight:
    """Sparse synapses in four bits: immutable, and what backends prepare that declare the op ``"sparse"``.

    The weight of an entry is ``offset + scale · code``, in float32. What a spike adds is added by the order of steps,
    sources and entries, so it has the same bits for any number of threads, each with its own targets.

    Args:
        sources: How many sources there are.
        targets: How many targets.
        starts: int64 [sources + 1], the first entry of each source; the last number is the end of all.
        first: int32 [sources], the target of a source's first entry; 0 where it has none.
        gaps: uint8 or int16 (as unsigned) [E], an entry's target minus the one before it; 0 for a source's first.
        steps: uint8 [E], the delay from 1 to 255; 0 for what is no synapse.
        codes: uint8 [E / 2], two to a byte, low bits first.
        levels: int16 [E / 32, 2], scale and offset of each block, the bits of float16.

    Raises:
        InputError: A size, a shape or a dtype does not fit; ``check`` looks at numbers as well.
    """

    sources: int
    targets: int
    starts: torch.Tensor
    first: torch.Tensor
    gaps: torch.Tensor
    steps: torch.Tensor
    codes: torch.Tensor
    levels: torch.Tensor

    def __attrs_post_init__(self) -> None:
        """Check sizes, shapes and dtypes."""
        for name, size in (("sources", self.sources), ("targets", self.targets)):
            if type(size) is not int or not 0 < size < _MOST:
                _refuse(name, f"a positive whole number below {_MOST}", size)
        count = self.steps.numel()
        shapes: dict[str, tuple[int, ...]] = {"starts": (self.sources + 1,), "first": (self.sources,)}
        shapes |= {"gaps": (count,), "steps": (count,), "codes": (count // 2,), "levels": (count // BLOCK, 2)}
        for (name, dtypes), tensor in zip(_FIELDS.items(), self.tensors(), strict=True):
            facts = tensor.dtype in dtypes, tuple(tensor.shape) == shapes[name], tensor.device == self.steps.device
            if facts != (True, True, True) or not tensor.is_contiguous() or not count or count % BLOCK:
                dtype = " or ".join(str(item).removeprefix("torch.") for item in dtypes)
                rule = f"{dtype} {[*shapes[name]]}, contiguous, of whole blocks of {BLOCK} entries"
                _refuse(name, rule, f"{tensor.dtype} {[*tensor.shape]} on {tensor.device}")

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseWeight:
        """Return itself: it does not change."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the entries that there are, without spare memory behind them."""
        return SparseWeight, (self.sources, self.targets, *(tensor.clone() for tensor in self.tensors()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return starts, first, gaps, steps, codes and levels."""
        return self.starts, self.first, self.gaps, self.steps, self.codes, self.levels

    def shared_form(self) -> tuple[Callable[..., SparseWeight], tuple[torch.Tensor, ...]]:
        """Return what makes it over other memory with the same numbers, and its tensors, for ``ActorSystem.share``."""
        return functools.partial(SparseWeight, self.sources, self.targets), self.tensors()

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.steps.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @functools.cached_property
    def synapses(self) -> int:
        """The number of synapses."""
        return sum(int(part.count_nonzero()) for part in self.steps.split(_PIECE))

    @functools.cached_property
    def longest(self) -> int:
        """The longest delay, in steps; a ring of what is on its way has one row more."""
        return int(self.steps.max())

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether every entry of a source is a synapse."""
        return self.synapses == int(self.starts[-1])

    def synapses_of(self, spiking: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return target (int64), weight (float32), delay (int64) of all synapses of sources (int64 [n]), in order."""
        return self.with_places(spiking)[1:]

    def with_places(self, spiking: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return for all synapses of sources (int64 [n]) the place of each one's source among them, then as above."""
        start = self.starts[spiking]
        counts = self.starts[spiking + 1] - start
        ends = counts.cumsum(0)
        place = torch.repeat_interleave(torch.arange(len(spiking), device=self.device), counts)
        entry = torch.arange(len(place), device=self.device) + (start - ends + counts)[place]
        gaps = self.gaps[entry].long()
        total = (gaps & 0xFFFF if self.gaps.dtype is torch.int16 else gaps).cumsum(0)
        before = (
            total[(ends - counts).clamp(max=max(len(total) - 1, 0))] if len(total) else total.new_zeros(len(spiking))
        )
        target = total + (self.first[spiking].long() - before)[place]
        steps = self.steps[entry].long()
        if not self._is_plain:
            real = steps != 0
            place, entry, target, steps = place[real], entry[real], target[real], steps[real]
        return place, target, self._weights(entry), steps

    def _weights(self, entry: torch.Tensor) -> torch.Tensor:
        code = self.codes[entry >> 1] >> ((entry & 1) * 4).to(torch.uint8) & 15
        pairs = self.levels.view(torch.int32).view(-1)[entry // BLOCK]  # a gather of single numbers is faster
        scale, offset = pairs.view(torch.float16).view(-1, 2).float().unbind(-1)
        return offset + scale * code.float()  # the product is exact

    def head(self, entries: int) -> SparseWeight:
        """Return the synapses of the first sources, up to a number of entries, over the same memory; all if it is less.

        Args:
            entries: At most so many, rounded down to whole blocks; at least a block.
        """
        count = max(entries // BLOCK, 1) * BLOCK
        if count >= len(self.steps):
            return self
        starts = self.starts.clamp(max=count)
        first = torch.where(starts[1:] > starts[:-1], self.first, 0)
        parts = self.gaps[:count], self.steps[:count], self.codes[: count // 2], self.levels[: count // BLOCK]
        return SparseWeight(self.sources, self.targets, starts, first, *parts)

    def cuts(self, bounds: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each source's entries are cut, so that each part has targets of its own.

        Args:
            bounds: Targets at which parts after the first begin, rising.

        Returns:
            int64 [sources, parts + 1], a source's entries of part p are those from [s, p] to [s, p + 1]; and int32
            [sources, parts], the target before the first of them, to which its gap is added.
        """
        parts = len(bounds) + 1
        entries = torch.empty((self.sources, parts + 1), dtype=torch.int64, device=self.device)
        targets = torch.zeros((self.sources, parts), dtype=torch.int32, device=self.device)
        entries[:, 0], entries[:, -1], targets[:, 0] = self.starts[:-1], self.starts[1:], self.first
        begins = torch.tensor([*bounds], dtype=torch.int64, device=self.device)
        for low, high, source, found in self._targets():
            first = self.starts[low:high, None]
            rows = torch.arange(high - low, device=self.device)[:, None] * self.targets
            place = torch.searchsorted(source * self.targets + found, rows + begins)
            entries[low:high, 1:-1] = place + first[0]
            before = found[(place - 1).clamp(min=0)] if len(found) else place
            is_first = place + first[0] == first
            targets[low:high, 1:] = torch.where(is_first, self.first[low:high, None].long(), before).int()
        return entries, targets

    def _targets(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yield pieces of sources: the first, the end, and of each entry the source after the first, and the target."""
        low = 0
        while low < self.sources:
            start = int(self.starts[low])
            high = int(torch.searchsorted(self.starts, torch.tensor(start + _PIECE, device=self.device), right=True))
            high = min(max(high - 1, low + 1), self.sources)
            counts = self.starts[low + 1 : high + 1] - self.starts[low:high]
            source = torch.repeat_interleave(torch.arange(high - low, device=self.device), counts)
            gaps = self.gaps[start : int(self.starts[high])].long()
            total = (gaps & 0xFFFF if self.gaps.dtype is torch.int16 else gaps).cumsum(0)
            places = (self.starts[low:high] - start).clamp(max=max(len(total) - 1, 0))
            before = total[places] if len(total) else counts
            yield low, high, source, total + (self.first[low:high].long() - before)[source]
            low = high

    def check(self) -> None:
        """Check every number, so that no entry leads out of the targets.

        Raises:
            InputError: One is illegal; the message names it.
        """
        starts, end = self.starts, int(self.starts[-1])
        if int(starts[0]) or bool((starts[1:] < starts[:-1]).any()) or not 0 <= len(self.steps) - end < BLOCK:
            _refuse("starts", f"rising from 0 to the {len(self.steps)} entries, the last block filled up", starts)
        empty = starts[1:] == starts[:-1]
        if bool(((self.first < 0) | (self.first >= self.targets) | (empty & (self.first != 0))).any()):
            _refuse("first", f"in 0 … {self.targets - 1}, and 0 for a source without entries", self.first)
        heads = self.gaps[starts[:-1][~empty]]
        if bool(heads.any()):
            _refuse("gaps", "0 for the first entry of each source", heads[heads != 0][0].item())
        if bool(self.steps[end:].any()):
            _refuse("steps", "0 behind the last source's entries", self.steps[end:].max().item())
        if not bool(self.levels.view(torch.float16).isfinite().all()):
            _refuse("levels", "finite numbers", "NaN or infinity")
        for low, _, source, found in self._targets():
            if len(found) and int(found.max()) >= self.targets:
                place = int(found.argmax())
                rule = f"such that targets are below {self.targets}"
                _refuse("gaps", rule, f"{int(found[place])} for source {low + int(source[place])}")
        if not self.synapses:
            _refuse("steps", "of a synapse at least", "none")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a safetensors file, whole or not at all, and return its path.

        Raises:
            CheckpointError: The path is no safetensors file's, or can't be written.
        """
        if Path(path).suffix != ".safetensors":
            rule, value = "a file that ends in .safetensors", str(path)
            raise q4.CheckpointError("sparse synapses", name="path", rule=rule, value=value)
        facts = {"kind": _MARK, "sources": self.sources, "targets": self.targets}
        tensors = {_PREFIX + name: tensor for name, tensor in zip(_FIELDS, self.tensors(), strict=True)}
        return q4.save_checkpoint(path, {}, dialect="simple-nf4", dense=tensors, metadata={_KEY: json.dumps(facts)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, copy: bool = False) -> SparseWeight:
        """Read what ``save`` wrote, as views of the mapped file, which processes share; every number is checked.

        Args:
            path: The file. One that is cut short while it is mapped ends the process: replace files by renaming.
            copy: Read it into memory instead.

        Raises:
            CheckpointError: It can't be read, is malformed, or holds no sparse synapses; the message says what.
        """
        what, where = "sparse synapses", str(path)
        with q4.open(path, copy=copy) as checkpoint:
            text = checkpoint.metadata.get(_KEY)
            if text is None:
                hint = "Write one with SparseWeight.save."
                rule = f"a file with {_KEY} in its header"
                raise q4.CheckpointError(what, name="metadata", rule=rule, value=None, where=where, hint=hint)
            try:
                facts = json.loads(text)
            except (ValueError, RecursionError) as error:
                facts = str(error)
            is_known = isinstance(facts, dict) and facts.keys() == {"kind", "sources", "targets"}
            if not is_known or facts["kind"] != _MARK:
                rule = f"an object of kind ({_MARK!r}), sources and targets"
                raise q4.CheckpointError(what, name=f"metadata {_KEY}", rule=rule, value=facts, where=where)
            names = {_PREFIX + name for name in _FIELDS}
            if checkpoint.keys() or checkpoint.dense.keys() != names:
                found = sorted({*checkpoint} | {*checkpoint.dense})
                rule = f"exactly {', '.join(sorted(names))}"
                raise q4.CheckpointError(what, name="tensors", rule=rule, value=found, where=where)
            tensors = [checkpoint.dense[_PREFIX + name] for name in _FIELDS]
        try:
            weight = cls(facts["sources"], facts["targets"], *tensors)
            weight.check()
        except q4.InputError as error:
            facts = {"name": error.name, "rule": error.rule, "value": error.value}
            raise q4.CheckpointError(what, **facts, where=where, hint="Write the file again.") from error
        return weight

    @classmethod
    def of(  # noqa: PLR0913  # one argument per fact of a synapse, and two sizes
        cls,
        source: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        delay: torch.Tensor,
        *,
        sources: int,
        targets: int,
        label: str = "sparse synapses",
    ) -> SparseWeight:
        """Return synapses in four bits; weights become codes of Q4_1, 16 levels for each 32 neighbouring entries.

        Args:
            source: int64 [S], the index of each synapse's source.
            target: int64 [S], the index of its target; several synapses may join the same two.
            weight: float32 [S].
            delay: int64 [S], in steps, from 1 to 255.
            sources: How many sources there are.
            targets: How many targets.
            label: For messages.

        Raises:
            InputError: A tensor has the wrong shape, dtype or a value out of range, or there is no synapse.
        """
        builder = SparseBuilder(sources, targets, len(source) if source.dim() else 0, label=label)
        builder.add(source, target, weight, delay)
        return builder.finish()


def add_in_order(flat: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
    """Add values to places of a vector, one after the other; on a GPU too, whose own additions have no order.

    Args:
        flat: float32 [M], written.
        place: int64 [S], any of them several times.
        values: float32 [S].
    """
    if flat.device.type == "cpu":
        flat.index_add_(0, place, values)
    else:
        cells, which = place.unique(return_inverse=True)
        flat[cells] = flat[cells].cpu().index_add_(0, which.cpu(), values.cpu()).to(flat.device)


class SparseBuilder:
    """Makes a ``SparseWeight`` in pieces of sources, which follow one another, and holds nothing else but a piece.

    Args:
        sources: How many sources there are.
        targets: How many targets.
        synapses: The most synapses that there will be, of all pieces together.
        label: For messages.

    Raises:
        InputError: A number is not legal.
    """

    def __init__(self, sources: int, targets: int, synapses: int, *, label: str = "sparse synapses") -> None:
        self._label, self._sources, self._targets = label, sources, targets
        for name, size in (("sources", sources), ("targets", targets), ("synapses", synapses)):
            if type(size) is not int or size < 1:
                self._refuse(name, "a positive whole number", size)
        wide = sources * targets > _WIDE_FROM * synapses and targets > _GAPS[1][1]
        dtype, self._limit = _GAPS[2 if wide else 1]
        self._most = synapses
        # No more entries than these take what distances can't hold; memory that is not written costs nothing.
        room = synapses + sources * (targets // self._limit) + BLOCK
        room += -room % BLOCK
        self._starts = torch.zeros(sources + 1, dtype=torch.int64)
        self._first = torch.zeros(sources, dtype=torch.int32)
        self._gaps, self._steps = torch.empty(room, dtype=dtype), torch.empty(room, dtype=torch.uint8)
        self._codes = torch.empty(room // 2, dtype=torch.uint8)
        self._levels = torch.empty((room // BLOCK, 2), dtype=torch.int16)
        self._rest = torch.empty(0)
        """Weights of the last entries, which are no whole block yet."""
        self._count = self._synapses = self._next = 0

    def _refuse(self, name: str, rule: str, value: object) -> NoReturn:
        _refuse(name, rule, value, self._label)

    def add(self, source: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, delay: torch.Tensor) -> None:
        """Add all synapses of some sources, which come after those of the pieces before.

        Args:
            source: int64 [S]; any order within the piece, as of the others.
            target: int64 [S].
            weight: float32 [S], finite.
            delay: int64 [S], in steps, from 1 to 255.

        Raises:
            InputError: A tensor has the wrong shape, dtype or a value out of range, or there is no synapse; nothing was
                added.
        """
        for name, values, low, high in (
            ("source", source, self._next, self._sources - 1),
            ("target", target, 0, self._targets - 1),
            ("delay", delay, 1, MOST_DELAY),
        ):
            if values.dtype is not torch.int64 or values.shape != weight.shape[:1] or not len(values):
                found = f"{values.dtype} {[*values.shape]}"
                self._refuse(name, f"int64 {[*weight.shape[:1]]}, of 1 or more", found)
            least, most = map(int, torch.aminmax(values))
            if least < low or most > high:
                self._refuse(name, f"in {low} … {high}", least if least < low else most)
        if weight.dtype is not torch.float32 or weight.dim() != 1 or not bool(weight.isfinite().all()):
            self._refuse("weight", "a float32 vector of finite numbers", f"{weight.dtype} {[*weight.shape]}")
        if weight.requires_grad:
            rule = "without gradients, as these synapses don't train; give weight.detach()"
            self._refuse("weight", rule, type(weight).__name__)
        if self._synapses + len(source) > self._most:
            self._refuse("synapses", f"{self._most} at most, as was said", self._synapses + len(source))
        order = (source * self._targets + target).argsort(stable=True)
        source, target = source[order], target[order]
        gaps = target.diff(prepend=target[:1])
        head = source.diff(prepend=source[:1] - 1) != 0
        gaps[head] = 0
        over = ((gaps - 1) // self._limit).clamp_(min=0)
        place = torch.arange(len(over)) + over.cumsum(0)
        count = int(place[-1]) + 1
        start, end = self._count, self._count + count
        self._gaps[start:end] = self._limit if self._gaps.dtype is torch.uint8 else -1
        self._gaps[start + place] = (gaps - over * self._limit).to(self._gaps.dtype)
        self._steps[start:end] = 0
        self._steps[start + place] = delay[order].to(torch.uint8)
        self._first[source[head]] = target[head].int()
        counts = torch.zeros(self._sources - self._next, dtype=torch.int64)
        counts.index_add_(0, source - self._next, over + 1)
        torch.cumsum(counts, 0, out=self._starts[self._next + 1 :])
        self._starts[self._next + 1 :] += start
        self._next, self._count, self._synapses = int(source[-1]) + 1, end, self._synapses + len(source)
        self._write(torch.cat([self._rest, weight[order].repeat_interleave(over + 1)]))

    def _write(self, weight: torch.Tensor) -> None:
        """Write codes, scales and offsets of whole blocks, and keep the weights of the rest."""
        block = (self._count - len(weight)) // BLOCK
        whole, self._rest = weight[: len(weight) // BLOCK * BLOCK], weight[len(weight) // BLOCK * BLOCK :].clone()
        for part in whole.split(_PIECE) if len(whole) else ():
            packed = q4.quantize(part[None], "q4_1")
            codes = q4.unpack_codes(packed.qdata, packed.packing).view(-1, 2)
            if packed.offset is None:
                raise TypeError("a weight of Q4_1 has offsets")
            blocks = len(part) // BLOCK
            self._codes[block * BLOCK // 2 : (block + blocks) * BLOCK // 2] = codes[:, 0] | codes[:, 1] << 4
            levels = torch.stack([packed.scale.view(-1), packed.offset.view(-1)], 1)
            self._levels[block : block + blocks] = levels.view(torch.int16)
            block += blocks

    def finish(self) -> SparseWeight:
        """Return the synapses; the builder is not used any more.

        Raises:
            InputError: There is none.
        """
        if not self._synapses:
            self._refuse("synapses", "1 or more", 0)
        missing = -self._count % BLOCK
        self._gaps[self._count : self._count + missing] = 0
        self._steps[self._count : self._count + missing] = 0
        self._count += missing
        self._write(torch.cat([self._rest, self._rest[-1:].expand(missing)]))
        count, sizes = self._count, (self._sources, self._targets)
        entries = self._gaps[:count], self._steps[:count], self._codes[: count // 2], self._levels[: count // BLOCK]
        return SparseWeight(*sizes, self._starts, self._first, *entries)


def _refuse(name: str, rule: str, value: object, label: str = "sparse synapses") -> NoReturn:
    raise q4.InputError(label, name=name, rule=rule, value=value)
