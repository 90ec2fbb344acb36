"""The CUDA C++ kernels, whole, on the emulator: every index, and what happens at every edge."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch
from nvfp4_emulation import emulated_library, mutated_library, set_manner

from q4_nvfp4_native.calls import NUMBER_TYPES, GemmCall, QuantizeCall
from q4_nvfp4_native.configurations import CUDA_FOLDER, configurations, header
from q4_nvfp4_native.driver import Driver
from q4core import BUILTIN_FORMATS

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = {"nvfp4": 16, "mxfp4": 32}
MANNERS = [(False, False), (True, False), (False, True), (True, True)]
DTYPES = tuple(NUMBER_TYPES)
LEVELS = torch.tensor(BUILTIN_FORMATS["nvfp4"].codebook)


def _driver(path: Path | None = None) -> Driver:
    return Driver(ctypes.CDLL(str(path or emulated_library())))


def _launch(
    name: str, blocks: int, threads: int, shared_bytes: int, call: GemmCall | QuantizeCall, path: Path | None = None
) -> None:
    driver = _driver(path)
    module = driver.load(b"emulated", "the kernels")
    driver.kernel(module, name, threads=threads, shared_bytes=shared_bytes).launch(blocks, 0, call)
    assert ctypes.CDLL(str(path or emulated_library())).emulator_violations() == 0


def _quantize(x: torch.Tensor, kind: str, static: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return codes, scale bytes and row scales as the kernel writes them."""
    rows, columns = x.shape
    padded = -(-columns // 128) * 128
    codes = torch.full((rows, padded // 2), 0xEE, dtype=torch.uint8)
    scales = torch.full((rows, padded // BLOCKS[kind]), 0xEE, dtype=torch.uint8)
    row_scales = torch.full((rows,), torch.nan)
    address = 0 if static is None else static.data_ptr()
    call = QuantizeCall(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), row_scales.data_ptr(), address, x.stride(0), rows, columns,
        NUMBER_TYPES[x.dtype],
    )  # fmt: skip
    _launch(f"q4_quantize_{kind}", rows, 256, 32, call)
    return codes, scales, row_scales


def _scale_values(scales: torch.Tensor, kind: str) -> torch.Tensor:
    return scales.view(torch.float8_e4m3fn if kind == "nvfp4" else torch.float8_e8m0fnu).to(torch.float64)


def _decode(codes: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    values = LEVELS[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()].to(torch.float64)
    return values * _scale_values(scales, kind).repeat_interleave(BLOCKS[kind], 1)


def _operand(rows: int, padded: int, kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (rows, padded // 2), dtype=torch.uint8, generator=generator)
    low, high = (8, 0x7E) if kind == "nvfp4" else (120, 134)
    shape = (rows, padded // BLOCKS[kind])
    return codes, torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def _multiply(  # the facts of one product
    a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], kind: str, tile: str, dtype: torch.dtype = torch.float32,
    factor: torch.Tensor | None = None, divides: bool = False, bias: torch.Tensor | None = None,
    path: Path | None = None,
) -> torch.Tensor:  # fmt: skip
    rows, columns = len(a[0]), len(b[0])
    guard = 7  # elements on both sides that must stay as they are; an odd number, so that pairs are not aligned
    room = torch.full((rows * columns + 2 * guard,), 12345.0).to(dtype)
    out = room[guard : guard + rows * columns].view(rows, columns)
    call = GemmCall(
        a[0].data_ptr(), a[1].data_ptr(), a[2].data_ptr(), b[0].data_ptr(), b[1].data_ptr(),
        0 if factor is None else factor.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), rows,
        columns, 2 * a[0].shape[1], factor is not None and factor.numel() > 1, divides, NUMBER_TYPES[dtype],
    )  # fmt: skip
    own = configurations()[tile]
    shared_bytes = own.shared_bytes(BLOCKS[kind])
    _launch(f"q4_gemm_{kind}_{tile}", own.blocks(rows, columns), own.threads, shared_bytes, call, path)
    untouched = torch.full((guard,), 12345.0).to(dtype)
    assert torch.equal(room[:guard], untouched)
    assert torch.equal(room[-guard:], untouched)
    return out


def _case(rows: int, columns: int, padded: int, kind: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(rows + 1000 * columns + padded)
    a = _operand(rows, padded, kind, generator)
    powers = torch.randint(-3, 4, (rows,), generator=generator)
    return (*a, torch.ldexp(torch.ones(rows), powers)), _operand(columns, padded, kind, generator)


def _exact(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 product and the sum of magnitudes."""
    left, right = _decode(a[0], a[1], kind), _decode(b[0], b[1], kind)
    row = a[2].to(torch.float64)[:, None]
    return row * (left @ right.T), row * (left.abs() @ right.abs().T)


def _assert_right(y: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, steps: int) -> None:
    half_ulp = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[y.dtype]
    bound = (steps + 8) * 2.0**-24 * size
    assert bool(((y.to(torch.float64) - exact).abs() <= bound + half_ulp * (exact.abs() + bound)).all())


@pytest.mark.parametrize(("early_copies", "backwards"), MANNERS)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(
    ("tile", "rows", "columns", "padded"),
    [
        ("m16", 1, 1, 128),
        ("m16", 16, 33, 512),
        ("m16", 150, 70, 128),  # more rows of tiles than one group has
        ("m16", 9, 70, 2304),  # more steps than stages, and a last step that not every group of warps has
        ("m64", 17, 64, 128),
        ("m64", 70, 65, 1152),
        ("m128", 129, 130, 256),
        ("m128", 5, 131, 1024),
    ],
)
def test_product_is_right(
    tile: str, rows: int, columns: int, padded: int, kind: str, early_copies: bool, backwards: bool
) -> None:
    """Every element lies within the float32 bound, whenever copies arrive and in whatever order threads run."""
    set_manner(emulated_library(), early_copies=early_copies, backwards=backwards)
    a, b = _case(rows, columns, padded, kind)
    _assert_right(_multiply(a, b, kind, tile), *_exact(a, b, kind), padded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_global_scale_and_bias(dtype: torch.dtype, divides: bool, per_row: bool) -> None:
    """The global scale multiplies or divides, one for all or one for each out-feature; the bias comes after it."""
    a, b = _case(5, 37, 256, "nvfp4")
    generator = torch.Generator().manual_seed(3)
    factor = torch.rand(37 if per_row else 1, generator=generator) / 4096 + 1 / 4096
    bias = torch.randn(37, generator=generator).to(dtype)
    exact, size = _exact(a, b, "nvfp4")
    scale = factor.to(torch.float64)
    if divides:
        factor, scale = 1 / factor, (1 / (1 / factor).to(torch.float64))
    y = _multiply(a, b, "nvfp4", "m16", dtype, factor, divides, bias)
    wide = bias.to(torch.float64)
    _assert_right(y, exact * scale + wide, size * scale + wide.abs(), 256)


@pytest.mark.parametrize("tile", ["m16", "m64", "m128"])
def test_a_row_depends_on_itself_alone(tile: str) -> None:
    """A row's bits are the same whatever other rows are there."""
    a, b = _case(16, 40, 640, "nvfp4")
    whole = _multiply(a, b, "nvfp4", tile)
    alone = _multiply(tuple(part[11:12].contiguous() for part in a), b, "nvfp4", tile)
    assert torch.equal(whole[11:12], alone)


PLANTED = [
    ("gemm.cuh", "chunk_place(row, 2 * step + matrix / 2)", "chunk_place(row, 2 * step + matrix % 2)"),
    ("gemm.cuh", "first + matrix / 2 * 8 + matrix_row", "first + matrix % 2 * 8 + matrix_row"),
    ("gemm.cuh", "(first + lane % 2 * 8 + lane / 4)", "(first + lane / 4)"),
    ("gemm.cuh", "(first + 8 + lane / 4) * T::SCALE_BYTES", "(first + lane / 4) * T::SCALE_BYTES"),
    ("gemm.cuh", "row + 4 * step", "row"),
    ("gemm.cuh", "start < k;\n        const uint8* from", "true;\n        const uint8* from"),
    ("gemm.cuh", "start < k;\n        const int64 place", "true;\n        const int64 place"),
    ("gemm.cuh", "first + row < total && start < k;\n        const uint8*", "start < k;\n        const uint8*"),
    ("gemm.cuh", "first_m + i * 16 + half * 8 + lane / 4;", "first_m + i * 16 + lane / 4;"),
    ("gemm.cuh", "wait_for_copies<T::STAGES - 2>();", "wait_for_copies<T::STAGES - 1>();"),
    ("gemm.cuh", "        synchronize();  // everybody's", "        // everybody's"),
]  # fmt: skip
"""File, original text → planted text; the first three in each run, for each needs a compilation."""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [*PLANTED[:3], *(pytest.param(*row, marks=pytest.mark.soak) for row in PLANTED[3:])],
    ids=lambda text: text.split("\n")[0][:40],
)
def test_a_planted_fault_is_caught(file: str, old: str, new: str) -> None:
    """With one index, wait or barrier of the kernel changed, the same product is wrong."""
    path = mutated_library({file: (old, new)})
    a, b = _case(70, 65, 1152, "nvfp4")
    exact, size = _exact(a, b, "nvfp4")
    with pytest.raises(AssertionError):  # noqa: PT012  # any of the four manners may show it
        for early_copies, backwards in MANNERS:
            set_manner(path, early_copies=early_copies, backwards=backwards)
            for tile in ("m64", "m16"):  # m16 splits K, so that the last step is not whole
                _assert_right(_multiply(a, b, "nvfp4", tile, path=path), exact, size, 1152)


@pytest.mark.parametrize("kind", BLOCKS)
def test_configurations_are_those_of_the_kernels(kind: str) -> None:
    """Threads and shared memory, computed in Python, are what the C++ templates say, and fit sm_120 and sm_121."""
    library = ctypes.CDLL(str(emulated_library()))
    for name, own in configurations().items():
        shared_bytes, threads = ctypes.c_int(), ctypes.c_int()
        assert (
            library.emulator_shape(name.encode(), kind == "mxfp4", ctypes.byref(shared_bytes), ctypes.byref(threads))
            == 0
        )
        assert (own.shared_bytes(BLOCKS[kind]), own.threads) == (shared_bytes.value, threads.value)
        assert own.shared_bytes(BLOCKS[kind]) <= 101376


def test_header_is_made_from_the_data() -> None:
    """configurations.cuh is what configurations.json says."""
    assert (CUDA_FOLDER / "configurations.cuh").read_text(encoding="utf-8") == header()


# -- activations


def _power_scale(x: torch.Tensor, static: float | None) -> torch.Tensor:
    """Return each row's scale by the rule in words: the least power of two that is large enough."""
    if static is not None:
        return torch.full((len(x), 1), 2.0 ** float(torch.tensor(static).log2().ceil()), dtype=torch.float64)
    largest = x.abs().amax(1, keepdim=True).to(torch.float64)
    power = torch.where(largest > 0, (largest / 2688).log2().ceil(), -126).clamp(min=-126)
    return torch.exp2(power)


def _quantize_ref(x: torch.Tensor, kind: str, static: float | None = None) -> tuple[torch.Tensor, ...]:
    """Return what the kernel must write, for finite x, by torch's own casts."""
    padded = -(-x.shape[1] // 128) * 128
    wide = torch.nn.functional.pad(x.to(torch.float32), (0, padded - x.shape[1]))
    blocks = wide.unflatten(1, (-1, BLOCKS[kind]))
    largest = blocks.abs().amax(-1)
    share = largest / torch.tensor(6.0)
    if kind == "nvfp4":
        row = _power_scale(wide, static).to(torch.float32)
        scale = (share * (1 / row)).clamp(max=448.0).to(torch.float8_e4m3fn)
        floored = torch.where((scale.to(torch.float32) == 0) & (largest > 0), 2.0**-9, scale.to(torch.float32))
        scale = floored.to(torch.float8_e4m3fn)
        factor = torch.where(floored == 0, 0.0, 1 / floored)
        scaled = blocks * (1 / row)[..., None] * factor[..., None]
    else:
        row = torch.ones(len(x), 1)
        mantissa, exponent = torch.frexp(share)
        power = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-126)
        power = torch.where(share == 0, -126, power)
        scale = (power + 127).to(torch.uint8)
        scaled = blocks * ((127 - power) << 23).view(torch.float32)[..., None]
    sizes = scaled.abs()
    limits = [(0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)]
    codes = sum(((sizes >= at) if ties_up else (sizes > at)).to(torch.uint8) for at, ties_up in limits)
    codes = (codes | torch.signbit(scaled).to(torch.uint8) * 8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.view(torch.uint8), row[:, 0].to(torch.float32)


def _draws(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(3, 200, generator=generator)
    spread = torch.randn(4, 2100, generator=generator) * torch.exp2(
        torch.randint(-9, 9, (4, 2100), generator=generator)
    )
    ties = torch.randint(-24, 25, (3, 144), generator=generator) * 0.25
    edges = torch.zeros(4, 64)
    edges[1, 5] = 2.0**-20
    edges[2, 63] = -3.0
    edges[2, 0] = -0.0
    edges[3] = 2688.0
    tiny = torch.randn(2, 32, generator=generator) * 2.0**-12
    return [draw.to(dtype) for draw in (normal, spread, ties, edges, tiny)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "static"),
    [("nvfp4", static) for static in (None, 2.0**-20, 2.0**-9, 0.003, 0.0173, 37.5)] + [("mxfp4", None)],
)
def test_activations_are_rounded_as_said(dtype: torch.dtype, kind: str, static: float | None) -> None:
    """Codes, block scales and row scales are those of the rule, computed another way, to the bit."""
    given = None if static is None else torch.tensor([static])
    for x in _draws(dtype):
        for got, wanted in zip(_quantize(x, kind, given), _quantize_ref(x, kind, static), strict=True):
            assert torch.equal(got, wanted), (kind, x.shape)


@pytest.mark.parametrize("kind", BLOCKS)
def test_strides_and_addresses(kind: str) -> None:
    """Rows at any stride and address give the codes that packed rows give."""
    room = torch.randn(5, 301).to(torch.bfloat16)
    x = room[:, 1:298]
    for got, wanted in zip(_quantize(x, kind), _quantize(x.contiguous(), kind), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_further_apart_than_2_31_elements(kind: str) -> None:
    """A row's place is computed in 64 bits: two rows of one huge buffer, nearly none of it touched, are found."""
    step = 2**31 + 24
    x = torch.empty(step + 200, dtype=torch.bfloat16).as_strided((2, 200), (step, 1))
    x.copy_(torch.randn(2, 200))
    for got, wanted in zip(_quantize(x, kind), _quantize(x.contiguous(), kind), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("static", [None, 1.0])
def test_non_finite_rows_are_nan_and_alone(kind: str, bad: float, static: float | None) -> None:
    """A NaN or infinity makes its own row's scale NaN, and leaves the other rows as they are."""
    x = torch.randn(3, 96)
    spoilt = x.clone()
    spoilt[1, 70] = bad
    given = None if static is None else torch.tensor([static])
    clean, dirty = _quantize(x, kind, given), _quantize(spoilt, kind, given)
    assert bool(dirty[2][1].isnan())
    for good, other in zip(clean, dirty, strict=True):
        assert torch.equal(good[[0, 2]], other[[0, 2]])


@pytest.mark.parametrize("exponent", [-100, -20, 0, 60])
def test_values_on_the_grid_are_kept(exponent: int) -> None:
    """E2M1 values times a power of two, with a largest one in each block, lose nothing."""
    x = LEVELS[torch.randint(0, 16, (4, 128))] * 2.0**exponent
    x[:, ::16] = 6.0 * 2.0**exponent
    codes, scales, rows = _quantize(x, "nvfp4")
    assert torch.equal(_decode(codes, scales, "nvfp4") * rows.to(torch.float64)[:, None], x.to(torch.float64))
