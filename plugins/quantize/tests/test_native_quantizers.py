"""Native quantisers: a kind of path of their own, proven once, reached through the public functions."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4_quantize import find_quantizer, probe_quantizer, quantize_reference, quantize_request
from q4core.selection.probe_results import probe_results
from tests.support.events import heard
from tests.support.fakes import FakeBackend, registry
from tests.support.pretended import DEVICE, pretended_cuda
from tests.support.samples import QUANTISED

if TYPE_CHECKING:
    from collections.abc import Iterator

BOTH = frozenset(q4.Rounding)
PATH = q4.KernelPath.quantizer("quantize")
LEVELS = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook, dtype=torch.float64)


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """The events of one test."""
    with heard("q4.quantize", "q4.probe") as events:
        yield events


def _dense(rows: int = 24, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))


def _by_chance(dense: torch.Tensor, seed: int, manner: str = "right") -> q4.PackedWeight:
    """Return an nf4 weight with codes next to the values, drawn as configured; the scales are the reference's."""
    weight = quantize_reference(dense, "nf4")
    shares = dense.to(torch.float64) / weight.scale.to(torch.float64).repeat_interleave(64, 1)
    shares = shares.nan_to_num(nan=0.0)
    high = torch.searchsorted(LEVELS, shares).clamp(1, 15)
    chance = (shares - LEVELS[high - 1]) / (LEVELS[high] - LEVELS[high - 1])
    generator = torch.Generator().manual_seed(0 if manner == "seedless" else seed)
    draw = torch.rand(chance.shape, generator=generator, dtype=torch.float64)
    limits = {"nearest": torch.full_like(draw, 0.5), "floor": torch.ones_like(draw)}
    codes = (high - 1 + (chance > limits.get(manner, draw)).to(torch.int64)).to(torch.uint8)
    codes = torch.where(chance >= 1, high.to(torch.uint8), codes)
    if manner == "far":
        codes[2, 7] = codes[2, 7] ^ 8
    return attrs.evolve(weight, qdata=q4.pack_codes(codes, weight.packing))


class Quantiser(FakeBackend):
    """A backend with a native quantiser, right or wrong as configured."""

    def __init__(self, name: str = "native", *, manner: str = "right", tier: int = 20, **facts: Any) -> None:
        given = {"ops": {"quantize"}, "roundings": BOTH, "dtypes": {torch.float32}} | facts
        super().__init__(name, paths=(attrs.evolve(PATH, tier=tier),), **given)
        self.manner = manner
        self.asked: list[tuple[tuple[int, ...], q4.Rounding, int]] = []

    def quantize(
        self, dense: torch.Tensor, request: q4.Request, *, rounding: q4.Rounding = q4.Rounding.NEAREST, seed: int = 0
    ) -> q4.PackedWeight:
        """Quantise, and remember what was asked."""
        self.asked.append((tuple(dense.shape), rounding, seed))
        if self.manner == "raises":
            raise RuntimeError("boom")
        if self.manner == "writes":
            dense.mul_(0.5)
        if rounding is q4.Rounding.STOCHASTIC:
            return _by_chance(dense, seed, self.manner)
        off = 1.01 if self.manner == "wrong" else 1.0
        packed = quantize_reference(
            dense.cpu() * off, request.format, block_size=request.block_size, scale_kind=request.scale_kind,
            packing=request.packing,
        )  # fmt: skip
        return packed.to(dense.device)


def _quantize(plugins: q4.Registry, dense: torch.Tensor | None = None, format_: str = "nf4", **wishes: Any) -> Any:
    given: dict[str, Any] = {"rounding": q4.Rounding.STOCHASTIC, "seed": 3, **wishes}
    return q4.quantize(_dense() if dense is None else dense, format_, registry=plugins, **given)


def test_a_quantisers_path_has_neither_rows_nor_precision_to_give() -> None:
    """It is of its own kind, covers every M and is allowed under every requested precision."""
    assert (PATH.kind, PATH.m) == (q4.PathKind.QUANTIZE, (1, None))
    request = attrs.evolve(
        q4.Request.for_weight(quantize_reference(_dense(), "nf4"), precision=q4.ActivationPrecision.FP4), op="quantize"
    )
    assert all(request.allows(precision) for precision in q4.Precision)


