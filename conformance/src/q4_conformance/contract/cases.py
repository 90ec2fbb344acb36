"""The table of cases: data alone, which a run is counted against.

Ids are stable: ``<contract>/<part>/<weight>/<dtype>/<precision>``, or ``<contract>/<part>`` where no weight is judged.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance.contract.case import Case
from q4_conformance.oracle.weights import WeightRecipe
from q4core import BUILTIN_FORMATS, ActivationPrecision, Feature, Form, Packing, ScaleKind, find_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from q4core import Format

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SWEEP = (1, 2, 7, 16, 17, 33, 50, 65, 82, 100, 127, 128, 129, 200, 257, 400, 515, 0)
"""Both sides of usual tiles, each number of 16 rows that kernels have code for, and rows that no tile divides."""
_P = ActivationPrecision
_COARSE = (_P.INT16, _P.INT8, _P.FP4)
_USUAL_KINDS = (ScaleKind.E4M3_MUL, ScaleKind.PLAIN)
_ACTIVATION_SCALES = (2.0**-20, 0.0173, 37.5)
"""Static scales of activations: an ordinary one, and one on either side that usual activations are far from."""
_LONG, _LONGEST = 14400, 33344
"""In-features as in large models' widest layers, an odd number of blocks, and more than 15 bits count. The bound grows
with them as docs/tolerances.md says, until it hides whole elements."""
_WIDE = 65801
"""More out-features than 16 bits count, as vocabularies have; no tile divides them."""
_SLOW = frozenset({"calls", "varied_calls", "quantise_calls", "train_through", "stochastic", "compile", "elsewhere"})
"""Checks of thousands of calls, of a compiler and of another process, which take seconds on an idle machine."""
_GGML = frozenset({"q4_0", "q4_1", "iq4_nl", "q8_0", "mxfp4", "nvfp4"})


_CUDA_ALONE = {"EX-18"}
_ABOUT_CALLS = {"calls", "varied_calls", "modes", "settings", "forked"}
"""Checks of what a backend's calls do, which are asked for each precision of the activations."""


def _kinds(kind: Format) -> list[ScaleKind]:
    return sorted(kind.scale_kinds, key=lambda item: item.value)


def base_recipe(kind: Format) -> WeightRecipe:
    """Return the weight that a format is most often met as."""
    usual = next((item for item in _USUAL_KINDS if item in kind.scale_kinds), _kinds(kind)[0])
    return WeightRecipe(format=kind, scale_kind=usual, k=max(256, 2 * kind.block_size))


def _packings(kind: Format) -> list[Packing]:
    if kind.bits == 8:  # noqa: PLR2004  # one code per byte
        return [Packing.BYTES]
    return [Packing.LOW_FIRST, Packing.HIGH_FIRST, Packing.half_split(min(32, kind.block_size))]


