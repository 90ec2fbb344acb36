"""``Op``: the operations of programs, with the shapes and the numbers that each takes."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ALIASES",
    "IN_PLACE",
    "LENGTHS",
    "SPIKING",
    "WITHOUT_TOKENS",
    "WITH_CLOCK",
    "WITH_POSITIONS",
    "WITH_SPANS",
    "WORD",
    "Op",
    "numbers_rule",
    "patterns_of",
]


class Op(enum.Enum):
    """The operation of a step. Views are [rows, columns] of float32, unless a line says otherwise; R rows, C columns.

    Sums are of float32 products in float32 or wider. ``numbers`` are the options of a step, in the order that is given.
    """

    EMBEDDING = "embedding"
    """tokens int64 [1, R] → [R, C]: rows of a packed layer, or of the second input, a table [V, C]."""
    LINEAR = "linear"
    """x [R, K] → [R, N]: a packed layer with its own bias, the bits of the backend's ``linear``; or the second input, a
    weight [N, K], and then the last input is a bias [1, N] where ``numbers[0]`` is 1."""
    RMS_NORM = "rms_norm"
    """x [R, C], weight [1, C] → x / sqrt(mean(x²) + eps) · (weight + shift). ``numbers``: eps, shift (0 or 1)."""
    LAYER_NORM = "layer_norm"
    """x [R, C], weight [1, C], bias [1, C] → the layer norm of each row. ``numbers``: eps."""
    ROTARY = "rotary"
    """x [T · heads, C], table [positions, D] of cos then sin of D / 2 pairs, positions int64 [1, T] → x turned, its
    first D columns. ``numbers``: 1 where the members of a pair are neighbours, 0 where they are D / 2 apart. Here and
    in the next two, the heads of a token follow one another, and those of the next token follow them."""
    STORE = "store"
    """x [T · heads, C], positions int64 [1, T] → row ``position`` of each head of a cache [heads · capacity, C]; of
    tokens at one position the last one. A cache may be of float16 or int8, here and in ATTENTION, as ``narrowed`` gives
    its rows."""
    ATTENTION = "attention"
    """query [T · heads, C], keys and values [kv_heads · capacity, C], positions int64 [1, T] → [T · heads, C]: softmax
    of each query with the keys 0 … its position, times the values. ``numbers``: kv_heads, scale, window (how many of
    the last keys are seen; 0 for all)."""
    ADD = "add"
    """a [R, C], b [R, C] or [1, C] → a + b."""
    MULTIPLY = "multiply"
    """a [R, C], b [R, C] or [1, C] → a · b."""
    AFFINE = "affine"
    """x → x · ``numbers[0]`` + ``numbers[1]``, rounded twice."""
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    SOFTMAX = "softmax"
    """Of each row, as all of the six above: x [R, C] → [R, C]."""
    COPY = "copy"
    """x [R, C] → [R, C]."""
    ARGMAX = "argmax"
    """x [R, C] → int64 [1, R]: the column of each row's largest number, the first of equals; a NaN is the largest."""
    TOP_K = "top_k"
    """x [R, C] → the k largest numbers of each row [R, k], falling, and their columns int64 [R, k]; equals by column.
    ``numbers``: k."""

    # Operations of spiking networks. Their clock is the number of the round, int64 [1, 1]. A ring has S slots of R
    # rows, and round t has slot t mod S. Bits are int64 [S·R, W], W = ceil(C / 64): column c is bit c mod 64 of word
    # c // 64, and bits behind the last column are 0. A vector has one number, or C of them. Products and sums are
    # rounded one by one.
    INTEGRATE = "integrate"
    """x [R, C] in place, i [R, C], vectors beta[, gain[, leak]] → beta · x + gain · i + leak. Without gain, i is
    added as it is; without a leak, nothing more."""
    FIRE = "fire"
    """mem [R, C] in place, threshold [R or 1, C or 1], a vector, clock[, count [R, C] in place, before [R, C], a vector
    steps] → bits, mem[, count]. Who is above the threshold fires; at it, too, where ``numbers[1]`` is 1. A reset then
    subtracts the vector (``numbers[0]`` is 1), sets mem to it (2), or does nothing (0). Where a count is above 0, mem
    becomes ``before`` and does not fire. A count falls by 1, to 0 at least; that of who fires becomes ``steps``."""
    SPIKES = "spikes"
    """bits, clock → [R, N]: a packed layer's product with the bits of ``numbers[0]`` rounds ago, and its own bias; the
    bits of its backend's ``spikes``."""
    SEND = "send"
    """bits, clock, ring [D·R, N] in place: whoever fired ``numbers[0]`` rounds ago adds the weights of its synapses,
    which are the layer, to the slots of their delays after that round. Sums are in the order of sources, then synapses.
    ``numbers``: how many rounds ago, R."""
    TAKE = "take"
    """ring [D·R, C] in place, clock → the round's slot [R, C], and the ring with zeros there."""
    ROW = "row"
    """ring [S·R, C], clock → the slot of ``numbers[0]`` rounds ago [R, C]."""
    STORE_ROW = "store_row"
    """x [R, C], clock → the round's slot of a ring [S·R, C]."""
    PACK = "pack"
    """x [R, C], clock → two rings of bits, of which the round's slots are written: where x is not 0, and where it is
    neither 0 nor 1."""
    UNPACK = "unpack"
    """bits, clock → zeros and ones [R, C]: the slot of ``numbers[0]`` rounds ago."""

    # Operations of whole sequences that lie one after another.
    ATTEND_SPANS = "attend_spans"
    """query [R, heads · C], keys and values [L, kv_heads · C], spans int64 [1, 2 · R] → [R, heads · C]: of each head
    the softmax of row r with the keys of rows ``spans[2 r]`` up to, but not with, ``spans[2 r + 1]``, times their
    values. ``numbers``: heads, kv_heads, scale. A span is of one row at least. L is not bound to the tokens of a run,
    here and in the next one."""
    MEAN_SPANS = "mean_spans"
    """x [L, C], spans int64 [1, 2 · R] → [R, C]: the mean of the rows of x from ``spans[2 r]`` up to, but not with,
    ``spans[2 r + 1]``."""


