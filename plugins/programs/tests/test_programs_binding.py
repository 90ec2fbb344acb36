"""Binding: who runs a program, what is proven first, and what a run refuses."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4_dequant_fallback import DequantFallback
from q4_programs import REFERENCE, Buffer, Op, Program, SparseWeight, Step, View, bind, refuse
from tests.support.fakes import KERNEL_PATH, FakeBackend

if TYPE_CHECKING:
    from collections.abc import Callable

K, HIDDEN, N = 64, 96, 32


class Runs(FakeBackend):
    """A backend of programs, by way of the reference; ``harm`` is given the buffers behind each run."""

    def __init__(self, harm: Callable[[Program, list[torch.Tensor]], None] | None = None, **facts: Any) -> None:
        super().__init__(**{"ops": {"linear", "program"}} | facts)
        self.harm, self.bound = harm, 0

    def bind_program(self, program: Program, buffers: list[torch.Tensor], layers: Any) -> Callable[[], None]:
        """Bind by the reference."""
        self.bound += 1
        run = REFERENCE.bind_program(program, buffers, layers)

        def call() -> None:
            run()
            if self.harm is not None:
                self.harm(program, buffers)

        return call


def registry_of(*backends: Any) -> q4.Registry:
    """Return a registry of these backends and the reference."""
    given = [*backends, DequantFallback()]
    return q4.Registry([("given", types.SimpleNamespace(q4_backends=q4.hookimpl(lambda: given)))])


def packed(registry: q4.Registry, rows: int, columns: int, bias: torch.Tensor | None = None) -> q4.Q4Linear:
    """Return a packed layer."""
    weight = q4.quantize(torch.randn(rows, columns), "nf4")
    return q4.Q4Linear(weight, bias, registry=registry, config=q4.SessionConfig(device="cpu"), name="proj")


def network(registry: q4.Registry) -> tuple[Program, list[torch.Tensor], list[q4.Q4Linear]]:
    """Return linear, SiLU, linear over two rows: the program, x and y, and its layers."""
    layers = [packed(registry, HIDDEN, K, torch.randn(HIDDEN)), packed(registry, N, HIDDEN)]
    buffers = Buffer("x", 2 * K, is_bound=True), Buffer("h", 2 * HIDDEN), Buffer("a", 2 * HIDDEN)
    x, hidden, active, y = View(0, 2, K), View(1, 2, HIDDEN), View(2, 2, HIDDEN), View(3, 2, N)
    steps = (
        Step(Op.LINEAR, (x,), (hidden,), 0, (0,), "up"),
        Step(Op.SILU, (hidden,), (active,)),
        Step(Op.LINEAR, (active,), (y,), 1, (0,), "down"),
    )
    program = Program((*buffers, Buffer("y", 2 * N, is_bound=True)), steps, ((HIDDEN, K), (N, HIDDEN)))
    return program, [torch.randn(2, K), torch.zeros(2, N)], layers


def expected(x: torch.Tensor, layers: list[q4.Q4Linear]) -> torch.Tensor:
    """Return what the modules give."""
    with torch.no_grad():
        y: torch.Tensor = layers[1](torch.nn.functional.silu(layers[0](x)))
    return y


def test_the_reference_runs_what_nobody_else_does() -> None:
    """Without a backend of programs the reference runs one, with the numbers of the modules, and says why."""
    registry = registry_of(FakeBackend())
    program, buffers, layers = network(registry)
    bound = bind(program, buffers, layers, name="mlp", registry=registry)
    bound()
    assert torch.equal(buffers[1], expected(buffers[0], layers))
    assert bound.record.backend == "reference"
    assert bound.record.reasons == ("not fake: op 'program' is not declared for cpu",)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in bound.buffers)


def test_a_backend_that_prepared_all_layers_runs_them() -> None:
    """A backend that declares programs is proven once for a kind, runs it, and counts for its layers."""
    backend = Runs()
    registry = registry_of(backend)
    program, buffers, layers = network(registry)
    bound = bind(program, buffers, layers, registry=registry)
    assert bound.record.backend == "fake"
    assert backend.bound == 2 + len(program.steps)  # itself, and the whole and each step of a trial
    bind(program, buffers, layers, registry=registry)
    assert backend.bound == 3 + len(program.steps)
    before = [sum(layer.diagnostics().calls) for layer in layers]
    bound()
    bound()
    assert torch.equal(buffers[1], expected(buffers[0], layers))
    assert bound.record.calls == 2
    after = [sum(layer.diagnostics().calls) for layer in layers]
    # The fake runs them through themselves, which counts, too; the last line of the test through ``expected``.
    assert [new - old for new, old in zip(after, before, strict=True)] == [5, 5]


@pytest.mark.parametrize(("count", "expected"), [(1, (1, 0)), (3, (1, 0)), (4, (0, 1)), (8, (0, 1))])
def test_a_run_is_counted_under_the_path_of_its_tokens(count: int, expected: tuple[int, int]) -> None:
    """A run of few tokens counts for the path that serves so few rows, whatever the most that the program takes."""
    paths = [attrs.evolve(KERNEL_PATH, name=name, m=m) for name, m in (("few", (1, 3)), ("many", (4, None)))]
    registry = registry_of(Runs(paths=tuple(paths), ops={"linear", "program", "tokens"}))
    layer, tokens, x = packed(registry, N, K), torch.tensor([count]), torch.randn(8, K)
    buffers = Buffer("tokens", 1, torch.int64, is_bound=True), Buffer("x", 8 * K, is_bound=True)
    step = Step(Op.LINEAR, (View(1, 8, K),), (View(2, 8, N),), 0, (0,))
    program = Program((*buffers, Buffer("y", 8 * N, is_bound=True)), (step,), ((N, K),), tokens=(0, 8))
    bound = bind(program, [tokens, x, torch.zeros(8, N)], [layer], registry=registry)
    bound()
    assert bound.record.backend == "fake"
    few, many = layer.diagnostics().calls
    assert (few - count, many) == expected  # the fake calls the layer token by token, which counts, too


def test_layers_of_several_backends_run_by_the_reference() -> None:
    """A backend does not run another one's layers."""
    registry, other = registry_of(Runs()), registry_of()
    program, buffers, layers = network(registry)
    layers[1] = packed(other, N, HIDDEN)
    bound = bind(program, buffers, layers, registry=registry)
    bound()
    assert bound.record.backend == "reference"
    assert bound.record.reasons == ("not fake: layers were prepared by dequant-fallback",)
    assert torch.equal(buffers[1], expected(buffers[0], layers))