def weight_recipes(kind: Format) -> list[WeightRecipe]:
    """Return the weights that a format is judged on: every scale kind, packing, block size and feature of it."""
    base = base_recipe(kind)
    recipes = [attrs.evolve(base, scale_kind=item) for item in _kinds(kind)]
    if ScaleKind.PLAIN in kind.scale_kinds:
        plain = attrs.evolve(base, scale_kind=ScaleKind.PLAIN)
        recipes += [attrs.evolve(plain, scale_dtype=item) for item in _DTYPES if item != plain.scale_dtype]
    recipes += [attrs.evolve(base, packing=item) for item in _packings(kind) if item != base.packing]
    if kind.name in _GGML:
        block = base.block_size
        grouped = Packing.BYTES if kind.bits == 8 else Packing.half_split(block)  # noqa: PLR2004  # as above
        recipes.append(attrs.evolve(base, packing=grouped, is_grouped=True))
    sizes = set(kind.block_sizes or {32, 64, 128, base.k})
    sizes = {item for item in sizes if item <= base.k} - {base.block_size}
    recipes += [attrs.evolve(base, block_size=item) for item in sorted(sizes)]
    large = (item for item in sorted(kind.block_sizes) if item > base.k)
    recipes += [attrs.evolve(base, block_size=item, n=5, k=2 * item) for item in large]
    recipes += [attrs.evolve(base, features=item) for item in _features(kind)]
    if ScaleKind.DOUBLE_QUANT in kind.scale_kinds:
        # More blocks than one entry of the second level holds.
        recipes.append(attrs.evolve(base, scale_kind=ScaleKind.DOUBLE_QUANT, n=80, k=512))
        flat = {Feature.FLAT_BLOCKS}
        recipes.append(attrs.evolve(base, scale_kind=ScaleKind.DOUBLE_QUANT, features=flat, n=33, k=200))
    if ScaleKind.SUPER_BLOCK in kind.scale_kinds:
        nested = attrs.evolve(base, scale_kind=ScaleKind.SUPER_BLOCK)
        recipes.append(attrs.evolve(nested, block_size=16))  # as in Q2_K, Q3_K and Q6_K
        if kind.bits == 4:  # noqa: PLR2004  # two codes per byte; as in Q4_K
            recipes.append(attrs.evolve(nested, packing=Packing.half_split(64)))
    for levels in {ScaleKind.DOUBLE_QUANT, ScaleKind.SUPER_BLOCK} & kind.scale_kinds:
        # Whoever unrolls levels may forget that x is permuted or scaled.
        both = {Feature.INPUT_PERMUTATION, Feature.INPUT_CHANNEL_SCALE}
        recipes.append(attrs.evolve(base, scale_kind=levels, features=both))
    if ScaleKind.E4M3_MUL in kind.scale_kinds:
        row = {Feature.ROW_GLOBAL_SCALE}
        recipes += [
            attrs.evolve(base, scale_kind=item, features=row) for item in (ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV)
        ]
    return recipes


def _features(kind: Format) -> Iterator[frozenset[Feature]]:
    if kind.form is Form.CODEBOOK:
        yield frozenset({Feature.CUSTOM_CODEBOOK})
    else:
        yield frozenset({Feature.ZERO_POINT})
        yield frozenset({Feature.FLOAT_ZERO_POINT})
        yield frozenset({Feature.ZERO_POINT, Feature.INPUT_PERMUTATION})
        yield frozenset({Feature.INPUT_CHANNEL_SCALE})
        yield frozenset({Feature.INPUT_PERMUTATION, Feature.INPUT_CHANNEL_SCALE})
    if kind.has_flat_blocks:
        yield frozenset({Feature.INPUT_CHANNEL_SCALE})


def _awkward(kind: Format) -> Iterator[WeightRecipe]:
    """Yield weights of odd sizes and places."""
    base, block = base_recipe(kind), kind.block_size
    for n in (1, 3, 17, 33):
        yield attrs.evolve(base, n=n)
    for blocks in (1, 3, 7):
        yield attrs.evolve(base, n=5, k=blocks * block)
    yield attrs.evolve(base, is_misaligned=True)
    if kind.name in _GGML:
        grouped = Packing.BYTES if kind.bits == 8 else Packing.half_split(block)  # noqa: PLR2004  # one code per byte
        yield attrs.evolve(base, packing=grouped, is_grouped=True, is_misaligned=True)
    if kind.form is Form.INTEGER:
        for k in (33, 200, 257):
            yield attrs.evolve(base, n=7, k=k)
            yield attrs.evolve(base, n=7, k=k, block_size=32, features={Feature.ZERO_POINT})
    if kind.has_flat_blocks:
        for n, k in ((5, 33), (7, 100), (3, 257), (1, 1)):
            yield attrs.evolve(base, n=n, k=k, features={Feature.FLAT_BLOCKS})


def _tailed(recipe: WeightRecipe) -> WeightRecipe:
    """Return a weight whose sizes no vector and no tile divides."""
    return attrs.evolve(recipe, n=67, k=3 * recipe.block_size)


def _in_each_dtype(case: Case) -> Iterator[Case]:
    for dtype in _DTYPES:
        yield attrs.evolve(case, dtype=dtype)


def _and_coarse(*cases: Case) -> Iterator[Case]:
    """Yield cases, and each of them once more for each coarser precision of the activations."""
    yield from cases
    for case, precision in itertools.product(cases, _COARSE):
        yield attrs.evolve(case, precision=precision)