WORD = 64
"""Neurons of a word of bits."""


_SHAPES: dict[Op, tuple[str, str, int]] = {
    Op.EMBEDDING: ("i1R VC", "RC", 0),
    Op.LINEAR: ("RK NK 1N", "RN", 1),
    Op.RMS_NORM: ("RC 1C", "RC", 2),
    Op.LAYER_NORM: ("RC 1C 1C", "RC", 1),
    Op.ROTARY: ("RC PD i1T", "RC", 1),
    Op.STORE: ("HC i1T", "MC", 0),
    Op.ATTENTION: ("HC MC MC i1T", "HC", 3),
    Op.ATTEND_SPANS: ("RC LK LK i1T", "RC", 3),
    Op.MEAN_SPANS: ("LC i1T", "RC", 0),
    Op.ADD: ("RC BC", "RC", 0),
    Op.MULTIPLY: ("RC BC", "RC", 0),
    Op.AFFINE: ("RC", "RC", 2),
    Op.ARGMAX: ("RC", "i1R", 0),
    Op.TOP_K: ("RC", "RT iRT", 1),
    Op.INTEGRATE: ("RC RC 1X ?1Y ?1Z", "RC", 0),
    Op.FIRE: ("RC BX 1Y i11 ?RC ?RC ?1Z", "bLW RC ?RC", 2),
    Op.SPIKES: ("bLW i11", "RN", 1),
    Op.SEND: ("bLW i11 QN", "QN", 2),
    Op.TAKE: ("LC i11", "RC LC", 0),
    Op.ROW: ("LC i11", "RC", 1),
    Op.STORE_ROW: ("RC i11", "LC", 0),
    Op.PACK: ("RC i11", "bLW bQW", 0),
    Op.UNPACK: ("bLW i11", "RC", 1),
}
"""Rows and columns of each input and output, a letter for a size, and how many numbers there are; ``i`` and ``b`` for
indices and bits of int64; ``?`` for what may be missing. An operation that is not here has one input and one output,
both RC."""
_ALIKE = ("RC", "RC", 0)
LENGTHS = frozenset("LMPQV")
"""Sizes on which no code of an operation depends: lengths of caches, rings and tables."""
WITH_CLOCK = frozenset(Op) & {
    Op.FIRE,
    Op.SPIKES,
    Op.SEND,
    Op.TAKE,
    Op.ROW,
    Op.STORE_ROW,
    Op.PACK,
    Op.UNPACK,
}
"""Operations whose int64 [1, 1] is the number of the round."""
SPIKING = WITH_CLOCK | {Op.INTEGRATE}
"""Operations of spiking networks."""
ALIASES: dict[Op, dict[int, int]] = {Op.INTEGRATE: {0: 0}, Op.FIRE: {1: 0, 2: 4}, Op.SEND: {0: 2}, Op.TAKE: {1: 0}}
"""Outputs that are an input: which one."""
WITH_SPANS = frozenset({Op.ATTEND_SPANS, Op.MEAN_SPANS})
"""Operations whose last input is spans of rows."""
IN_PLACE = frozenset(Op) - WITH_CLOCK - WITH_SPANS
IN_PLACE -= {Op.EMBEDDING, Op.LINEAR, Op.STORE, Op.ATTENTION, Op.COPY, Op.ARGMAX, Op.TOP_K}
"""Operations of which an output may be an input, exactly."""
WITH_POSITIONS = frozenset({Op.ROTARY, Op.STORE, Op.ATTENTION})
"""Operations whose last input is the positions of tokens."""
WITHOUT_TOKENS = SPIKING | {Op.TOP_K}
"""Operations that no program of several tokens has."""


