"""``EncodingProgram``: a batch of sequences through an encoder by calls of one program, without padding."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_nn.blocks.rows import RowPlaces
from q4_programs import EmissionError, Op, ProgramBuilder, Watch, layers_of, refuse
from q4core import Q4Error, Q4Linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_programs import Value

__all__ = ["POOLED", "EncodingProgram", "EncodingPrograms"]

_ROWS = 256
"""Tokens of a run where no sequence is longer: enough for products to be fast, few enough to stay in a cache."""
_LEAST_SQUARE = 1e-24
"""torch's normalize divides by 1e-12 at least."""
POOLED = frozenset({"cls", "mean", "lasttoken"})
"""Modes of pooling that are operations of a program."""


class EncodingProgram:
    """Takes whole sequences, one after another, and gives their features, or a vector for each of them.

    A row sees its own sequence alone, so that each has the bits that it has by itself.

    Args:
        encoder: One that emits features of tokens [T, hidden] in eval mode: ``TransformerEncoder``, or
            ``TransformerDecoder``, of which the head is left out.
        most: Tokens of a run.
        capacity: Tokens of a sequence at most.
        pooling: Modes of ``POOLED``, whose vectors are joined; none for the features of each token.
        normalised: Whether vectors get length one.

    Raises:
        EmissionError: A part emits nothing, or is dense.
        Q4Error: Nobody runs the program.
    """

    def __init__(
        self, encoder: Any, most: int, capacity: int, pooling: Sequence[str] = (), *, normalised: bool = False
    ) -> None:
        self.most, self._pooling = most, tuple(pooling)
        builder = ProgramBuilder(encoder, torch.device("cpu"), f"encode {type(encoder).__name__}")
        self._count, self._pools = array("q", [1]), [array("q", bytes(16 * most)) for _ in self._pooling]
        self._tokens, self._types = torch.zeros((2, most), dtype=torch.int64).unbind()
        builder.of_tokens(builder.bound(torch.frombuffer(self._count, dtype=torch.int64), "number of tokens"), most)
        self._places = RowPlaces(builder, most, capacity)
        x = _emit(encoder, builder, builder.bound(self._tokens, "tokens"), self._places, self._types)
        if dense := [name for name, module in encoder.named_modules() if _is_dense(module, builder)]:
            what = f"{dense[0]} is dense" + f", and {len(dense) - 1} more" * (len(dense) > 1)
            raise EmissionError(f"{what}: torch's own products are faster")
        if self._pooling:
            x = self._emit_vectors(builder, x, normalised=normalised)
        x = builder.keep(x)
        self._found = builder.tensor(x)
        self.bound = builder.bind()
        self._watch = Watch(builder.modules)

    def _emit_vectors(self, builder: ProgramBuilder, x: Value, *, normalised: bool) -> Value:
        width = x.shape[-1]
        joined = builder.scratch((self.most, width * len(self._pooling)))
        for index, cells in enumerate(self._pools):
            spans = builder.bound(torch.frombuffer(cells, dtype=torch.int64), "sentences")
            builder.step(Op.MEAN_SPANS, x, spans, out=builder.columns(joined, index * width, width))
        if not normalised:
            return joined
        size = joined.shape[-1]
        weight = builder.constant(("length", size), lambda: torch.full((size,), size**-0.5))
        return builder.step(Op.RMS_NORM, joined, weight, numbers=(_LEAST_SQUARE / size, 0))

    def is_whole(self) -> bool:
        """Return whether the encoder, and the memory of all that is bound, is what it was."""
        return self._watch.change() is None and self.bound.is_whole()

    def __call__(
        self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Return a vector [features] for each sequence, or the features [tokens, hidden] of each.

        Args:
            rows: Token numbers, from 1 to ``most`` of each sequence.
            types: The segment of each token. Defaults to 0.

        Raises:
            InputError: A token or a segment is out of range.
            LifecycleError: Memory was moved, or a layer closed.
        """
        lengths = [len(row) for row in rows]
        found = self.run(lengths, _flat(rows), None if types is None else _flat(types))
        return [*found.unbind()] if self._pooling else [*found.split(lengths)]

    @torch.inference_mode()
    def run(self, lengths: Sequence[int], tokens: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        """Return vectors [sequences, features], or the features of all tokens [tokens, hidden], as a call does.

        Args:
            lengths: Of each sequence, from 1 to ``most``.
            tokens: int64 [tokens], one sequence after another.
            types: int64 [tokens]. Defaults to 0.
        """
        found, start, begin = [], 0, 0
        while start < len(lengths):
            end, count = start, 0
            while end < len(lengths) and count + lengths[end] <= self.most:
                count += lengths[end]
                end += 1
            part = slice(begin, begin + count)
            found.append(self._run(lengths[start:end], tokens[part], None if types is None else types[part]))
            start, begin = end, begin + count
        return found[0] if len(found) == 1 else torch.cat(found)

    def _run(self, lengths: Sequence[int], tokens: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        count, rows = len(tokens), len(lengths)
        with self.bound.lock:
            self._tokens[:count].copy_(tokens)
            if types is None:
                self._types[:count].zero_()
            else:
                self._types[:count].copy_(types)
            ends = self._places.fill(lengths)
            for spans, mode in zip(self._pools, self._pooling, strict=True):
                spans[: 2 * rows : 2] = array("q", [to - 1 if mode == "lasttoken" else at for at, to in ends])
                spans[1 : 2 * rows : 2] = array("q", [at + 1 if mode == "cls" else to for at, to in ends])
                spans[2 * rows : 2 * count] = array("q", (0, 1)) * (count - rows)
            self._count[0] = count
            self.bound()
            return self._found[: rows if self._pooling else count].clone()


def _flat(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([*itertools.chain.from_iterable(rows)])


def _emit(encoder: Any, builder: ProgramBuilder, tokens: Value, places: RowPlaces, types: torch.Tensor) -> Value:
    """Emit the features of tokens; of a decoder what its head would take."""
    if not encoder.config.causal:
        made: Value = builder.emit(encoder, tokens, cache=places, types=builder.bound(types, "segments"))
        return made
    made = builder.emit(encoder, tokens, cache=places, part="body")
    return made if encoder.norm is None else builder.emit(encoder.norm, made)


def _is_dense(module: nn.Module, builder: ProgramBuilder) -> bool:
    is_plain = isinstance(module, nn.Linear) and not isinstance(module, Q4Linear)
    return is_plain and any(module is other for other in builder.modules)


class EncodingPrograms:
    """The programs of an encoder: one for runs of short sequences, one for longer ones, each made when it is needed.

    Args:
        encoder: As ``EncodingProgram`` takes it.
        limit: Tokens of a sequence at most.
        pooling: As there.
        normalised: As there.
    """

    def __init__(self, encoder: Any, limit: int, pooling: Sequence[str] = (), *, normalised: bool = False) -> None:
        self._encoder, self._limit, self._options = encoder, limit, (tuple(pooling), normalised)
        self._made: dict[int, EncodingProgram | None] = {}
        self._watch: Watch | None = None
        self._why = ""

    def find(self, longest: int) -> EncodingProgram | None:
        """Return the program for sequences of up to ``longest`` tokens; None where the modules run.

        Reports of the packed layers say why.
        """
        most = _ROWS
        while most < min(longest, self._limit):
            most *= 2
        found = self._made.get(most)
        if found is not None and found.is_whole():
            return found
        if most in self._made and found is None and self._watch is not None and self._watch.change() is None:
            return None  # as it was
        self._watch = Watch([*self._encoder.modules()])
        self._made.pop(most, None)
        if (change := self._watch.change()) is not None or next(self._encoder.parameters()).device.type != "cpu":
            self._refuse(change or "it is not on the CPU")
            return None
        self._made[most] = None
        pooling, normalised = self._options
        try:
            with torch.inference_mode(mode=False):
                made = EncodingProgram(self._encoder, most, self._limit, pooling, normalised=normalised)
        except Q4Error as error:
            self._refuse(error.summary)
            return None
        if made.bound.record.backend != "reference":
            self._made[most] = made
        return self._made[most]

    def _refuse(self, why: str) -> None:
        """Note for the reports why the modules run, once for each reason."""
        if why != self._why:
            refuse(f"encode {type(self._encoder).__name__}", layers_of(self._encoder), why)
        self._why = why