def _all_ways(case: Case) -> Iterator[Case]:
    """Yield a case in each dtype, in each precision of the activations."""
    yield from _and_coarse(*_in_each_dtype(case))


def linear_cases(formats: Iterable[str | Format] = tuple(BUILTIN_FORMATS)) -> tuple[Case, ...]:
    """Return the cases that concern each implementation of ``x @ wᵀ + bias``: functions and backends."""
    return tuple(case for item in formats for case in _linear_cases(find_format(item)))


def _linear_cases(kind: Format) -> Iterator[Case]:
    base = base_recipe(kind)
    text = "every element of every draw lies within the float32 bound"
    for recipe in weight_recipes(kind):
        yield from _in_each_dtype(Case("TC-09", "values", text, "values", recipe=recipe))
    for precision, recipe in itertools.product(_COARSE, weight_recipes(kind)):
        coarse = attrs.evolve(recipe, has_coarse_channels=Feature.INPUT_CHANNEL_SCALE in recipe.features)
        yield from _in_each_dtype(Case("TC-09", "values", text, "values", recipe=coarse, precision=precision))
    if kind.name in {"nvfp4", "mxfp4"}:
        text = "a static activation scale holds for FP4 activations, and changes no other path"
        for scale, precision in itertools.product(_ACTIVATION_SCALES, (_P.EXACT, _P.FP4)):
            static = attrs.evolve(base, activation_scale=scale)
            case = Case("TC-09", "static", text, "values", recipe=static, precision=precision)
            yield attrs.evolve(case, rows=(1, 20))
            yield attrs.evolve(case, dtype=torch.bfloat16)
    for contract, part, text in (
        ("TC-09", "bias", "the bias is added before the one rounding"),
        ("TC-09", "leading", "leading dimensions are preserved, and M = 0 gives an empty result"),
        ("TC-09", "out", "out= is written completely and returned"),
        ("TC-11", "strided", "inputs that are not contiguous are refused by a typed error or computed right"),
    ):
        case = Case(contract, part, text, part, recipe=base)
        yield from _all_ways(case)
        if part == "bias":
            yield from _all_ways(attrs.evolve(case, recipe=_tailed(base)))
    text = "odd sizes and places are refused with a reason or computed right"
    for recipe in _awkward(kind):
        yield from _all_ways(Case("TC-11", "awkward", text, "awkward", recipe=recipe, rows=(1, 5, 131)))
    text = "a part of a larger weight, cut out as a view, is computed right"
    yield from _all_ways(Case("TC-11", "cut", text, "cut", recipe=base))
    yield from _sized_cases(base, kind)
    yield from _called_cases(base)
    yield from _content_cases(base, kind)


def _sized_cases(base: WeightRecipe, kind: Format) -> Iterator[Case]:
    """Yield the cases of how many rows, out-features and in-features there are."""
    text = "right where rows are as long as in large models"
    long = attrs.evolve(base, n=8, k=_LONG)
    case = Case("EX-01", "long", text, "values", recipe=long, rows=(1, 17, 129), seeds=(11,))
    yield from _all_ways(case)
    longest = attrs.evolve(base, n=2, k=_LONGEST)
    yield from _and_coarse(attrs.evolve(case, recipe=longest, rows=(1, 17)))
    sizes: tuple[tuple[str, int, int, tuple[int, ...], str], ...] = (
        ("wide", _WIDE, 64, (1, 3), "right where there are as many out-features as a vocabulary has words"),
        ("many", 48, base.k, (4099,), "right where there are as many rows as in a long prompt"),
        ("tiles", 515, base.k, (131, 257), "right where there are several tiles of rows and of out-features"),
    )
    for part, n, k, rows, text in sizes:
        sized = attrs.evolve(base, n=n, k=k)
        yield from _all_ways(Case("EX-01", part, text, "values", recipe=sized, rows=rows, seeds=(11,)))
    text = "right for few rows and many, each sixteen up to 128"
    yield from _all_ways(Case("EX-01", "rows", text, "values", recipe=base, rows=_SWEEP))
    text = "the error of free-range activations is what the precision's quantiser makes"
    yield from _and_coarse(Case("EX-01", "noise", text, "noise", recipe=base, rows=(1, 40)))
    drawn = attrs.evolve(base, n=67, k=max(256, 3 * kind.block_size))
    text = "shapes drawn by chance are refused with a reason or computed right"
    yield from _all_ways(Case("EX-01", "shapes", text, "shapes", recipe=drawn, rows=(30,), seeds=(1,)))


