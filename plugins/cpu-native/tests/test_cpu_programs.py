"""Programs on the native engine: inputs, outputs and reports."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4_cpu_native import CpuNative
from q4_dequant_fallback import DequantFallback
from q4_programs import BoundLayer, Buffer, Op, Program, Step, View, bind
from q4_programs.cache_rows import narrowed, row_columns, widened
from q4_programs.ops import SPIKING, WITH_SPANS
from tests.support import samples
from tests.support.cpu_layers import ISAS, random_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS = sorted(CpuNative.capabilities.formats)
WIDTH, HEADS, COLUMNS, CAPACITY, VOCABULARY = 96, 6, 16, 12, 70


@pytest.fixture(params=ISAS)
def registry(request: pytest.FixtureRequest) -> q4.Registry:
    """Return the backend with each instruction set that this machine has, and the reference."""
    given = [CpuNative(request.param), DequantFallback()]
    return q4.Registry([("given", types.SimpleNamespace(q4_backends=q4.hookimpl(lambda: given)))])


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _layer(
    registry: q4.Registry,
    rows: int,
    columns: int,
    form: str = "q4_0",
    bias: torch.Tensor | None = None,
    precision: str = "auto",
) -> q4.Q4Linear:
    weight = random_weight(form, rows, columns, rows)
    config = q4.SessionConfig(device="cpu", activation_precision=precision)
    return q4.Q4Linear(weight, bias, registry=registry, config=config)


class Block:
    """A decoder of one block, and what it is bound to."""

    def __init__(self, registry: q4.Registry, precision: str = "auto") -> None:
        sizes = [(VOCABULARY, WIDTH), (WIDTH, WIDTH), (WIDTH // 2, WIDTH), (WIDTH // 2, WIDTH), (WIDTH, WIDTH)]
        sizes += [(160, WIDTH), (160, WIDTH), (WIDTH, 160)]
        self.layers = [_layer(registry, *size, precision=precision) for size in sizes]
        self.token, self.position, self.best = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
        self.keys, self.values = (torch.zeros(HEADS // 2 * CAPACITY * COLUMNS) for _ in range(2))
        table = torch.randn(CAPACITY, COLUMNS, generator=torch.Generator().manual_seed(1))
        self.tensors = [self.token, self.position, self.best, self.keys, self.values, table, torch.ones(WIDTH)]
        self.tensors += [torch.zeros(VOCABULARY)]
        buffers = [Buffer(f"bound {i}", tensor.numel(), tensor.dtype, True) for i, tensor in enumerate(self.tensors)]
        names = {"x": WIDTH, "h": WIDTH, "q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "g": 160, "u": 160}
        places = {name: len(buffers) + i for i, name in enumerate(names)}
        buffers += [Buffer(name, size) for name, size in names.items()]
        x, h, q, k, v, g, u = (View(places[name], 1, size) for name, size in names.items())
        token, position, best = (View(i, 1, 1) for i in range(3))
        cache = [View(i, HEADS // 2 * CAPACITY, COLUMNS) for i in (3, 4)]
        norm, rotation = View(6, 1, WIDTH), View(5, CAPACITY, COLUMNS)
        queries, key_heads, value_heads = (View(view.buffer, view.columns // COLUMNS, COLUMNS) for view in (q, k, v))
        mixed = View(places["h"], HEADS, COLUMNS)
        steps = (
            Step(Op.EMBEDDING, (token,), (x,), 0),
            Step(Op.RMS_NORM, (x, norm), (h,), numbers=(1e-5, 1)),
            *(Step(Op.LINEAR, (h,), (to,), layer) for layer, to in ((1, q), (2, k), (3, v))),
            *(Step(Op.ROTARY, (to, rotation, position), (to,), numbers=(0,)) for to in (queries, key_heads)),
            *(Step(Op.STORE, (of, position), (to,)) for of, to in zip((key_heads, value_heads), cache, strict=True)),
            Step(Op.ATTENTION, (queries, *cache, position), (mixed,), numbers=(HEADS // 2, 0.25, 0)),
            Step(Op.LINEAR, (h,), (q,), 4),
            Step(Op.ADD, (x, q), (x,)),
            Step(Op.LAYER_NORM, (x, norm, norm), (h,), numbers=(1e-5,)),
            Step(Op.LINEAR, (h,), (g,), 5),
            Step(Op.LINEAR, (h,), (u,), 6),
            Step(Op.SILU, (g,), (g,)),
            Step(Op.MULTIPLY, (g, u), (g,)),
            Step(Op.LINEAR, (g,), (h,), 7),
            Step(Op.ADD, (x, h), (x,)),
            Step(Op.LINEAR, (x,), (View(7, 1, VOCABULARY),), 0),
            Step(Op.ARGMAX, (View(7, 1, VOCABULARY),), (best,)),
        )
        self.program = Program(buffers, steps, sizes)
        self.bound = bind(self.program, self.tensors, self.layers, registry=registry)

    def decode(self, count: int) -> list[torch.Tensor]:
        """Return the logits of some steps, from an empty cache."""
        self.keys.zero_()
        self.values.zero_()
        logits = []
        for position in range(count):
            self.token[0], self.position[0] = position * 5 % VOCABULARY, position
            self.bound()
            logits.append(self.tensors[-1].clone())
            assert int(self.best) == int(logits[-1].argmax())
        return logits


@pytest.mark.parametrize("op", [Op.SILU, Op.GELU, Op.GELU_TANH, Op.SIGMOID, Op.TANH])
def test_activations_of_large_numbers_pass_the_probe(registry: q4.Registry, op: Op) -> None:
    """Where torch's exponential ends in 0 or infinity, numbers below float32's normal ones are right as well."""
    buffers = [Buffer("x", 4096, torch.float32, True), Buffer("y", 4096)]
    x, y = View(0, 1, 4096), View(1, 1, 4096)
    steps = (Step(Op.AFFINE, (x,), (y,), numbers=(40.0, 0.0)), Step(op, (y,), (x,)))
    given = torch.linspace(-3, 3, 4096)
    bound = bind(Program(buffers, steps), [given], registry=registry)
    assert bound.record.backend == "cpu-native"
    bound()
    assert given.isfinite().all()


@pytest.mark.parametrize("precision", ["exact", "int8"])
@pytest.mark.usefixtures("_threads")
def test_a_block_runs_natively_with_the_same_bits_on_any_threads(registry: q4.Registry, precision: str) -> None:
    """The probe lets the native program serve; three threads, or one, change no bit."""
    torch.set_num_threads(3)
    block = Block(registry, precision)
    assert block.bound.record.backend == "cpu-native", block.bound.record.reasons
    many = block.decode(CAPACITY)
    torch.set_num_threads(1)
    assert all(torch.equal(one, other) for one, other in zip(block.decode(CAPACITY), many, strict=True))


def _one(
    op: Op, shapes: list[tuple[int, ...]], outputs: list[tuple[int, ...]], *numbers: float
) -> tuple[Program, list[torch.Tensor]]:
    """Return a program of one operation; a shape of three is int64."""
    views, buffers, tensors = [], [], []
    for index, (rows, columns, *is_index) in enumerate([*shapes, *outputs]):
        dtype = torch.int64 if is_index else torch.float32
        buffers.append(Buffer(f"{index}", rows * columns, dtype, True))
        tensors.append(torch.zeros(rows * columns, dtype=dtype))
        views.append(View(index, rows, columns))
    step = Step(op, views[: len(shapes)], views[len(shapes) :], numbers=numbers)
    return Program(buffers, (step,)), tensors


ALONE = [
    (Op.EMBEDDING, [(1, 3, 0), (9, 20)], [(3, 20)], ()),
    (Op.LINEAR, [(3, 40), (33, 40), (1, 33)], [(3, 33)], (1,)),
    (Op.RMS_NORM, [(3, 50), (1, 50)], [(3, 50)], (1e-5, 1)),
    (Op.LAYER_NORM, [(1, 50), (1, 50), (1, 50)], [(1, 50)], (1e-5,)),
    (Op.ROTARY, [(4, 20), (9, 16), (1, 1, 0)], [(4, 20)], (1,)),
    (Op.STORE, [(4, 20), (1, 1, 0)], [(36, 20)], ()),
    (Op.ATTENTION, [(4, 20), (18, 20), (18, 20), (1, 1, 0)], [(4, 20)], (2, 0.2, 5)),
    (Op.ADD, [(3, 50), (1, 50)], [(3, 50)], ()),
    (Op.MULTIPLY, [(3, 50), (3, 50)], [(3, 50)], ()),
    (Op.AFFINE, [(3, 50)], [(3, 50)], (0.3, -2)),
    *((op, [(3, 50)], [(3, 50)], ()) for op in (Op.RELU, Op.GELU, Op.GELU_TANH, Op.SILU, Op.SIGMOID, Op.TANH)),
    (Op.SOFTMAX, [(3, 50)], [(3, 50)], ()),
    (Op.COPY, [(3, 50)], [(3, 50)], ()),
    (Op.ARGMAX, [(3, 50)], [(1, 3, 0)], ()),
    (Op.TOP_K, [(3, 50)], [(3, 7), (3, 7, 0)], (7,)),
    (Op.ATTEND_SPANS, [(3, 80), (9, 40), (9, 40), (1, 6, 0)], [(3, 80)], (4, 2, 0.2)),
    (Op.MEAN_SPANS, [(9, 50), (1, 6, 0)], [(3, 50)], ()),
]


def test_every_operation_is_tried() -> None:
    """None is missing below; those of spiking networks are in tests of these."""
    assert {op for op, *_ in ALONE} == set(Op) - SPIKING


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case[0].value)
def test_each_operation_is_the_references(registry: q4.Registry, case: tuple[Op, list, list, tuple]) -> None:  # type: ignore[type-arg]
    """The probe compares each with the reference, and finds nothing."""
    op, inputs, outputs, numbers = case
    program, tensors = _one(op, inputs, outputs, *numbers)
    bound = bind(program, tensors, registry=registry)
    assert bound.record.backend == "cpu-native", bound.record.reasons
    if op in WITH_SPANS:
        tensors[len(inputs) - 1].copy_(torch.tensor([0, 1, 2, 9, 3, 6]))
    bound()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("columns", [5, 20, 64, 104])
@pytest.mark.usefixtures("_threads")
def test_attention_over_a_cache_of_each_dtype(registry: q4.Registry, columns: int, dtype: torch.dtype) -> None:
    """What is stored has the documented bits, and attention is float64's over them, on any threads the same."""
    tokens, heads, kv_heads, capacity = 3, 6, 2, 300
    sizes, random = (heads, kv_heads, kv_heads), torch.Generator().manual_seed(columns)
    query, *new = (torch.randn(tokens * size, columns, generator=random) for size in sizes)
    held = [torch.randn(kv_heads * capacity, columns, generator=random) for _ in range(2)]
    caches = [narrowed(rows, dtype) for rows in held]
    places, out = torch.tensor([270, 271, 272]), torch.zeros(tokens * heads, columns)
    tensors = [query, *new, *caches, places, out]
    buffers = [Buffer(f"{number}", tensor.numel(), tensor.dtype, True) for number, tensor in enumerate(tensors)]
    wide = row_columns(columns, dtype)
    x, keys, values = (View(number, tokens * size, columns) for number, size in enumerate(sizes))
    cached, place = [View(number, kv_heads * capacity, wide) for number in (3, 4)], View(5, 1, tokens)
    steps = [Step(Op.STORE, [of, place], [to]) for of, to in zip((keys, values), cached, strict=True)]
    steps += [Step(Op.ATTENTION, [x, *cached, place], [View(6, tokens * heads, columns)], numbers=(kv_heads, 0.2, 0))]
    bound = bind(Program(buffers, steps), tensors, registry=registry)
    assert bound.record.backend == "cpu-native", bound.record.reasons
    found = []
    for threads in (3, 1):
        torch.set_num_threads(threads)
        bound()
        found.append(out.clone())
    assert torch.equal(*found)
    seen = []
    for cache, rows, added in zip(caches, held, new, strict=True):
        rows.view(kv_heads, capacity, columns)[:, places] = added.view(tokens, kv_heads, columns).transpose(0, 1)
        assert torch.equal(cache, narrowed(rows, dtype))
        seen.append(widened(cache, torch.float64).view(kv_heads, capacity, columns))
    for token, position in enumerate(places.tolist()):
        parts = (
            query.double().view(tokens, kv_heads, heads // kv_heads, columns)[token],
            *(side[:, : position + 1] for side in seen),
        )
        expected = ((parts[0] @ parts[1].mT * 0.2).softmax(-1) @ parts[2]).flatten(0, 1)
        assert float((out.view(tokens, heads, columns)[token] - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_row_of_a_cache_that_is_not_finite(registry: q4.Registry, dtype: torch.dtype) -> None:
    """Who does not see it is not changed."""
    x, places = torch.tensor([[1.0, -2.0, torch.nan, 0.5]]), torch.tensor([3])
    cache, out = narrowed(torch.ones(5, 4), dtype), torch.zeros(1, 4)
    tensors = [x, places, cache, torch.ones(1, 4), torch.tensor([2]), out]
    buffers = [Buffer(f"{number}", tensor.numel(), tensor.dtype, True) for number, tensor in enumerate(tensors)]
    rows = View(2, 5, cache.shape[1])
    steps = [Step(Op.STORE, [View(0, 1, 4), View(1, 1, 1)], [rows])]
    steps += [Step(Op.ATTENTION, [View(3, 1, 4), rows, rows, View(4, 1, 1)], [View(5, 1, 4)], numbers=(1, 1, 0))]
    bound = bind(Program(buffers, steps), tensors, registry=registry)
    assert bound.record.backend == "cpu-native", bound.record.reasons
    bound()
    assert torch.equal(out, torch.ones(1, 4))
    tensors[4].fill_(3)
    bound()
    assert out.isnan().any()


@pytest.mark.parametrize("form", FORMATS)
def test_embedded_rows_have_the_codecs_bits(registry: q4.Registry, form: str) -> None:
    """A row of a packed layer is the row that the codec decodes, in every format."""
    layer = _layer(registry, VOCABULARY, 192, form)
    tokens = torch.tensor([0, VOCABULARY - 1, 17])
    out = torch.zeros(3 * 192)
    buffers = Buffer("tokens", 3, torch.int64, True), Buffer("rows", 3 * 192, torch.float32, True)
    step = Step(Op.EMBEDDING, (View(0, 1, 3),), (View(1, 3, 192),), 0)
    bound = bind(Program(buffers, (step,), [(VOCABULARY, 192)]), [tokens, out], [layer], registry=registry)
    assert bound.record.backend == "cpu-native", bound.record.reasons
    bound()
    source = random_weight(form, VOCABULARY, 192, VOCABULARY)
    assert torch.equal(out.view(3, 192), q4.dequantize(source, torch.float32, rows=tokens))


@pytest.mark.parametrize("form", ["q4_0", "q4_1", "q8_affine"])
def test_embedded_rows_of_super_blocks_have_the_codecs_bits(registry: q4.Registry, form: str) -> None:
    """A row whose scales have two levels is the row that the codec decodes."""
    weight = samples.random_weight(form, VOCABULARY, 512, q4.ScaleKind.SUPER_BLOCK)
    layer = q4.Q4Linear(weight, registry=registry, config=q4.SessionConfig(device="cpu"))
    tokens, out = torch.tensor([0, VOCABULARY - 1, 17]), torch.zeros(3 * 512)
    buffers = Buffer("tokens", 3, torch.int64, True), Buffer("rows", 3 * 512, torch.float32, True)
    step = Step(Op.EMBEDDING, (View(0, 1, 3),), (View(1, 3, 512),), 0)
    bound = bind(Program(buffers, (step,), [(VOCABULARY, 512)]), [tokens, out], [layer], registry=registry)
    assert bound.record.backend == "cpu-native", bound.record.reasons
    bound()
    assert torch.equal(out.view(3, 512), q4.dequantize(weight, torch.float32, rows=tokens))


@pytest.mark.parametrize("op", [Op.LINEAR, Op.EMBEDDING])
def test_products_take_permuted_in_features_and_embeddings_do_not(registry: q4.Registry, op: Op) -> None:
    """A product of a layer with act-order and factors has the bits of its call; an embedding of it runs elsewhere."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(5))
    weight = attrs.evolve(
        random_weight("int4", 40, 96), input_permutation=order, input_channel_scale=torch.rand(96) + 0.5
    )
    layer = q4.Q4Linear(weight, registry=registry, config=q4.SessionConfig(device="cpu"))
    x, out = torch.randn(3, 96), torch.zeros(3 * (40 if op is Op.LINEAR else 96))
    given = x.flatten() if op is Op.LINEAR else torch.tensor([3, 0, 39])
    buffers = Buffer("in", given.numel(), given.dtype, True), Buffer("out", out.numel(), torch.float32, True)
    views = (View(0, 3, 96), View(1, 3, 40)) if op is Op.LINEAR else (View(0, 1, 3), View(1, 3, 96))
    step = Step(op, views[:1], views[1:], 0)
    bound = bind(Program(buffers, (step,), [(40, 96)]), [given, out], [layer], registry=registry)
    bound()
    if op is Op.LINEAR:
        assert bound.record.backend == "cpu-native", bound.record.reasons
        assert torch.equal(out.view(3, 40), layer(x))
    else:
        assert "another order or scaled" in str(bound.record.reasons)
        assert torch.equal(out.view(3, 96), q4.dequantize(weight)[given])


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("form", ["nf4", "nvfp4", "q8_0"])
def test_packed_products_have_the_bits_of_calls(registry: q4.Registry, form: str, rows: int) -> None:
    """A product in a program is the layer's own, with its bias and global scale, also where int8 can't hold a row."""
    bias = torch.randn(40, generator=torch.Generator().manual_seed(3))
    layer = _layer(registry, 40, 128, form, bias, "int8")
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(4))
    x[0, 5] = 1e30
    out = torch.zeros(rows * 40)
    buffers = Buffer("x", rows * 128, torch.float32, True), Buffer("y", rows * 40, torch.float32, True)
    program = Program(buffers, (Step(Op.LINEAR, (View(0, rows, 128),), (View(1, rows, 40),), 0),), [(40, 128)])
    bound = bind(program, [x, out], [layer], registry=registry)
    assert bound.record.backend == "cpu-native", bound.record.reasons
    bound()
    with torch.inference_mode():
        assert torch.equal(out.view(rows, 40), layer(x))


def test_a_position_that_is_out_of_range_is_reported_first(registry: q4.Registry) -> None:
    """The error names the step, and neither cache nor output was written."""
    block = Block(registry)
    before = block.decode(2)[-1]
    for position in (CAPACITY, -1, 2**62):
        block.position[0] = position
        with pytest.raises(q4.InputError, match="step 5, rotary"):
            block.bound()
        assert torch.equal(block.tensors[-1], before)
    block.token[0], block.position[0] = VOCABULARY, 0
    with pytest.raises(q4.InputError, match="step 0, embedding"):
        block.bound()
    assert torch.equal(block.tensors[-1], before)


def test_a_position_that_a_step_gives_is_left_to_others(registry: q4.Registry) -> None:
    """It can't be looked at before the run, so the native engine does not bind such a program."""
    buffers = [
        Buffer("x", 8, torch.float32, True),
        Buffer("best", 1, torch.int64, True),
        Buffer("y", 8, torch.float32, True),
    ]
    steps = [
        Step(Op.ARGMAX, (View(0, 1, 8),), (View(1, 1, 1),)),
        Step(Op.EMBEDDING, (View(1, 1, 1), View(0, 8, 1)), (View(2, 1, 1),)),
    ]
    tensors = [torch.arange(8.0), torch.zeros(1, dtype=torch.int64), torch.zeros(8)]
    bound = bind(Program(buffers, steps), tensors, registry=registry)
    assert bound.record.backend == "reference"
    assert "an earlier step writes a token, position or clock" in str(bound.record.reasons)


def test_a_layer_without_a_path_for_its_rows_is_refused(registry: q4.Registry) -> None:
    """Segments that end before the program's rows are reported by the step."""
    backend: Any = registry.backends()["cpu-native"]
    layer = _layer(registry, 40, 128)
    live = layer._require_ready()  # what the core binds
    segments = tuple(attrs.evolve(item, high=2) for item in live.plan.segments if item.low == 1)
    buffers = Buffer("x", 3 * 128, torch.float32, True), Buffer("y", 3 * 40, torch.float32, True)
    program = Program(buffers, (Step(Op.LINEAR, (View(0, 3, 128),), (View(1, 3, 40),), 0, label="up"),), [(40, 128)])
    with pytest.raises(q4.PrepareError, match="linear up: the layer has no path for 3 rows"):
        backend.bind_program(
            program, [torch.zeros(3 * 128), torch.zeros(3 * 40)], [BoundLayer(live.prepared, None, segments)]
        )


@pytest.mark.parametrize("rows", [1, 5])
def test_outliers_are_those_of_calls(registry: q4.Registry, rows: int) -> None:
    """A product of a program gives rows with outliers the bits of a call, and its layer's record counts them."""
    layer = _layer(registry, 40, WIDTH)
    x, y = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)), torch.zeros(rows, 40)
    views = View(0, rows, WIDTH), View(1, rows, 40)
    step = Step(Op.LINEAR, (views[0],), (views[1],), layer=0)
    buffers = [Buffer("x", x.numel(), x.dtype, True), Buffer("y", y.numel(), y.dtype, True)]
    bound = bind(Program(buffers, (step,), [(40, WIDTH)]), [x, y], [layer], registry=registry)
    assert bound.record.backend == "cpu-native"
    bound()
    assert layer.diagnostics().outlier_rows == 0
    x[rows - 1, 7] = 1e5
    bound()
    bound()
    assert layer.diagnostics().outlier_rows == 2
    assert torch.equal(y, layer(x))