def patterns_of(op: Op, inputs: int, outputs: int, *, is_packed: bool, has_bias: bool) -> tuple[list[str], list[str]]:
    """Return the letters of an operation's inputs and of its outputs, as many as it has with so many views.

    Args:
        op: The operation.
        inputs: Number of its inputs.
        outputs: Number of its outputs.
        is_packed: Whether it has a packed layer.
        has_bias: Whether LINEAR has a bias among its inputs.
    """
    names, given = (item.split() for item in _SHAPES.get(op, _ALIKE)[:2])
    if is_packed and op in {Op.LINEAR, Op.EMBEDDING}:
        del names[1:]
    if op is Op.LINEAR and not has_bias:
        del names[2:]
    for items, count in ((names, inputs), (given, outputs)):
        while len(items) > count and items[-1][0] == "?":
            del items[-1]
    return [item.removeprefix("?") for item in names], [item.removeprefix("?") for item in given]


def numbers_rule(op: Op, numbers: Sequence[float], sizes: Mapping[str, int], inputs: int) -> str | None:
    """Return which rule the options of a step break, or the sizes that depend on one another; None where none.

    Args:
        op: The operation.
        numbers: Its options.
        sizes: Letter → size.
        inputs: How many it has.
    """
    count = _SHAPES.get(op, _ALIKE)[2]
    counts = {count} if op is not Op.LINEAR else {0, 1}
    is_legal = len(numbers) in counts and all(map(math.isfinite, numbers))
    rule = f"{count} finite numbers"
    if is_legal and op in {Op.ADD, Op.MULTIPLY}:
        is_legal, rule = sizes["B"] in {1, sizes["R"]}, "with a second input of 1 row or as many as the first"
    elif is_legal and op in {Op.RMS_NORM, Op.LAYER_NORM}:
        is_legal, rule = numbers[0] >= 0 and tuple(numbers[1:]) in {(), (0.0,), (1.0,)}, "eps ≥ 0, and 0 or 1"
    elif is_legal and op is Op.ROTARY:
        is_legal = numbers[0] in {0, 1} and sizes["D"] % 2 == 0 and sizes["D"] <= sizes["C"]
        is_legal = is_legal and sizes["R"] % sizes["T"] == 0
        rule = "0 or 1, a table of even columns, no more than x has, and as many rows for each position"
    elif is_legal and op is Op.STORE:
        each, rest = divmod(sizes["H"], sizes["T"])
        is_legal = rest == 0 and sizes["M"] % each == 0
        rule = "with as many rows for each position, and a cache of as many for each head"
    elif is_legal and op is Op.ATTENTION:
        heads, _, window = numbers
        is_legal = heads >= 1 and heads.is_integer() and sizes["H"] % sizes["T"] == 0
        is_legal = is_legal and sizes["H"] // sizes["T"] % heads == 0 and sizes["M"] % heads == 0
        is_legal = is_legal and window >= 0 and window.is_integer()
        rule = "kv_heads (a divisor of the heads and of the cache's rows), scale, and a window ≥ 0"
    elif is_legal and op in WITH_SPANS:
        is_legal, rule = sizes["T"] == 2 * sizes["R"], "with two numbers of a span for each row"
        if is_legal and op is Op.ATTEND_SPANS:
            heads, kv_heads, _ = numbers
            is_legal = heads >= kv_heads >= 1 and heads.is_integer() and kv_heads.is_integer()
            is_legal = is_legal and heads % kv_heads == 0 and sizes["K"] * heads == sizes["C"] * kv_heads
            rule = "heads, kv_heads (a divisor of these), and scale, with as many columns for each head"
    elif is_legal and op is Op.TOP_K:
        is_legal, rule = numbers[0] == sizes["T"] <= sizes["C"], "k, the columns of the outputs, at most those of x"
    elif is_legal and (op in WITH_CLOCK or op is Op.INTEGRATE):
        return _spiking_rule(op, numbers, sizes, inputs)
    return None if is_legal else rule


