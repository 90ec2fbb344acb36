"""Every program that the configurations of an architecture name, for the formats that differ in their kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance import WeightRecipe
from q4_triton_kernels.configs import config_for
from q4_triton_kernels.factory import Factory, Layout
from q4_triton_kernels.gradient import Gradient, gradient_for
from q4_triton_kernels.layout import WeightMeta
from q4_triton_kernels.target import Target
from q4core import Feature, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_triton_kernels.program import Program

__all__ = ["BY_ROW", "RECIPES", "Candidate", "candidates", "factory_for", "gradient_of"]

RECIPES = {
    "nf4": WeightRecipe(format="nf4"),
    "fp4": WeightRecipe(format="fp4"),
    "q4_0": WeightRecipe(format="q4_0"),
    "q4_1": WeightRecipe(format="q4_1"),
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
_COMMON = {
    "gemv": (("nf4", torch.bfloat16), ("nvfp4", torch.bfloat16), ("q4_1", torch.float16), ("int4_zero", torch.float32)),
    "weights": (("nvfp4", torch.bfloat16), ("mxfp4", torch.bfloat16)),
    "blocks": (("nf4", torch.bfloat16), ("q4_1", torch.bfloat16), ("int4_zero", torch.float16)),
    "wide": (("nf4", torch.float32),),
}
"""What is compiled in every run: each path through the kernels in one dtype, and beside these each format once."""
_COMMON_GRADIENTS = (
    ("nvfp4", torch.bfloat16, (0, 1)),
    ("nf4", torch.bfloat16, (0, 1)),
    ("q4_1", torch.float16, (1,)),
    ("nf4", torch.float32, (1,)),
)
"""The same of the input gradient, with the places of its tiles; Q4_1 in float16 needs most registers."""
_OF_ITS_OWN = frozenset({80, 90, 100, 120, 121})
"""Architectures of which more than two input gradients are compiled in every run."""


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

    def __str__(self) -> str:
        """Return an id for pytest."""
        words = [f"sm{self.arch}", self.kind, str(self.place), self.recipe, _SHORT[self.dtype]]
        words += [word for word, holds in (("uneven", not self.even), ("split", not self.final)) if holds]
        return "-".join(words)

    def program(self) -> Program:
        """Return the program."""
        factory = factory_for(self.recipe, self.dtype, self.arch)
        config = factory.config
        if self.kind == "gemv":
            cut = config.gemv[self.place]
            if not self.even:
                cut = attrs.evolve(cut, r=max(1, cut.r // 2))  # as plans do
            return factory.gemv(cut, even=self.even, final=self.final)
        if self.kind == "gradient":
            code = gradient_of(self.recipe, self.dtype, self.arch).code
            return code.program(config.gradient[code.family][self.place], even=self.even)
        if self.kind == "gemm":
            tile = config.gemm[factory.layout.family(self.dtype)][self.place]
            return factory.gemm(tile, even=self.even, final=self.final)
        return factory.dense if self.kind == "dense" else factory.finish


@functools.cache
def factory_for(recipe: str, dtype: torch.dtype, arch: int | None) -> Factory:
    """Return what makes the programs of a format for an architecture."""
    meta = WeightMeta.of(RECIPES[recipe].build())
    return Factory(Layout.of(meta), dtype, dtype, Target(arch))


@functools.cache
def gradient_of(recipe: str, dtype: torch.dtype, arch: int | None) -> Gradient:
    """Return the input gradient of a format for an architecture."""
    meta = WeightMeta.of(RECIPES[recipe].build())
    return gradient_for(meta, dtype, dtype, Target(arch), torch.device("cpu"), is_by_row=False)


def candidates(arch: int, *, every: bool = False) -> Iterator[Candidate]:
    """Yield the programs of an architecture: those that each run compiles, or else all the others."""
    common = set(_common(arch))
    found = common if not every else set(_all(arch)) - common
    yield from sorted(found, key=str)


def _all(arch: int) -> Iterator[Candidate]:
    config = config_for(arch)
    for recipe in RECIPES:
        for dtype in _SHORT:
            family = factory_for(recipe, dtype, arch).layout.family(dtype)
            for kind, tiles in (("gemv", config.gemv), ("gemm", config.gemm[family])):
                for place in range(len(tiles)):
                    for even, final in ((True, True), (True, False), (False, True), (False, False)):
                        yield Candidate(arch, kind, recipe, dtype, place, even, final)
            for place in range(len(gradient_of(recipe, dtype, arch).tiles)):
                for even in (True, False):
                    yield Candidate(arch, "gradient", recipe, dtype, place, even)


def _common(arch: int) -> Iterator[Candidate]:
    config = config_for(arch)
    for recipe, dtype in _COMMON["gemv"]:
        for place in range(len(config.gemv)):
            yield Candidate(arch, "gemv", recipe, dtype, place)
    for family, tiles in config.gemm.items():
        for recipe, dtype in _COMMON[family]:
            for place in range(len(tiles)):
                yield Candidate(arch, "gemm", recipe, dtype, place)
    for recipe in RECIPES:
        yield Candidate(arch, "gemv", recipe, torch.bfloat16)
        yield Candidate(arch, "gemm", recipe, torch.bfloat16)
    for even, final in ((False, True), (True, False)):
        yield Candidate(arch, "gemv", "nf4", torch.bfloat16, 0, even, final)
        yield Candidate(arch, "gemm", "nf4", torch.bfloat16, 0, even, final)
    for recipe, dtype, places in _COMMON_GRADIENTS if arch in _OF_ITS_OWN else _COMMON_GRADIENTS[:2]:
        for place in places if arch in _OF_ITS_OWN else (1,):
            yield Candidate(arch, "gradient", recipe, dtype, place)
    yield Candidate(arch, "dense", "nvfp4", torch.bfloat16)
    yield Candidate(arch, "dense", "nf4", torch.bfloat16)
    yield Candidate(arch, "finish", "nvfp4", torch.bfloat16)
