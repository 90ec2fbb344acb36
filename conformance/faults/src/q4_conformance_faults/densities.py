"""Planted faults of a path's kind: dense weights where there should be none."""

from __future__ import annotations

from q4_conformance_faults import dense, kept
from q4_conformance_faults.fault import Fault

__all__ = ["DENSE_FAULTS"]

DENSE_FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format="nf4", caught_by="EX-14/kind", says=says, is_numeric=False)
    for name, make, says in (
        ("hidden-dense-in-torch", dense.DensePython, "alive at once"),
        ("hidden-levels-in-torch", dense.LevelsPython, "alive at once"),
        ("hidden-dense-native", dense.DenseNative, "memory peaked"),
        ("hidden-dense-in-halves", dense.DenseHalves, "memory peaked"),
        ("hidden-dense-levels", dense.DenseLevels, "memory peaked"),
        ("hidden-dense-for-int8", dense.DenseForInt8, "dot_w4a8, M = 1: memory peaked"),
        ("hidden-dense-for-bfloat16", dense.DenseForBfloat16, "gemv_w4a16, M = 1: memory peaked"),
        ("hidden-dense-for-many-rows", dense.DenseForMany, "M = 64: memory peaked"),
        ("hidden-dense-for-very-many-rows", dense.DenseForVeryMany, "M = 257: memory peaked"),
        ("hidden-levels-for-many-rows", dense.LevelsForMany, "memory peaked"),
        ("hidden-dense-when-hot", dense.DenseWhenHot, "memory peaked"),
        ("keeps-dense-scratch", kept.DenseScratch, "stay beside"),
        ("keeps-dense-in-halves", kept.KeepsHalves, "prepared tensors"),
        ("keeps-dense-levels", kept.KeepsLevels, "prepared tensors"),
        ("hides-dense", kept.HidesDense, "stay beside"),
        ("hides-dense-levels", kept.HidesLevels, "stay beside"),
        ("hides-levels-in-file", kept.HidesInFile, "stay beside"),
        ("hides-levels-in-shared-memory", kept.HidesInSharedMemory, "stay beside"),
        ("hides-levels-behind-descriptor", kept.HidesBehindDescriptor, "stay beside"),
        ("keeps-levels-when-hot", kept.KeepsLevelsWhenHot, "stay beside"),
    )
)
