"""Every program that the configurations of an architecture name, for the formats that differ in their kernels."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance import WeightRecipe
from q4_triton_kernels.configs import config_for
from q4_triton_kernels.factory import Factory, Layout
from q4_triton_kernels.gradient import Gradient, gradient_for
from q4_triton_kernels.layout import WeightMeta
from q4_triton_kernels.target import ARCHITECTURES, Target
from q4core import Feature, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_triton_kernels import Compiled
    from q4_triton_kernels.program import Program

__all__ = ["BY_ROW", "LIKE", "RECIPES", "Candidate", "candidates", "factory_for", "gradient_of"]

RECIPES = {
    "nf4": WeightRecipe(format="nf4"),
    "fp4": WeightRecipe(format="fp4"),
    "q4_0": WeightRecipe(format="q4_0"),
    "q4_1": WeightRecipe(format="q4_1"),
    "iq4_nl": WeightRecipe(format="iq4_nl"),
    "int4": WeightRecipe(format="int4"),
    "int4_zero": WeightRecipe(format="int4", features={Feature.ZERO_POINT}),
    "int4_float_zero": WeightRecipe(format="int4", features={Feature.FLOAT_ZERO_POINT}),
    "nvfp4": WeightRecipe(format="nvfp4", scale_kind=ScaleKind.E4M3_MUL),
    "nvfp4_plain": WeightRecipe(format="nvfp4", scale_kind=ScaleKind.PLAIN),
    "mxfp4": WeightRecipe(format="mxfp4", scale_kind=ScaleKind.E8M0),
}
BY_ROW = attrs.evolve(RECIPES["nvfp4"], features={Feature.ROW_GLOBAL_SCALE})
"""NVFP4 with a global scale of each out-feature's own, which an input gradient takes into its weights."""
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_LAYOUTS = {**RECIPES, "by_row": BY_ROW}
_SHORT_WEIGHTS = ("nvfp4", "mxfp4")
_BLOCKS = tuple(name for name in RECIPES if name not in _SHORT_WEIGHTS)
LIKE = {86: 80, 89: 80, 103: 100, 120: 121}
"""Architecture → another one with the same tiles, of which every run compiles all; of its own, the long run does."""
_TENSOR_MEMORY = frozenset({100, 103})
"""Architectures with tensor memory, of which blocks of 16 take most: beyond what there is, a program is a trap."""