def test_a_quantiser_serves_no_linear_layer() -> None:
    """A path that quantises, offered for a product, is a fault of the plugin."""
    backend = FakeBackend(paths=(PATH,))
    with pytest.raises(q4.BackendUnavailableError) as caught:
        q4.Session(q4.SessionConfig(backend="fake"), registry=registry(backend)).linear(
            quantize_reference(_dense(), "nf4")
        )
    reasons = [reason for item in caught.value.rejections for reason in item.reasons]
    assert [reason.code for reason in reasons] == [q4.ReasonCode.PLUGIN_ERROR]


def test_rounding_by_chance_comes_from_a_proven_quantiser(told: list[dict[str, Any]]) -> None:
    """Codes are drawn by the seed; the event says who rounded, and the proof is done once."""
    backend = Quantiser()
    plugins = registry(backend)
    first, again, other = (_quantize(plugins, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.qdata, again.qdata)
    assert not torch.equal(first.qdata, other.qdata)
    assert [item for item in backend.asked if item[0] == (24, 128)] == [
        ((24, 128), q4.Rounding.STOCHASTIC, seed) for seed in (3, 3, 4)
    ]
    probes = [fields for fields in told if fields["event"] == "q4.probe"]
    assert [(fields["backend"], fields["passed"]) for fields in probes] == [("native", True)]
    decided = [fields for fields in told if fields["event"] == "q4.quantize"]
    assert [(fields["backend"], fields["rounding"]) for fields in decided] == [("native", "stochastic")] * 3


@pytest.mark.parametrize(
    ("manner", "fault"),
    [("nearest", "seed"), ("floor", "seed"), ("seedless", "seed"), ("far", "neighbour"), ("raises", "boom")],
)
def test_a_quantiser_that_rounds_otherwise_by_chance_is_refused(manner: str, fault: str) -> None:
    """No chance, a seed without effect and codes that are no neighbours are found before the first use."""
    backend = Quantiser(manner=manner)
    plugins = registry(backend)
    with pytest.warns(q4.Q4ProbeWarning, match=fault), pytest.raises(q4.BackendUnavailableError, match="native"):
        _quantize(plugins)
    assert (24, 128) not in {shape for shape, _, _ in backend.asked}
    asked = len(backend.asked)
    with pytest.raises(q4.BackendUnavailableError):
        _quantize(plugins)
    assert len(backend.asked) == asked


@pytest.mark.parametrize(
    ("manner", "rounding", "words"),
    [
        (
            "far",
            "stochastic",
            r"stands for \S+, no neighbour of its value \S+, .+: the neighbours are \S+ and \S+, and 1 of",
        ),
        (
            "wrong",
            "nearest",
            r"\d+ of \d+ bytes of its scale differ from the reference's, first byte \d+: 0x.. instead of 0x",
        ),
    ],
)
def test_a_wrong_quantiser_is_reported_by_its_first_wrong_code(manner: str, rounding: str, words: str) -> None:
    """The probe says which code or byte is wrong, what it should be, and how many are."""
    backend = Quantiser(manner=manner)
    request = quantize_request(_dense(), "nf4", rounding=q4.Rounding(rounding))
    fault = probe_quantizer(backend, request)
    assert fault is not None
    assert re.search(words, fault), fault


def test_a_quantiser_that_rounds_randomly_is_reported_as_such() -> None:
    """Where no quantiser rounds stochastically, the error names the rounding, and no backend that would not help."""
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _quantize(registry())
    error = caught.value
    assert (error.name, error.value) == ("rounding", "stochastic")
    assert "fallback" not in str(error.hint)
    assert "nearest" in str(error.hint)
    assert error.rejections


def test_the_proof_is_cached_by_rounding() -> None:
    """One that rounds wrongly at random may still be right to nearest; both are cached for the process."""
    backend = Quantiser(manner="floor", tier=30)
    plugins = registry(backend, Quantiser("second", tier=20))
    with pytest.warns(q4.Q4ProbeWarning, match="native"):
        _quantize(plugins)
    results = probe_results(plugins)
    generation = results.generation
    found = find_quantizer(plugins, quantize_request(_dense(), "nf4"))
    assert plugins.backends()[found.backend] is backend
    assert results.generation == generation + 1
    by_chance = quantize_request(_dense(), "nf4", rounding=q4.Rounding.STOCHASTIC)
    found = find_quantizer(plugins, by_chance)
    assert found.backend == "second"
    assert results.generation == generation + 1


@pytest.mark.parametrize("facts", [{"roundings": {q4.Rounding.NEAREST}}, {"ops": {"linear"}}, {"formats": {"nvfp4"}}])
def test_rounding_by_chance_that_nobody_declares_is_refused(facts: dict[str, Any]) -> None:
    """The core has no rounding by chance of its own: the error says what each backend lacks."""
    with pytest.raises(q4.BackendUnavailableError, match="quantize") as caught:
        _quantize(registry(Quantiser(**facts)))
    own = [reason for item in caught.value.rejections if item.backend == "native" for reason in item.reasons]
    assert {reason.code for reason in own} <= {q4.ReasonCode.FEATURE, q4.ReasonCode.FORMAT}
    assert own


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_core_says_whether_values_are_finite(bad: float) -> None:
    """A quantiser never sees NaN or infinity; the error is the reference's own."""
    dense = _dense()
    dense[3, 9] = bad
    backend = Quantiser()
    with pytest.raises(q4.InputError) as ours:
        _quantize(registry(backend), dense)
    with pytest.raises(q4.InputError) as reference:
        quantize_reference(dense, "nf4")
    assert str(ours.value) == str(reference.value)
    assert (24, 128) not in {shape for shape, _, _ in backend.asked}


@pytest.mark.parametrize(
    ("wishes", "error"),
    [
        ({"seed": -1}, q4.InputError),
        ({"seed": 2**31}, q4.InputError),
        ({"seed": 1.0}, q4.InputError),
        ({"seed": True}, q4.InputError),
        ({"rounding": "up"}, q4.ConfigError),
        ({"format_": "nvfp4", "dense": torch.randn(4, 40)}, q4.FormatError),
        ({"format_": "nothing"}, q4.FormatError),
        ({"dense": [1.0]}, q4.InputError),
        ({"dense": torch.randn(4)}, q4.InputError),
        ({"dense": torch.empty(4, 64, device="meta")}, q4.InputError),
    ],
)
def test_what_does_not_fit_is_a_typed_error(wishes: dict[str, Any], error: type[Exception]) -> None:
    """Seeds, roundings, formats and tensors that do not fit are refused before anybody is asked."""
    with pytest.raises(error):
        _quantize(registry(Quantiser()), **wishes)


def test_on_the_cpu_the_reference_rounds_to_nearest() -> None:
    """No backend is asked where the reference is at home, and its choices stay those of the codec."""
    backend = Quantiser()
    got = _quantize(registry(backend), rounding="nearest", block_size=32, packing=q4.Packing.LOW_FIRST, name="own")
    wanted = quantize_reference(_dense(), "nf4", block_size=32, packing=q4.Packing.LOW_FIRST)
    assert torch.equal(got.qdata, wanted.qdata)
    assert got.name == "own"
    assert backend.asked == []


@pytest.mark.parametrize("manner", ["right", "wrong"])
def test_to_nearest_the_bytes_are_those_of_the_reference(manner: str) -> None:
    """A quantiser whose bytes differ from the reference's is not found, loudly."""
    request = quantize_request(_dense(), "nvfp4")
    plugins = registry(Quantiser(manner=manner))
    if manner == "right":
        found = find_quantizer(plugins, request)
        assert (found.path, found.proven) == (PATH, True)
        return
    with pytest.warns(q4.Q4ProbeWarning, match="differ"), pytest.raises(q4.BackendUnavailableError):
        find_quantizer(plugins, request)


@pytest.mark.parametrize("rounding", q4.Rounding)
def test_a_quantiser_that_writes_to_its_source_is_refused(rounding: q4.Rounding) -> None:
    """What it is held to is the sample as it was given."""
    request = quantize_request(_dense(), "nf4", rounding=rounding)
    fault = probe_quantizer(Quantiser(manner="writes"), request)
    assert fault is not None
    assert "wrote to dense" in fault


def test_a_quantiser_of_an_older_contract_still_rounds_to_nearest() -> None:
    """One without rounding and seed among its arguments, and with a path of kind KERNEL, is asked as it was."""

    class Older(FakeBackend):
        def quantize(self, dense: torch.Tensor, request: q4.Request) -> q4.PackedWeight:
            return quantize_reference(dense, request.format)

    request = quantize_request(_dense(), "nvfp4")
    assert find_quantizer(registry(Older(ops={"quantize"})), request).backend == "fake"


@pytest.mark.parametrize("columns", [128, 100])
def test_a_request_is_that_of_the_references_result(columns: int) -> None:
    """What is asked of a quantiser has the levels, packing and features that the reference's weight has."""
    dense = _dense(columns=columns)
    wanted = q4.Request.for_weight(quantize_reference(dense, "nf4", block_size=32))
    assert quantize_request(dense, "nf4", block_size=32) == attrs.evolve(wanted, op="quantize")


def test_the_reference_of_the_comparison_is_computed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose arithmetic rounds otherwise must not set the bytes that a native quantiser is held to."""
    devices = []
    reference = quantize_reference

    def watched(dense: torch.Tensor, format_: q4.Format, **choices: Any) -> q4.PackedWeight:
        devices.append(dense.device.type)
        return reference(dense, format_, **choices)

    request = attrs.evolve(quantize_request(_dense(), "nvfp4"), device=torch.device("meta"))
    monkeypatch.setattr("q4_quantize.encode.quantize_reference", watched)
    # The quantiser can't quantise what holds no data.
    assert probe_quantizer(Quantiser(), request) is not None
    assert devices[0] == "cpu"


@pytest.mark.parametrize("format_", sorted(QUANTISED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("choices", [{}, {"symmetric": True}])
def test_every_format_has_a_sample(format_: str, dtype: torch.dtype, choices: dict[str, Any]) -> None:
    """The reference passes its own comparison in every format and dtype, with its choices and awkward sizes."""
    if choices and format_ != "int4":
        choices = {"packing": q4.BUILTIN_FORMATS[format_].packing}
    columns = 200 if format_ in {"nf4", "int4"} else 256 + 64

    class Reference(Quantiser):
        def quantize(self, dense: torch.Tensor, request: q4.Request, **_: Any) -> q4.PackedWeight:
            """Quantise by the codec."""
            return quantize_reference(dense, request.format, **choices)

    request = quantize_request(_dense(columns=columns).to(dtype), format_, **choices)
    assert probe_quantizer(Reference(), request) is None


@pytest.mark.parametrize("manner", ["right", "wrong"])
def test_on_a_device_the_proven_quantiser_writes(
    manner: str, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to nearest on CUDA, the native quantiser serves once its bytes were compared; else the reference does."""
    reference = quantize_reference

    def on_cpu(dense: torch.Tensor, format_: Any, **choices: Any) -> q4.PackedWeight:
        return reference(dense.cpu(), format_, **choices).to(dense.device)  # the pretence can't compute it itself

    for module in ("encode", "quantizer"):
        monkeypatch.setattr(f"q4_quantize.{module}.quantize_reference", on_cpu)
    backend = Quantiser(manner=manner, devices={"cuda"})
    expected = pytest.warns(q4.Q4ProbeWarning, match="differ") if manner == "wrong" else contextlib.nullcontext()
    with pretended_cuda(), expected:
        got = _quantize(registry(backend), _dense().to(DEVICE), rounding="nearest")
        assert got.device == torch.device(DEVICE)
        codes = got.to("cpu").qdata
    assert torch.equal(codes, quantize_reference(_dense(), "nf4").qdata)
    (decided,) = [fields for fields in told if fields["event"] == "q4.quantize"]
    assert decided["backend"] == ("native" if manner == "right" else "reference")
    assert ("native" in (decided["fallback_reason"] or "")) == (manner == "wrong")
    assert ((24, 128) in {shape for shape, _, _ in backend.asked}) == (manner == "right")


@pytest.mark.parametrize("form", [4, None])
def test_a_format_that_is_no_name_is_refused(form: Any) -> None:
    """What is neither a name nor a ``Format`` is a typed error with the names there are."""
    with pytest.raises(q4.FormatError, match="nf4"):
        q4.quantize(_dense(), form)