def slightly_off(program: Program, buffers: list[torch.Tensor]) -> None:
    """Harm one activation by 1/1000."""
    if program.steps[-1].op is Op.SILU:
        buffers[program.steps[-1].outputs[0].buffer][3] *= 1.001


def wrong_together(program: Program, buffers: list[torch.Tensor]) -> None:
    """Harm the result of a program of several steps by one bit."""
    if len(program.steps) > 1:
        y = buffers[3]
        y[5] = torch.nextafter(y[5], y[5] + 1)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (slightly_off, "step 1, silu: 1 of 192 elements are wrong"),
        (wrong_together, "step 2, linear: other bits in the whole program than by itself"),
    ],
)
def test_wrong_programs_are_refused_loudly(harm: Any, message: str) -> None:
    """A backend whose steps are wrong, or wrong together, is warned of and not used; the numbers stay right."""
    registry = registry_of(Runs(harm))
    program, buffers, layers = network(registry)
    with pytest.warns(q4.Q4ProbeWarning, match=message):
        bound = bind(program, buffers, layers, registry=registry)
    bound()
    assert bound.record.backend == "reference"
    assert message in bound.record.reasons[0]
    assert torch.equal(buffers[1], expected(buffers[0], layers))


def test_the_trial_leaves_the_caller_s_buffers_alone() -> None:
    """Neither input nor output has another number after the proof."""
    registry = registry_of(Runs())
    program, buffers, layers = network(registry)
    before = [buffer.clone() for buffer in buffers]
    bind(program, buffers, layers, registry=registry)
    assert all(map(torch.equal, buffers, before))


def test_a_refusal_to_bind_and_an_error_are_reasons() -> None:
    """What ``bind_program`` raises goes to the record, and the reference runs."""
    for error, text in (
        (q4.PrepareError([q4.Reason(q4.ReasonCode.SHAPE, "too wide")]), "not fake: shape: too wide"),
        (OSError("broken"), "not fake: bind_program raised OSError: broken"),
    ):
        backend = Runs()
        registry = registry_of(backend)
        program, buffers, layers = network(registry)

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        backend.bind_program = fail  # type: ignore[method-assign, assignment]  # on purpose
        assert bind(program, buffers, layers, registry=registry).record.reasons[0].startswith(text)


def test_the_reference_needs_no_plugin() -> None:
    """A backend alone is compared with the reference of this package, which no registry holds."""
    backend = Runs()
    registry = q4.Registry([("given", types.SimpleNamespace(q4_backends=q4.hookimpl(lambda: [backend])))])
    program, buffers, layers = network(registry)
    assert bind(program, buffers, layers, registry=registry).record.backend == "fake"


