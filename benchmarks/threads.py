"""One kernel call on two threads by ways to share work, next to torch's own threads and next to another process.

The kernels are built once for each way to share, and called through their C ABI, in turns, in one process. A sample is
a block of calls; blocks during which other processes used the machine are repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "plugins/cpu-native"
WAYS = {
    "openmp, steps aside": "",
    "openmp": "-DQ4_CPU_STALL_NS=1000000000000",
}
"""What each is compiled with."""
ALONE = "one thread"
SHAPES = ((576, 576), (1536, 576), (4096, 4096))
CACHE_BYTES = 64 << 20
BLOCK_S, BLOCKS, TRIES = 0.08, 4, 20
QUIET = 0.2
"""Cores that other processes may use during a block."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "block", "super_blocks")),
        *((name, ctypes.c_int32) for name in ("bits", "held_bits", "first", "scale_type", "second", "second_type")),
        ("is_unsigned", ctypes.c_int32),
        ("codebook", ctypes.c_float * 16),
        ("level", ctypes.c_uint8 * 16),
        ("center", ctypes.c_float),
        ("step", ctypes.c_float),
        ("word", ctypes.c_int16 * 16),
        ("word_step", ctypes.c_float),
    )


class _Source(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("code_row", "code_group", "code_byte", "group_bytes")),
        ("order", ctypes.c_int32),
        ("half", ctypes.c_int32),
        ("scale", ctypes.c_void_p),
        ("scale_row", ctypes.c_int64),
        ("scale_block", ctypes.c_int64),
        ("second", ctypes.c_void_p),
        ("second_row", ctypes.c_int64),
        ("second_block", ctypes.c_int64),
        ("super_scale", ctypes.c_void_p),
        ("super_second", ctypes.c_void_p),
        ("super_scale_step", ctypes.c_int64),
        ("super_second_step", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("global_scale", ctypes.c_void_p),
        ("global_count", ctypes.c_int64),
        ("global_divides", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("x_rows", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("x_type", ctypes.c_int32),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("y_type", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
        ("family", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("outlier_rows", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("factor_type", ctypes.c_int32),
    )


def _library(way: str) -> Any:
    """Build the kernels with one way to share work, and load them."""
    folder = ROOT / "build" / "threads" / way.replace(", ", "-")
    # Without the flag, what is inline would be shared among the libraries of one process.
    options = ["-DQ4_CPU_TESTS=ON", "-G", "Ninja", f"-DCMAKE_CXX_FLAGS=-fno-gnu-unique {WAYS[way]}"]
    for command in (
        ["cmake", "-S", str(SOURCE), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--target", "q4_cpu_shared"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603  # no input
    return ctypes.PyDLL(str(next(folder.rglob("libq4_cpu_shared.so"))))


class _Layer:
    """Copies of a 4-bit matrix, more than the cache holds, each with its call for one row of x."""

    def __init__(self, library: Any, rows: int, columns: int) -> None:
        levels = range(16)
        self.matrix = _Matrix(
            rows, columns, 32, 0, 4, 4, 0, 0, 0, 0, 0, tuple(q - 8.0 for q in levels), tuple(levels), 8.0, 1.0
        )
        library.q4_cpu_prepared_bytes.restype = ctypes.c_int64
        size = library.q4_cpu_prepared_bytes(ctypes.byref(self.matrix))
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scale = torch.rand(rows, columns // 32)
        x, y = torch.randint(-127, 128, (1, columns)).float(), torch.empty(1, rows)
        x[0, ::32] = 127  # int8 holds it as it is
        source = _Source(
            codes.data_ptr(), columns // 2, columns // 2, 1, columns // 2, 0, 0, scale.data_ptr(), columns // 8, 4
        )
        self.tensors, self.calls = [x, y], []
        for _ in range(max(2, CACHE_BYTES // size)):
            tiles = torch.empty(size, dtype=torch.uint8)
            assert (
                library.q4_cpu_pack(
                    ctypes.byref(self.matrix), ctypes.byref(source), ctypes.c_void_p(tiles.data_ptr()), 1
                )
                == 0
            )
            self.tensors.append(tiles)
            self.calls.append(
                _Call(tiles.data_ptr(), None, 0, 0, x.data_ptr(), 1, columns, 0, y.data_ptr(), rows, 0, None, 1, 1)
            )
        weight = torch.stack((codes & 15, codes >> 4), -1).view(rows, columns).double() - 8
        weight *= scale.double().repeat_interleave(32, 1)
        self.expected, self.bound = x.double() @ weight.T, 1e-5 * (x.double().abs() @ weight.abs().T)

    def check(self, library: Any, isa: int) -> None:
        """Stop where the numbers are wrong."""
        for call in self.calls:
            self.tensors[1].fill_(torch.nan)
            assert library.q4_cpu_linear(ctypes.byref(self.matrix), ctypes.byref(call), isa) == 0
            assert bool(((self.tensors[1].double() - self.expected).abs() <= self.bound).all())


def _used_s(burner: subprocess.Popen[bytes] | None) -> float:
    """Return the processor time that processes other than this one and the burner have used."""
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text("ascii").split()[1:9])
    used = (user + nice + system + irq + soft) / ticks - time.process_time()
    if burner is not None:
        fields = Path(f"/proc/{burner.pid}/stat").read_text("ascii").split()
        used -= (int(fields[13]) + int(fields[14])) / ticks
    return used


def _block(call: Callable[[int], object], between: Callable[[], object]) -> tuple[list[float], float]:
    """Return microseconds of each call, and those of one turn with what lies between calls."""
    samples: list[float] = []
    clock = time.perf_counter
    started = clock()
    while clock() - started < BLOCK_S:
        before = clock()
        call(len(samples))
        samples.append((clock() - before) * 1e6)
        between()
    return samples, (clock() - started) / len(samples) * 1e6


def _wait_100_us() -> None:
    end = time.perf_counter() + 1e-4
    while time.perf_counter() < end:
        pass


@contextlib.contextmanager
def _burner(*, is_wanted: bool) -> Iterator[subprocess.Popen[bytes] | None]:
    """Keep one core busy."""
    if not is_wanted:
        yield None
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def _scene(  # noqa: PLR0913  # one argument per fact
    libraries: dict[str, Any], layer: _Layer, isa: int, between: Callable[[], object], count: int, *, is_burning: bool
) -> dict[str, Any]:
    """Return what each way takes in one scene: per call and per turn, medians over blocks."""
    matrix = ctypes.byref(layer.matrix)
    pointers = [ctypes.byref(call) for call in layer.calls]
    ways = {**dict.fromkeys(libraries, 2), ALONE: 1}
    blocks: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    noisy = 0
    with _burner(is_wanted=is_burning) as burner:
        for way, threads in [item for _ in range(count) for item in ways.items()]:
            linear = libraries.get(way, next(iter(libraries.values()))).q4_cpu_linear
            for call in layer.calls:
                call.threads = threads
            for _ in range(TRIES):
                time.sleep(0.03)  # until the other threads sleep
                before, started = _used_s(burner), time.perf_counter()
                samples, turn = _block(lambda i, f=linear: f(matrix, pointers[i % len(pointers)], isa), between)  # type: ignore[misc]
                if (_used_s(burner) - before) / (time.perf_counter() - started) < QUIET:
                    blocks[way].append((statistics.median(samples), statistics.fmean(samples), turn))
                    break
                noisy += 1
                time.sleep(0.2)
            else:
                raise SystemExit(f"other processes use the machine: {noisy} noisy blocks")
    names = ("median_us", "mean_us", "turn_us")
    return {
        "noisy_blocks": noisy,
        **{
            way: dict(zip(names, (list(column) for column in zip(*rows, strict=True)), strict=True))
            for way, rows in blocks.items()
        },
    }


def main(options: Sequence[str] = ()) -> None:
    """Measure, write ``threads.json`` and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks threads", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one shape and one block of each, for development")
    is_quick = parser.parse_args(options).quick
    torch.set_num_threads(2)
    libraries = {way: _library(way) for way in WAYS}
    first = next(iter(libraries.values()))
    isa = first.q4_cpu_best_isa()
    large = torch.randn(1, 1 << 16)  # more than what torch leaves to one thread
    betweens = {
        "alone": lambda: None,
        "torch between": lambda: torch.nn.functional.silu(large),
        "100 µs between": _wait_100_us,
    }
    scenes: dict[str, Any] = {}
    shapes, count = (SHAPES[:1], 1) if is_quick else (SHAPES, BLOCKS)
    with torch.no_grad():
        for rows, columns in shapes:
            layer = _Layer(first, rows, columns)
            for library in libraries.values():
                layer.check(library, isa)
            for is_burning in (False, True):
                for between, function in betweens.items():
                    name = f"{rows}x{columns}, {between}{', a core burnt' if is_burning else ''}"
                    scenes[name] = _scene(libraries, layer, isa, function, count, is_burning=is_burning)
                    print(name)
                    for way, columns_ in scenes[name].items():
                        if way != "noisy_blocks":
                            medians = (
                                f"{key} {statistics.median(values or [float('nan')]):8.1f}"
                                for key, values in columns_.items()
                            )
                            print(f"    {way:<20}", *medians)
    result = {"unit": "us", "threads": 2, "block_s": BLOCK_S, "scenes": scenes}
    written = record.write("threads", result, folder=record.BUILD if is_quick else record.RESULTS)
    print(f"written: {written}")


if __name__ == "__main__":
    main()