def _spiking_rule(op: Op, numbers: Sequence[float], sizes: Mapping[str, int], inputs: int) -> str | None:
    """Return which rule a step of a spiking network breaks, or None."""
    columns = sizes.get("C", sizes.get("K", 1))
    rows = numbers[1] if op is Op.SEND else sizes["R"]
    lag = numbers[0] if op not in {Op.FIRE, Op.SEND} and numbers else 0
    vectors = {sizes.get(letter, 1) for letter in "XYZ"}
    facts = {
        "vectors of 1 number or as many as x has columns": vectors <= {1, columns},
        "reset 0, 1 or 2, and 0 or 1": op is not Op.FIRE or (numbers[0] in {0, 1, 2} and numbers[1] in {0, 1}),
        "a threshold of 1 row or as many as mem has": sizes.get("B", 1) in {1, rows},
        "4 inputs, or 7 with a count": op is not Op.FIRE or inputs in {4, 7},
        "whole numbers, 0 or more": all(item >= 0 and item.is_integer() for item in numbers),
        "R of 1 or more": rows >= 1,
    }
    facts["slots of R rows"] = rows >= 1 and all(sizes.get(letter, rows) % rows == 0 for letter in "LQ")
    facts["fewer rounds ago than there are slots"] = rows >= 1 and lag * rows < sizes.get("L", lag * rows + 1)
    words = sizes.get("W", -(-columns // WORD))
    facts["a bit for each column"] = words * WORD >= columns > (words - 1) * WORD
    if op is Op.SPIKES:  # of a layer that was filled up to whole blocks
        facts["a bit for each column"] = words * WORD < columns + WORD
    return next((rule for rule, holds in facts.items() if not holds), None)