def _called_cases(base: WeightRecipe) -> Iterator[Case]:
    """Yield the cases of how, where and next to what a layer is called."""
    for contract, part, name, text in (
        ("EX-03", "repeat", "repeat", "the same input gives the same bits"),
        ("EX-03", "inference", "inference", "without autograd, or in inference mode, the bits are the same"),
        ("EX-04", "threads", "threads", "threads that share a session and its layers get the bits that one alone gets"),
        ("EX-05", "gradient", "gradient", "the gradient to the input is there and exact"),
        ("EX-03", "changed", "changed", "what x and the bias hold now counts, not what they held before"),
        ("EX-04", "neighbours", "neighbours", "layers of other sizes change nothing of one another"),
        ("EX-08", "unmodified", "unmodified", "nothing but the result is written"),
        ("EX-08", "last-page", "last_page", "nothing is read past the end of a buffer"),
        ("EX-10", "zeros", "zero_inputs", "rows and blocks of zeros in x"),
        ("EX-10", "non-finite", "non_finite", "NaN and infinity stay in their row, and stay visible"),
    ):
        usual: tuple[int, ...] = (1, 3, 17)
        rows = {"non_finite": (3, 40), "gradient": (*usual, 129)}.get(name, usual)
        recipe = _tailed(base) if name in {"gradient", "unmodified", "last_page"} else base
        yield from _all_ways(Case(contract, part, text, name, recipe=recipe, rows=rows))
    long = attrs.evolve(base, n=8, k=_LONG)
    for contract, part, name, text in (
        ("EX-03", "repeat", "repeat", "the same input gives the same bits"),
        ("EX-10", "non-finite", "non_finite", "NaN and infinity stay in their row, and stay visible"),
    ):
        yield from _and_coarse(Case(contract, part, text, name, recipe=long, rows=(2, 129)))
    counted, text = attrs.evolve(base, n=67), "right for every number of threads that torch is set to use"
    yield from _all_ways(Case("EX-04", "counts", text, "thread_counts", recipe=counted, rows=(1, 3, 67)))


def _content_cases(base: WeightRecipe, kind: Format) -> Iterator[Case]:
    """Yield the cases of activations and scales that are unusually large, small or zero."""
    for part, shift, text in (("large", 20, "activations far above 65,504"), ("small", -30, "activations near 2^-40")):
        case = Case("EX-10", part, text, "values", recipe=base, shift=shift)
        yield from _and_coarse(case, attrs.evolve(case, dtype=torch.bfloat16))
    for scale_kind in _kinds(kind):
        edges = attrs.evolve(base, scale_kind=scale_kind, has_edges=True)
        yield from _all_ways(
            Case("EX-10", "edges", "zero blocks, negative zero, tiny and large scales", "values", recipe=edges)
        )


def backend_cases(formats: Iterable[str | Format] = tuple(BUILTIN_FORMATS)) -> tuple[Case, ...]:
    """Return the cases that concern backends alone; ``linear_cases`` concern them, too."""
    return tuple(case for item in formats for case in _backend_cases(find_format(item)))


