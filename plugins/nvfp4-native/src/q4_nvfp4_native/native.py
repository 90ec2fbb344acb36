"""Engines of the FP4 paths: those that can run here, the reasons why others can't, and the calls.

Three engines over one prepared layout: an external libNVFP4.so, our CUDA C++ kernels compiled by NVRTC (sm_120a,
sm_121a), and ``tl.dot_scaled`` where the installed Triton compiles it to native instructions (sm_100, sm_103). Each
rounds activations by a kernel of its own first; the latter two by the same one.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_nvfp4_native import scaled_dot
from q4_nvfp4_native.calls import NUMBER_TYPES, GemmCall, QuantizeCall
from q4_nvfp4_native.compiler import NATIVE_ARCHITECTURES, compile_kernels, nvrtc_problem, nvrtc_version
from q4_nvfp4_native.configurations import configurations, is_measured, rows_served
from q4_nvfp4_native.driver import find_driver
from q4_nvfp4_native.library import find_library
from q4_nvfp4_native.operands import BYTE_KINDS
from q4core import (
    BackendError,
    KernelPath,
    PathKind,
    Precision,
    PrepareError,
    Reason,
    ReasonCode,
    Support,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from q4_nvfp4_native.driver import Driver, Kernel
    from q4_nvfp4_native.library import Search
    from q4_nvfp4_native.operands import OperandMeta
    from q4_triton_kernels import Facts
    from q4core import Request

__all__ = ["FP4_ARCHITECTURES", "Native", "Tools"]

FP4_ARCHITECTURES = (100, 103, 120, 121)
"""Compute capabilities × 10 whose tensor cores multiply FP4."""
EXTERNAL, NATIVE, DOT = "external-fp4", "native-fp4", "native-fp4-dot"
_QUANTIZE_THREADS, _QUANTIZE_SHARED_BYTES = 256, 32
_ALIGNMENT = 16


@attrs.frozen(kw_only=True)
class Tools:
    """What the FP4 paths are built with; a test brings its own."""

    nvrtc_problem: Callable[[int], str | None] = nvrtc_problem
    nvrtc_version: Callable[[], str] = nvrtc_version
    compile: Callable[[str, int], Any] = compile_kernels
    driver: Callable[[], Driver] = find_driver
    library: Callable[[], Search] = find_library
    dot_problem: Callable[[int, str], str | None] = scaled_dot.problem
    product: Callable[[int, str, int, torch.dtype], scaled_dot.Product] = scaled_dot.product
    stream: Callable[[torch.device], int] = lambda device: torch._C._cuda_getCurrentRawStream(device.index or 0)  # noqa: SLF001  # what Triton calls; the public way costs 2 µs


class Native:
    """The FP4 paths on the devices of this machine.

    Args:
        facts: Of the machine.
        tools: What they are built with.
    """

    def __init__(self, facts: Facts, tools: Tools) -> None:
        # Whether Triton can build kernels does not depend on hardware: only one of the engines needs it.
        self._facts = attrs.evolve(facts, triton="1000.0", is_interpreted=False, has_compiler=True)
        self._tools = tools
        self._modules: dict[tuple[int, str], tuple[Any, Driver]] = {}
        self._kernels: dict[tuple[int, str], dict[str, Kernel]] = {}
        self._products: dict[tuple[int, str, int, torch.dtype], scaled_dot.Product] = {}
        self._faults: dict[tuple[int, str], Reason] = {}
        self._search: Search | None = None
        self._lock = threading.Lock()

    @property
    def search(self) -> Search:
        """The result of the search for libNVFP4.so, which is done once."""
        with self._lock:
            if self._search is None:
                self._search = self._tools.library()
            return self._search

    def check(self, request: Request) -> Support:
        """Offer the FP4 paths, or give every reason why not."""
        reasons = []
        if request.scale_kind not in BYTE_KINDS:
            message = f"FP4 tensor cores take e4m3 or e8m0 scales, the weight's are {request.scale_kind.value}"
            reasons.append(Reason(ReasonCode.FORMAT, message))
        arch = self._arch(request.device)
        if not isinstance(arch, int):
            return Support.no([*reasons, *arch], native_state="no device with FP4 tensor cores")
        if arch not in FP4_ARCHITECTURES:
            served = ", ".join(f"sm_{item}" for item in FP4_ARCHITECTURES)
            message = f"the device is sm_{arch}, which has no FP4 tensor cores; {served} have"
            return Support.no([*reasons, Reason(ReasonCode.ARCH, message)], native_state=f"sm_{arch}")
        paths, lacks, states = self._engines(request, arch)
        if paths and not reasons:
            return Support.yes(paths, native_state="; ".join([*states, *map(str, lacks)]))
        return Support.no([*reasons, *lacks], native_state="; ".join(states) or f"sm_{arch}: nothing to run with")

    def _arch(self, device: torch.device) -> int | tuple[Reason, ...]:
        target = self._facts.target(torch.device("cuda", _index(device)))
        if isinstance(target, tuple):
            return target
        return 0 if target.arch is None else target.arch

    def _engines(self, request: Request, arch: int) -> tuple[list[KernelPath], list[Reason], list[str]]:
        """Return the paths, why other engines offer none, and what is loaded."""
        paths: list[KernelPath] = []
        lacks: list[Reason] = []
        states: list[str] = []
        name = request.format.name
        if name == "nvfp4":
            if self.search.library is not None:
                paths.append(_path(EXTERNAL, (1, None)))
                states.append(self.search.state)
            elif self.search.problems:
                lacks += [Reason(ReasonCode.LIBRARY, problem) for problem in self.search.problems]
        problem = self._tools.nvrtc_problem(arch)
        fault = self._faults.get((_index(request.device), name))
        if problem is not None:
            lacks.append(Reason(ReasonCode.TOOLCHAIN, problem))
        elif fault is not None:
            lacks.append(fault)
        elif arch in NATIVE_ARCHITECTURES:
            # Next to an external library, which is to be used first and is so by its name, ours claim no more.
            tier = Tier.TUNED if is_measured(arch) and not paths else Tier.GENERIC
            paths += [_path(f"{NATIVE}-{tile}", rows, tier) for tile, rows in rows_served(arch).items()]
            never = "" if is_measured(arch) else ", never run on such hardware"
            states.append(f"NVRTC {self._tools.nvrtc_version()} for sm_{arch}a{never}")
        else:
            dot = self._tools.dot_problem(arch, name)
            if dot is None:
                paths.append(_path(DOT, (1, None)))
                states.append(f"tl.dot_scaled for sm_{arch}, never run on such hardware")
            else:
                lacks.append(Reason(ReasonCode.TOOLCHAIN, dot))
        return paths, lacks, states

    def load(self, request: Request, paths: Iterable[str]) -> None:
        """Compile and load every kernel that these paths launch; an external library's are its own matter.

        Args:
            request: What they were offered for.
            paths: Their names.

        Raises:
            PrepareError: That failed; our kernels are not offered from now on.
        """
        key = (_index(request.device), request.format.name)
        own = frozenset(paths) - {EXTERNAL}
        arch = self._arch(request.device)
        if not own or not isinstance(arch, int):
            return
        with self._lock:
            try:
                self._load_kernels(key, arch, request, {name.removeprefix(f"{NATIVE}-") for name in own - {DOT}})
                if DOT in own:
                    self._load_product(key, arch, request)
            except PrepareError as error:
                self._faults[key] = error.reasons[0]
                raise

    def _load_kernels(self, key: tuple[int, str], arch: int, request: Request, tiles: set[str]) -> None:
        """Load the kernel that rounds activations, and the tiles' own, where they are not there yet."""
        kernels = self._kernels.get(key, {})
        shapes = {"quantize": (f"q4_quantize_{key[1]}", _QUANTIZE_THREADS, _QUANTIZE_SHARED_BYTES)}
        for tile in sorted(tiles):
            own = configurations()[tile]
            shapes[tile] = (f"q4_gemm_{key[1]}_{tile}", own.threads, own.shared_bytes(request.format.block_size))
        missing = {name: shape for name, shape in shapes.items() if name not in kernels}
        if not missing:
            return
        module, driver = self._module(key, arch)
        with _refusal(ReasonCode.DRIVER):
            loaded = {
                name: driver.kernel(module, symbol, threads=threads, shared_bytes=shared_bytes)
                for name, (symbol, threads, shared_bytes) in missing.items()
            }
        self._kernels[key] = {**kernels, **loaded}

    def _module(self, key: tuple[int, str], arch: int) -> tuple[Any, Driver]:
        """Return the machine code of a format, loaded once, and the driver that holds it."""
        if key not in self._modules:
            with _refusal(ReasonCode.TOOLCHAIN):
                compiled = self._tools.compile(key[1], arch)
            with _refusal(ReasonCode.DRIVER):
                driver = self._tools.driver()
                self._modules[key] = driver.load(compiled.cubin, f"the {key[1]} kernels for sm_{arch}"), driver
        return self._modules[key]

    def _load_product(self, key: tuple[int, str], arch: int, request: Request) -> None:
        kind = scaled_dot.GLOBAL_KINDS[request.scale_kind]
        place = (*key, kind, request.out_dtype)
        if place not in self._products:
            product = self._tools.product(arch, request.format.name, kind, request.out_dtype)
            product.load()
            self._products[place] = product

    def linear(  # noqa: PLR0913  # the facts of one call
        self,
        meta: OperandMeta,
        tensors: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        path: str,
    ) -> None:
        """Round x to FP4 and multiply, both on the current stream."""
        rows, columns = x.shape
        padded, spec = meta.padded, meta.spec
        code_bytes = rows * (padded // 2)
        scale_bytes = -(-rows * (padded // spec.block_size) // _ALIGNMENT) * _ALIGNMENT
        # One piece of torch's cache: three allocations would take a third of the time on the host.
        room = torch.empty(code_bytes + scale_bytes + 4 * rows, dtype=torch.uint8, device=x.device)
        start = room.data_ptr()
        following = 2
        global_scale = None
        if meta.global_dtype is not None:
            global_scale = tensors[following]
            following += 1
        static = tensors[following].data_ptr() if meta.has_static_scale else 0
        quantize = QuantizeCall(
            x.data_ptr(), start, start + code_bytes, start + code_bytes + scale_bytes, static, x.stride(0), rows,
            columns, NUMBER_TYPES[x.dtype],
        )  # fmt: skip
        gemm = GemmCall(
            quantize.codes, quantize.scales, quantize.rows, tensors[0].data_ptr(), tensors[1].data_ptr(),
            0 if global_scale is None else global_scale.data_ptr(), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), rows, spec.out_features, padded,
            global_scale is not None and global_scale.numel() > 1, meta.global_divides, NUMBER_TYPES[out.dtype],
        )  # fmt: skip
        stream = self._tools.stream(x.device)
        if path == EXTERNAL:
            library = self.search.library
            if library is None:
                raise BackendError(f"path {path}", hint="The library that it was offered with is gone.")
            library.quantize(quantize, stream)
            library.multiply(gemm, stream)
            return
        kernels = self._kernels[_index(x.device), spec.format.name]
        kernels["quantize"].launch(rows, stream, quantize)
        if path == DOT:
            parts = room[:code_bytes], room[code_bytes : code_bytes + scale_bytes], room[code_bytes + scale_bytes :]
            kind = scaled_dot.GLOBAL_KINDS[spec.scale_kind]
            product = self._products[_index(x.device), spec.format.name, kind, out.dtype]
            product(parts, tensors, global_scale, bias, out, meta)
            return
        tile = path.removeprefix(f"{NATIVE}-")
        kernels[tile].launch(configurations()[tile].blocks(rows, spec.out_features), stream, gemm)


@contextlib.contextmanager
def _refusal(code: ReasonCode) -> Iterator[None]:
    """Make a refusal of a failure, by a code; what is a refusal already keeps its own."""
    try:
        yield
    except PrepareError:
        raise
    except BackendError as error:
        raise PrepareError([Reason(code, str(error))]) from error


def _index(device: torch.device) -> int:
    index: Any = device.index  # torch's annotation leaves out None
    if index is None:
        return torch.cuda.current_device() if device.type == "cuda" else 0
    return int(index)


def _path(name: str, rows: tuple[int, int | None], tier: Tier = Tier.GENERIC) -> KernelPath:
    return KernelPath(name, rows, PathKind.KERNEL, Precision.W4A4, tier)
