"""Compilation for an architecture without a device, and its results: text, report, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Compiled", "compile_for"]

_ALIGNED = 16
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@attrs.frozen(eq=False)
class Compiled:
    """A kernel compiled for one architecture.

    Args:
        arch: Compute capability × 10.
        ptx: The PTX text.
        cubin: The machine code.
        shared_bytes: Shared memory of one block.
        handle: Triton's own ``CompiledKernel``, which launches.
    """

    arch: int
    ptx: str = attrs.field(repr=False)
    cubin: bytes = attrs.field(repr=False)
    shared_bytes: int
    handle: Any = attrs.field(repr=False)

    def report(self) -> str:
        """Return what ``ptxas -v`` says of the PTX; runs it."""
        from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability  # noqa: PLC0415  # may be missing

        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(self.ptx, encoding="utf-8")
            command = [
                get_ptxas(self.arch).path,
                "-v",
                "--regAllocOptLevel=2",
                f"--gpu-name={sm_arch_from_capability(self.arch)}",
                str(source),
                "-o",
                str(Path(folder) / "kernel.cubin"),
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603  # Triton's own ptxas
        return done.stderr

    def usage(self) -> Usage:
        """Return registers and spills, from ``report``."""
        text = self.report()
        spills, registers = _SPILLS.search(text), _REGISTERS.search(text)
        if spills is None or registers is None:
            raise ValueError(f"ptxas' report must state registers and spills, got {text!r}")
        stack, stores, loads = map(int, spills.groups())
        return Usage(int(registers[1]), stack, stores + loads)


@attrs.frozen
class Usage:
    """What one thread of a kernel uses.

    Args:
        registers: 32-bit registers.
        stack_bytes: Local memory of its frame.
        spill_bytes: Bytes stored to and loaded from local memory as there were too few registers.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: int,
    *,
    aligned: tuple[str, ...] = (),
    **options: Any,
) -> Compiled:
    """Compile a kernel for one architecture; needs no device. Triton keeps the result in its cache on disk.

    Args:
        kernel: A ``triton.jit`` function.
        signature: Name → type of each argument that is no constant, such as ``"*bf16"``, ``"*u8"``, ``"i32"``.
        constants: Name → value of each ``constexpr``.
        arch: Compute capability × 10.
        aligned: Names of pointers at 16-byte boundaries, and of numbers that are multiples of 16.
        **options: Triton's own: ``num_warps``, ``num_stages``, ``maxnreg``, …

    Raises:
        Whatever Triton raises where it can't compile the kernel for the architecture.
    """
    import triton  # noqa: PLC0415  # may be missing
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415

    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", _ALIGNED]] for name in aligned}
    source = triton.compiler.ASTSource(kernel, types, dict(constants), hints)
    options.setdefault("enable_fp_fusion", True)
    handle = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Compiled(arch, handle.asm["ptx"], handle.asm["cubin"], handle.metadata.shared, handle)