def test_nobody_to_run_it() -> None:
    """Where not even the reference computes, the error has every reason."""
    step = Step(Op.SILU, (View(0, 1, 8),), (View(1, 1, 8),))
    program = Program([Buffer(name, 8, is_bound=True) for name in "xy"], (step,))
    with pytest.raises(q4.BackendUnavailableError) as caught:
        bind(program, [torch.zeros(8, device="meta")] * 2, registry=registry_of(Runs()))
    assert "not fake: op 'program' is not declared for meta" in str(caught.value)
    assert "not reference: device: the reference does not run on meta" in str(caught.value)


def test_a_backend_that_declares_programs_must_have_them() -> None:
    """The op without its method is a reason in the record, and the reference runs."""
    registry = registry_of(FakeBackend(ops={"linear", "program"}))
    program, buffers, layers = network(registry)
    bound = bind(program, buffers, layers, registry=registry)
    bound()
    assert bound.record.backend == "reference"
    assert bound.record.reasons == ("not fake: op 'program' is declared without the methods bind_program",)


def test_a_broken_run_is_a_backend_error() -> None:
    """An error of a run is reported as the backend's."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        if len(calls) > 3:
            raise ValueError("odd")
        calls.append(1)

    registry = registry_of(Runs(fail))
    program, buffers, layers = network(registry)
    bound = bind(program, buffers, layers, registry=registry)
    with pytest.raises(q4.BackendError, match="program of backend 'fake' raised ValueError: odd"):
        bound()


def resize(buffers: list[torch.Tensor]) -> None:
    """Make x smaller in place."""
    buffers[0].resize_(1, K)


def swap(buffers: list[torch.Tensor]) -> None:
    """Let y be another tensor's memory."""
    buffers[1].data = torch.zeros(2, N)


def free(buffers: list[torch.Tensor]) -> None:
    """Give the memory of x back."""
    buffers[0].untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [resize, swap, free])
def test_changed_buffers(change: Any) -> None:
    """A buffer that was resized, moved or freed is an error that names it, and nothing runs."""
    registry = registry_of(Runs())
    program, buffers, layers = network(registry)
    bound = bind(program, buffers, layers, registry=registry)
    name = "y" if change is swap else "x"
    change(buffers)
    with pytest.raises(q4.LifecycleError, match=f"buffer '{name}' of program 'program' was resized, moved or freed"):
        bound()
    assert bound.record.calls == 0


def test_changed_layers() -> None:
    """A layer that was closed, loaded again, given another bias or robbed of its memory is an error that names it."""
    registry = registry_of(Runs())
    for change, message in (
        (lambda layer: layer.close(), "layer 'proj' is closed"),
        (lambda layer: layer.load_state_dict(layer.state_dict()), "'proj' was moved or loaded"),
        (lambda layer: setattr(layer, "bias", torch.nn.Parameter(torch.zeros(HIDDEN))), "'proj' was moved or loaded"),
        (lambda layer: setattr(layer.bias, "data", torch.zeros(HIDDEN)), "the weight of a layer of program"),
        (lambda layer: layer.packed_0.untyped_storage().resize_(0), "the weight of a layer of program"),
    ):
        program, buffers, layers = network(registry)
        bound = bind(program, buffers, layers, registry=registry)
        change(layers[0])
        with pytest.raises(q4.LifecycleError, match=message):
            bound()


def test_what_does_not_fit() -> None:
    """Buffers and layers of another number, size, dtype or layout are refused by name."""
    registry = registry_of()
    program, buffers, layers = network(registry)
    half = q4.SessionConfig(device="cpu", compute_dtype=torch.bfloat16)
    narrow = q4.Q4Linear(layers[0].packed_weight(), config=half, registry=registry, name="narrow")
    few = q4.Q4Linear(layers[0].packed_weight(), registry=registry, name="few", m=(1, 1))
    wrong: list[tuple[Any, Any, str]] = [
        (buffers[:1], layers, "buffers must be 2 tensors"),
        ([torch.zeros(K), buffers[1]], layers, "buffer 'x' must be"),
        ([buffers[0].double(), buffers[1]], layers, "buffer 'x' must be"),
        ([torch.zeros(K, 2).T, buffers[1]], layers, "buffer 'x' must be"),
        (buffers, layers[:1], "layers must be 2 layers"),
        (buffers, layers[::-1], "layer 'proj' must be float32 96×64"),
        (buffers, [narrow, layers[1]], "layer 'narrow' must be float32"),
        (buffers, [few, layers[1]], "layer 'few' must be prepared for the rows of the program"),
    ]
    for given, own, message in wrong:
        with pytest.raises(q4.InputError, match=message):
            bind(program, given, own, registry=registry)