def _backend_cases(kind: Format) -> Iterator[Case]:
    base, of_backend = base_recipe(kind), functools.partial(Case, profile="backend")
    for contract, part, name, text in (
        ("TC-04", "override", "override", "the backend asked for serves each legal compute path, and is recorded"),
        ("TC-05", "unavailable", "unavailable", "KERNEL_ONLY is an error with reasons, KERNEL_OR_FALLBACK falls back"),
        ("TC-10", "refusals", "refusals", "what does not fit is refused by a typed error that names the layer"),
        ("TC-12", "mix", "mix", "diagnostics are complete and true in every mix of policies"),
        ("TC-17", "cuda-only", "cuda_only", "a CUDA-only backend on the CPU is refused at once"),
        ("EX-06", "state", "state", "saved, loaded and copied layers give the same bits"),
        ("EX-14", "record", "record", "the record of what ran is true for every M"),
        ("EX-17", "undeclared", "undeclared", "what is not declared is refused by the core"),
        ("EX-17", "refused", "refused", "every request of the table that is not declared is refused by the core"),
        ("EX-19", "ranges", "ranges", "layers for few, all and some rows are right wherever they serve"),
        ("TC-09", "prepare", "prepare_again", "preparing again gives the same layout and bits"),
        ("TC-18", "calls", "calls", "10,000 calls: the same bits, memory flat"),
        ("TC-18", "varied", "varied_calls", "600 numbers of rows and 300 threads: memory flat"),
        ("EX-03", "modes", "modes", "autocast and default dtypes change no bits"),
        ("EX-08", "settings", "settings", "process-wide state of torch and numpy is left alone"),
        ("EX-15", "forked", "forked", "a process forked after a call gets the bits of its parent"),
        ("TC-18", "quantiser", "quantise_calls", "10,000 quantiser calls: the reference's bytes, memory flat"),
        ("TC-19", "native", "ste_native", "linear_ste by the native quantiser has the analytic gradients"),
        ("TC-20", "frozen", "train_through", "1,000 steps through a frozen layer: falling loss, memory flat"),
        ("EX-07", "opcheck", "opcheck", "torch.library.opcheck passes"),
        ("EX-07", "compile", "compile", "torch.compile(fullgraph=True) gives eager's bits"),
        ("EX-12", "isolation", "isolation", "broken plugins next to it change nothing; a namesake is an error"),
        ("EX-13", "stochastic", "stochastic", "stochastic rounding is unbiased"),
        ("EX-15", "copies", "copies", "copied and moved layers give the same bits, codes and scales stay"),
        ("EX-15", "elsewhere", "elsewhere", "a layer pickled to a new process gives the same bits there"),
    ):
        rows = (1, 3, 17, 128) if name == "record" else (1, 17)
        case = of_backend(contract, part, text, name, recipe=base, rows=rows, is_slow=name in _SLOW)
        yield from _and_coarse(case) if name in _ABOUT_CALLS else (case,)
    for part, text in (
        ("numbers", "spikes give float64's numbers, and the same bits among any rows and on any threads"),
        ("pages", "nothing is read or written past the end of a tensor"),
        ("quiet", "a product of spikes makes no tensor"),
    ):
        uneven = attrs.evolve(base, n=67)
        yield of_backend("EX-22", part, text, f"spikes_{part}", recipe=uneven, rows=(1, 5, 17))
    text = "every dtype of x and y that is declared is served rightly"
    yield from _in_each_dtype(of_backend("EX-02", "dtypes", text, "dtypes", recipe=base))
    text = "closing gives every byte back, and later use is an error"
    held = attrs.evolve(base, n=1024, k=1024)
    yield of_backend("EX-09", "dispose", text, "dispose", recipe=held, is_slow=True)
    large = attrs.evolve(base, n=2048, k=2048)
    yield of_backend(
        "EX-14", "kind", "a path that says KERNEL makes no dense weight", "kind", recipe=large, is_slow=True
    )
    for recipe in weight_recipes(kind):
        yield of_backend("EX-16", "export", "the exported weight is the weight, bit for bit", "export", recipe=recipe)
        if recipe.features:
            text = "what is not declared is refused by the core"
            yield of_backend("EX-17", "undeclared", text, "undeclared", recipe=recipe)


def device_cases(formats: Iterable[str | Format] = tuple(BUILTIN_FORMATS)) -> tuple[Case, ...]:
    """Return the cases of devices, in addition to ``linear_cases`` and ``backend_cases``.

    Those of graphs, streams and waiting (EX-18) concern CUDA devices alone. Those of quantiser, product and choice run
    wherever the backend does: on the CPU where kernels are interpreted or emulated.
    """
    return tuple(case for item in formats for case in _device_cases(find_format(item)))