@attrs.frozen
class Candidate:
    """One program of an architecture: a kernel, a tile, a format, a dtype and what it is specialised on."""

    arch: int
    kind: str
    recipe: str
    dtype: torch.dtype
    place: int = 0
    even: bool = True
    final: bool = True
    out_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        """Return an id for pytest."""
        words = [f"sm{self.arch}", self.kind, str(self.place), self.recipe, _SHORT[self.dtype]]
        words += [word for word, holds in (("uneven", not self.even), ("split", not self.final)) if holds]
        words += [f"to_{_SHORT[self.out_dtype]}"] if self.out_dtype is not None else []
        return "-".join(words)

    @property
    def is_usual(self) -> bool:
        """Whether it is what layers of even K in bfloat16 run; each run takes the rest by turns."""
        return self.dtype is torch.bfloat16 and self.even and self.final and self.out_dtype is None

    def compile(self) -> Compiled:
        """Return what the program becomes."""
        return self.program().compile()

    def program(self) -> Program:
        """Return the program."""
        factory = factory_for(self.recipe, self.dtype, self.arch, self.out_dtype)
        config = factory.config
        if self.kind == "gemv":
            cut = config.gemv[self.place]
            if not self.even:
                cut = attrs.evolve(cut, r=max(1, cut.r // 2))  # as plans do
            return factory.gemv(cut, even=self.even, final=self.final)
        if self.kind == "gradient":
            code = gradient_of(self.recipe, self.dtype, self.arch, self.out_dtype).code
            return code.program(config.gradient[code.family][self.place], even=self.even)
        if self.kind == "gemm":
            tile = config.gemm[factory.layout.family(self.dtype)][self.place]
            return factory.gemm(tile, even=self.even, final=self.final)
        return factory.dense if self.kind == "dense" else factory.finish


@functools.cache
def factory_for(recipe: str, dtype: torch.dtype, arch: int | None, out_dtype: torch.dtype | None = None) -> Factory:
    """Return what makes the programs of a format for an architecture."""
    meta = WeightMeta.of(_LAYOUTS[recipe].build())
    return Factory(Layout.of(meta), dtype, out_dtype or dtype, Target(arch))


@functools.cache
def gradient_of(recipe: str, dtype: torch.dtype, arch: int | None, out_dtype: torch.dtype | None = None) -> Gradient:
    """Return the input gradient of a format for an architecture."""
    meta = WeightMeta.of(_LAYOUTS[recipe].build())
    is_by_row = recipe == "by_row"
    return gradient_for(meta, dtype, out_dtype or dtype, Target(arch), torch.device("cpu"), is_by_row=is_by_row)


def candidates(arch: int, *, every: bool = False) -> Iterator[Candidate]:
    """Yield the programs of an architecture that each run compiles, or else the others that layers usually run."""
    turned = set(_common(arch))
    found = common = {item for item in turned if arch not in LIKE or _shows_more(item)}
    if every:
        found = ({item for item in _all(arch) if item.is_usual} | turned) - common
    yield from sorted(found, key=str)


def _shows_more(item: Candidate) -> bool:
    """Return whether a program may differ where tiles are the same: it decodes a format, or takes most registers."""
    if item.kind not in {"gemm", "gradient"}:
        return item.kind == "gemv"
    config, factory = config_for(item.arch), factory_for(item.recipe, item.dtype, item.arch, item.out_dtype)
    if item.kind == "gemm":
        return item.place == len(config.gemm[factory.layout.family(item.dtype)]) - 1
    return item.place == len(gradient_of(item.recipe, item.dtype, item.arch, item.out_dtype).tiles) - 1


def _all(arch: int) -> Iterator[Candidate]:
    for recipe, dtype in itertools.product(_LAYOUTS, _SHORT):
        yield from _all_gradients(arch, recipe, dtype)
        if recipe == "by_row":  # linear takes a global scale of each row as it takes a single one
            continue
        config, family = config_for(arch), factory_for(recipe, dtype, arch).layout.family(dtype)
        for kind, tiles in (("gemv", config.gemv), ("gemm", config.gemm[family])):
            for place, even, final in itertools.product(range(len(tiles)), (True, False), (True, False)):
                yield Candidate(arch, kind, recipe, dtype, place, even, final)
        yield Candidate(arch, "finish", recipe, dtype)
        if dtype is torch.bfloat16 or family == "weights":  # as paths are offered
            yield Candidate(arch, "dense", recipe, dtype)


def _all_gradients(arch: int, recipe: str, dtype: torch.dtype) -> Iterator[Candidate]:
    outs = [None, *(out for out in _SHORT if out is not dtype)] if recipe in {"nf4", "nvfp4"} else [None]
    places = range(len(gradient_of(recipe, dtype, arch).tiles))
    for place, even, out in itertools.product(places, (True, False), outs):
        yield Candidate(arch, "gradient", recipe, dtype, place, even, out_dtype=out)


def _common(arch: int) -> Iterator[Candidate]:
    """Yield each tile of each family, and each format by gemv and by gemm, once.

    Which format meets which tile and dtype turns from one architecture to the next.
    """
    config, turn = config_for(arch), ARCHITECTURES.index(arch)
    wide, short, half = torch.float32, torch.bfloat16, torch.float16
    for number, recipe in enumerate(RECIPES, turn):
        dtype = (short, half, wide)[number % 3]
        out = None if number % 4 else short if dtype is wide else wide
        yield Candidate(arch, "gemv", recipe, dtype, number % len(config.gemv), out_dtype=out)
    for place in range(len(config.gemm["weights"])):
        recipe = _SHORT_WEIGHTS[(place + turn) % 2]
        out = None if place else wide
        yield Candidate(arch, "gemm", recipe, short if place or recipe == "mxfp4" else half, place, out_dtype=out)
    for number, recipe in enumerate(_BLOCKS, turn):
        place = number % len(config.gemm["blocks"])
        yield Candidate(arch, "gemm", recipe, (short, half)[number // 3 % 2], place)
    if arch in _TENSOR_MEMORY:
        yield Candidate(arch, "gemm", "nvfp4_plain", short, len(config.gemm["blocks"]) - 1)
        yield Candidate(arch, "gradient", "nvfp4_plain", short, len(config.gradient["blocks"]) - 1)
    for place in range(len(config.gemm["wide"])):
        yield Candidate(arch, "gemm", list(RECIPES)[(3 * turn + 2 * place) % len(RECIPES)], wide, place)
    if arch not in LIKE:
        for kind in ("gemv", "gemm"):
            yield Candidate(arch, kind, "nf4", short, even=False)
            yield Candidate(arch, kind, "nf4", short, final=False)
    yield from _common_gradients(arch)
    yield Candidate(arch, "dense", "nvfp4", (short, half)[turn % 2])
    yield Candidate(arch, "dense", _BLOCKS[turn % len(_BLOCKS)], short)
    yield Candidate(arch, "finish", "nvfp4", short)
    yield Candidate(arch, "finish", "nf4", (half, wide)[turn % 2])


def _common_gradients(arch: int) -> Iterator[Candidate]:
    tiles, turn = config_for(arch).gradient, ARCHITECTURES.index(arch)
    wide, short, half = torch.float32, torch.bfloat16, torch.float16
    for place in range(len(tiles["weights"])):
        recipe = _SHORT_WEIGHTS[(place + turn) % 2]
        dtype = half if recipe == "nvfp4" and turn % 4 > 1 else short
        yield Candidate(arch, "gradient", recipe, dtype, place, out_dtype=wide if place else None)
    for place in range(len(tiles["blocks"])):
        # Q4_1 in float16 needs most registers, in the largest tile.
        recipe, dtype = ("q4_1", half) if place else (_BLOCKS[turn % len(_BLOCKS)], short)
        yield Candidate(arch, "gradient", recipe, dtype, place, out_dtype=None if place else wide)
        yield Candidate(arch, "gradient", "by_row", (short, half)[(place + turn) % 2], place)
    for place in range(len(tiles["wide"])):
        recipe = list(_LAYOUTS)[(3 * turn + 5 * place) % len(_LAYOUTS)]
        yield Candidate(arch, "gradient", recipe, wide, place, out_dtype=short if place else None)