def test_numbers_out_of_range() -> None:
    """A token or position out of range is refused before anything is written."""
    table, out = torch.randn(5, 8), torch.zeros(3, 8)
    tokens = torch.tensor([0, 4, 1])
    buffers = Buffer("tokens", 3, torch.int64, is_bound=True), Buffer("table", 40, is_bound=True)
    step = Step(Op.EMBEDDING, (View(0, 1, 3), View(1, 5, 8)), (View(2, 3, 8),), label="tokens")
    bound = bind(Program((*buffers, Buffer("out", 24, is_bound=True)), (step,)), [tokens, table, out])
    bound()
    assert torch.equal(out, table[tokens])
    for token in (5, -1):
        tokens[1] = token
        out.zero_()
        with pytest.raises(q4.InputError, match="step 0, embedding tokens: token, position or clock must be"):
            bound()
        assert not out.any()


def test_reports() -> None:
    """Reports of a session and of a module have the programs over their layers, and why there is none."""
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        layers = [session.linear(q4.quantize(torch.randn(*shape), "nf4")) for shape in ((HIDDEN, K), (N, HIDDEN))]
        program, buffers, _ = network(registry_of())
        bound = bind(program, buffers, layers, name="mlp")
        bound()
        record = session.report().section("programs")[0]
        assert (record.name, record.steps, record.calls) == ("mlp", 3, 1)
        assert q4.explain(layers[0]).to_dict()["programs"][0]["name"] == "mlp"
        assert f"program mlp: 3 steps on {record.backend}, ran 1 ×" in str(session.report())
        again = bind(program, buffers, layers, name="mlp")
        again()
        assert [item.calls for item in session.report().section("programs")] == [2]
        refuse("rnn", layers, "a hook")
        assert "program rnn: the modules run one by one\n  a hook" in str(session.report())


def test_a_probe_of_many_synapses_takes_the_first_ones() -> None:
    """However many there are, a trial sends no more than 2¹⁸ of them; what runs then has all."""
    random, count = torch.Generator().manual_seed(0), (1 << 18) + 50_000
    source = torch.randint(2000, (count,), generator=random).sort().values
    target, one = torch.randint(2000, (count,), generator=random), torch.ones(count)
    weight = SparseWeight.of(source, target, one, one.to(torch.int64), sources=2000, targets=2000)
    seen: list[int] = []

    class Counts(Runs):
        def bind_program(self, program: Program, buffers: list[torch.Tensor], layers: Any) -> Any:
            seen.extend(len(layer.prepared.steps) for layer in layers)
            return REFERENCE.bind_program(program, buffers, layers)

    backend = Counts()
    backend.capabilities = attrs.evolve(backend.capabilities, ops=frozenset({"linear", "program", "sparse"}))
    bits = Buffer("bits", 2 * 32, torch.int64, is_bound=True)
    buffers = Buffer("clock", 1, torch.int64, is_bound=True), bits, Buffer("ring", 2 * 2000, is_bound=True)
    ring = View(2, 2, 2000)
    step = Step(Op.SEND, (View(1, 2, 32), View(0, 1, 1), ring), (ring,), 0, (0, 1))
    tensors = [torch.zeros(item.size, dtype=item.dtype) for item in buffers]
    bound = bind(Program(buffers, (step,), ((2000, 2000),), 0), tensors, [weight], registry=registry_of(backend))
    assert bound.record.backend == backend.name
    assert len(weight.steps) in seen
    assert {entries for entries in seen if entries != len(weight.steps)} == {1 << 18}
    tensors[1][:32] = -1  # all fire
    bound()
    assert float(tensors[2].sum()) == count


@pytest.mark.parametrize("is_harmed", [False, True])
def test_blocks_that_repeat_are_proven_twice(*, is_harmed: bool) -> None:
    """Of equal steps two are tried, whatever their number, by themselves and in one program; all of them run."""

    def spoil(program: Program, buffers: list[torch.Tensor]) -> None:
        if len(program.steps) > 1:
            buffers[2][0] += 1  # where the second step writes

    backend = Runs(spoil if is_harmed else None)
    registry = registry_of(backend)
    count, size = 40, 64
    buffers = [Buffer(str(index), size, is_bound=index in {0, count}) for index in range(count + 1)]
    views = [View(index, 1, size) for index in range(count + 1)]
    steps = [Step(Op.SILU, (views[index],), (views[index + 1],)) for index in range(count)]
    x, y = torch.randn(size), torch.zeros(size)
    bound = bind(Program(buffers, steps), [x, y], registry=registry)
    assert bound.record.backend == ("reference" if is_harmed else "fake")
    assert backend.bound == 1 + 1 + 2  # to run, in one program, and by itself
    if not is_harmed:
        bound()
        for _ in range(count):
            x = torch.nn.functional.silu(x)
        assert torch.allclose(y, x)