def _device_cases(kind: Format) -> Iterator[Case]:
    base, of_backend = base_recipe(kind), functools.partial(Case, profile="backend")
    text = "the native quantiser gives the reference's bytes"
    yield of_backend("TC-14", "quantiser", text, "native_quantiser", recipe=base)
    wide = attrs.evolve(base, n=136, k=max(512, 4 * kind.block_size))
    text = "the product of 4-bit activations is finite, right on their grid and as noisy as they are"
    product = of_backend(
        "TC-15", "product", text, "native_product", recipe=wide, precision=_P.FP4, rows=(1, 8, 33, 129)
    )
    yield from (product, attrs.evolve(product, dtype=torch.bfloat16))
    text = "unasked, the kernel backend serves, and the record says which path"
    yield from _in_each_dtype(of_backend("TC-16", "picked", text, "picked", recipe=base))
    for part, text in (
        ("graph", "a replayed CUDA graph gives the bits of plain calls"),
        ("quiet", "a call neither waits for the device nor asks it for memory, and leaves none taken"),
        ("stream", "a call runs on the caller's stream"),
    ):
        case = of_backend("EX-18", part, text, part, recipe=wide, dtype=torch.bfloat16, rows=(1, 8, 17, 600))
        yield from (case, attrs.evolve(case, precision=_P.FP4))


def program_cases(formats: Iterable[str | Format] = tuple(BUILTIN_FORMATS)) -> tuple[Case, ...]:
    """Return the cases that concern a backend's programs."""
    of_program = functools.partial(Case, "EX-21", profile="program")
    text = "each operation has its float64 numbers, within its roundings, and writes nothing else"
    cases = [of_program("operations", text, "program_operations")]
    for part, text in (
        ("packed", "packed products and rows have the bits of their layers"),
        ("whole", "a block of a decoder has the bits of its steps one by one, on any number of threads"),
        ("tokens", "several tokens at once have the bits of one by one, of any number and on any threads"),
        ("pages", "nothing is read or written past the end of a buffer"),
        ("refused", "numbers out of range and buffers that changed are typed errors, before anything is written"),
        ("quiet", "a run makes no tensor"),
        ("forked", "a process forked after a run gets the bits of its parent"),
    ):
        cases += [
            of_program(part, text, f"program_{part}", recipe=base_recipe(find_format(item)), rows=(1, 5, 17))
            for item in formats
        ]
    of_circuit = functools.partial(Case, "EX-25", profile="program")
    for part, text in (
        ("operations", "operations of spiking networks have the bits of float32 rounded one by one, at any round"),
        ("send", "sums of sparse synapses are in the order of sources, then synapses, on any number of threads"),
        ("rounds", "a circuit has its exact bits after many rounds, in calls of any length, on any threads"),
        ("pages", "nothing is read or written past the end of a buffer or of synapses"),
        ("refused", "a negative clock and a ring shorter than a delay are typed errors, before anything is written"),
        ("quiet", "a run of many rounds makes no tensor"),
        ("forked", "a process forked after a run goes on with the bits of its parent"),
    ):
        cases.append(of_circuit(part, text, f"spiking_{part}"))
    text = "packed products with bits have the bits of the product with spikes"
    cases += [
        of_circuit("packed", text, "spiking_packed", recipe=base_recipe(find_format(item)), rows=(1, 5))
        for item in formats
    ]
    return tuple(cases)


def cases_of(formats: Iterable[str | Format], device: str) -> tuple[Case, ...]:
    """Return every case that concerns a backend on a device."""
    chosen = tuple(formats)
    is_cuda = torch.device(device).type == "cuda"
    own = (case for case in device_cases(chosen) if is_cuda or case.contract not in _CUDA_ALONE)
    return (*linear_cases(chosen), *backend_cases(chosen), *own)


def select_cases(cases: Iterable[Case], only: Iterable[str]) -> tuple[Case, ...]:
    """Return the cases whose id starts with one of the texts in ``only``; all where that is empty."""
    prefixes = tuple(only)
    return tuple(case for case in cases if not prefixes or case.id.startswith(prefixes))
