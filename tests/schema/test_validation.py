"""``validate`` and ``detect_or_fail`` over faulty tensors of every dialect: the same problems, all of them, by key."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from q4core.schema import Schema

    Fault = Callable[[dict[str, Any], str], None]

NAN = float("nan")
N, K = 48, 128


@attrs.frozen
class Sample:
    """A healthy layer ``proj`` in one dialect."""

    dialect: str
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    keys: Mapping[str, str]
    schema: Schema

    def refused(self, tensors: Mapping[str, Any]) -> tuple[q4.Problem, ...]:
        """Return what ``detect_or_fail`` says of other tensors."""
        try:
            q4.detect_or_fail(tensors, metadata=self.metadata, dialect=self.dialect)
        except q4.SchemaError as error:
            return error.problems
        return ()

    def problems(self, tensors: Mapping[str, Any]) -> tuple[q4.Problem, ...]:
        """Return what ``validate`` says of what ``detect`` finds in other tensors."""
        schema = q4.detect(tensors, metadata=self.metadata, dialect=self.dialect)
        return () if schema is None else q4.validate(schema, tensors, metadata=self.metadata)

    def is_known(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether other tensors still look like a layer of the dialect."""
        found = q4.detect(tensors, metadata=self.metadata, dialect=self.dialect)
        layers = {} if found is None else found.layers
        return "proj" in layers and layers["proj"].dialect == self.dialect


@functools.cache
def _weights() -> dict[str, tuple[str, q4.PackedWeight]]:
    dense = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    nf4, nvfp4 = q4.quantize(dense, "nf4"), q4.quantize(dense, "nvfp4")
    nested = q4.quantize(dense, "nf4", scale_kind=q4.ScaleKind.DOUBLE_QUANT)
    divided = q4.quantize(dense, "nvfp4", scale_kind=q4.ScaleKind.E4M3_DIV)
    single = attrs.evolve(nvfp4, scale_kind=q4.ScaleKind.E4M3, global_scale=None)
    static = torch.tensor(0.5)
    full = attrs.evolve(nvfp4, activation_scale=static)
    return {
        "simple-nf4": ("simple-nf4", nf4),
        "simple-nvfp4": ("simple-nvfp4", single),
        "simple-nvfp4 bytes": ("simple-nvfp4", attrs.evolve(single, scale=single.scale.view(torch.uint8))),
        "bitsandbytes": ("bitsandbytes", nf4),
        "bitsandbytes nested": ("bitsandbytes", nested),
        "torchao-nvfp4-linear": ("torchao-nvfp4-linear", full),
        "torchao-nvfp4-swizzled": ("torchao-nvfp4-swizzled", full),
        "torchao-mxfp4-linear": ("torchao-mxfp4-linear", q4.quantize(dense, "mxfp4")),
        "torchao-mxfp4-swizzled": ("torchao-mxfp4-swizzled", q4.quantize(dense, "mxfp4")),
        "modelopt-nvfp4": ("modelopt-nvfp4", attrs.evolve(full, input_channel_scale=torch.ones(K))),
        "compressed-tensors-nvfp4": ("compressed-tensors-nvfp4", attrs.evolve(divided, activation_scale=static)),
        "compressed-tensors-int4": (
            "compressed-tensors-int4",
            q4.quantize(dense, "int4", block_size=32, symmetric=True),
        ),
        "compressed-tensors-int4 zeros": (
            "compressed-tensors-int4",
            q4.quantize(dense, "int4", block_size=32, symmetric=False),
        ),
        "gpt-oss-mxfp4": ("gpt-oss-mxfp4", q4.quantize(dense, "mxfp4")),
        "comfyui-nvfp4": ("comfyui-nvfp4", full),
    }


SAMPLES = sorted(_weights())


@functools.cache
def _sample(name: str) -> Sample:
    dialect_name, weight = _weights()[name]
    (dialect,) = (item for item in q4.dialects() if item.name == dialect_name)
    written = dialect.write("proj", weight)
    metadata = dialect.merge_metadata({"proj": written}, ())
    tensors = dict(written.tensors)
    schema = q4.detect_or_fail(tensors, metadata=metadata, dialect=dialect_name)
    return Sample(dialect_name, tensors, metadata, schema.layers["proj"].keys, schema)


def _gone(tensors: dict[str, Any], key: str) -> None:
    del tensors[key]


def _double(tensors: dict[str, Any], key: str) -> None:
    tensors[key] = torch.zeros(tensors[key].shape, dtype=torch.float64)


def _reshaped(tensors: dict[str, Any], key: str) -> None:
    old = tensors[key]
    tensors[key] = torch.ones((3, 5, 7, 1), dtype=torch.float32).to(old.dtype)


def _put(value: float) -> Fault:
    def fault(tensors: dict[str, Any], key: str) -> None:
        changed = tensors[key].clone()
        if changed.dtype == torch.uint8:  # e4m3 as bytes, or e8m0 in gpt-oss
            kind = torch.float8_e8m0fnu if key.endswith("_scales") else torch.float8_e4m3fn
            changed.view(kind).view(-1)[3] = value
        else:
            changed.view(-1)[min(3, changed.numel() - 1)] = value
        tensors[key] = changed

    return fault


def _stranger(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}3"] = torch.ones(2)


VALUES = {"nan": _put(NAN), "negative": _put(-1.0), "infinite": _put(float("inf")), "zero": _put(0.0)}
_NUMBERS = {
    "scale",
    "codebook",
    "global_scale",
    "activation_scale",
    "input_channel_scale",
    "nested_scale",
    "nested_codebook",
}
_SIGNED = {"codebook", "nested_codebook", "input_channel_scale"}
_SIGNED_SCALES = {"simple-nf4", "bitsandbytes", "compressed-tensors-int4", "compressed-tensors-int4 zeros"}


def _faults(sample: Sample, name: str) -> dict[str, tuple[str, Fault, str]]:
    """Return fault → (key, what to do, key that a problem must name)."""
    found: dict[str, tuple[str, Fault, str]] = {}
    for role, key in sample.keys.items():
        found[f"{role} gone"] = (key, _gone, key)
        if role != "marker":
            found[f"{role} of another dtype"] = (key, _double, key)
            found[f"{role} of another shape"] = (key, _reshaped, key)
        if role == "scale":
            found["stranger"] = (key, _stranger, f"{key}3")
        dtype = sample.tensors[key].dtype
        if role not in _NUMBERS or (dtype == torch.uint8 and not name.startswith(("simple-nvfp4", "gpt-oss"))):
            continue
        for kind, fault in VALUES.items():
            if kind == "zero" and (sample.dialect != "compressed-tensors-nvfp4" or not role.endswith("l_scale")):
                continue
            is_byte = dtype.itemsize == 1  # e4m3 and e8m0 have no infinity, and e8m0 no sign
            is_legal = role in _SIGNED or dtype == torch.float8_e8m0fnu or name.startswith("gpt-oss")
            is_legal |= role == "scale" and name in _SIGNED_SCALES
            if (kind == "negative" and is_legal) or (kind == "infinite" and is_byte):
                continue
            found[f"{role} {kind}"] = (key, fault, key)
    return found


ONE = [(name, fault) for name in SAMPLES for fault in _faults(_sample(name), name)]
_OPTIONAL = {"activation_scale", "input_channel_scale", "zero"}


def _facts(problems: tuple[q4.Problem, ...]) -> set[tuple[str, str, str, str]]:
    return {(item.code, item.key, item.rule, repr(item.value)) for item in problems}


@pytest.mark.parametrize("name", SAMPLES)
def test_healthy_tensors_have_no_problems(name: str) -> None:
    """The layers that the faults are put into are right."""
    sample = _sample(name)
    assert sample.problems(sample.tensors) == ()
    assert sample.refused(sample.tensors) == ()


@pytest.mark.parametrize(("name", "fault"), ONE, ids=lambda value: value)
def test_each_fault_is_found_by_both(name: str, fault: str) -> None:
    """Whatever is wrong with one tensor, ``validate`` and ``detect_or_fail`` say the same of it, and name its key."""
    sample = _sample(name)
    key, change, named = _faults(sample, name)[fault]
    tensors = dict(sample.tensors)
    change(tensors, key)
    problems = sample.problems(tensors)
    if not sample.is_known(tensors):
        assert sample.refused(tensors) or q4.detect(tensors, metadata=sample.metadata) is None
        return
    assert _facts(problems) == _facts(sample.refused(tensors))
    is_optional = "gone" in fault and fault.removesuffix(" gone") in {*_OPTIONAL, "marker"}
    if is_optional and not name.startswith("torchao"):  # whose metadata lists what must be there
        assert named not in tensors
    else:
        assert named in {problem.key for problem in problems}
    assert len(problems) == len(set(problems))


@pytest.mark.parametrize("name", SAMPLES)
def test_several_faults_are_all_found_by_both(name: str) -> None:
    """Of two faults in two tensors of a layer both are found, whatever they are, by both functions alike."""
    sample = _sample(name)
    faults = _faults(sample, name)
    compared = 0
    for first, second in itertools.combinations(faults, 2):
        if faults[first][2] == faults[second][2] or {first, second} == {"stranger", "scale gone"}:
            continue
        tensors = dict(sample.tensors)
        for fault in sorted((first, second), key=lambda item: "stranger" not in item):
            key, change, _ = faults[fault]
            change(tensors, key)
        problems = sample.problems(tensors)
        if not sample.is_known(tensors):
            unclaimed = q4.detect(tensors, metadata=sample.metadata) is None
            assert unclaimed or sample.refused(tensors), (first, second)
            continue
        compared += 1
        assert _facts(problems) == _facts(sample.refused(tensors)), (first, second)
        keys = {problem.key for problem in problems}
        for fault in (first, second):
            alone = dict(sample.tensors)
            faults[fault][1](alone, faults[fault][0])
            is_found = faults[fault][2] in {problem.key for problem in sample.problems(alone)}
            assert not is_found or faults[fault][2] in keys, (first, second)
    assert compared > 2  # a layer of two tensors is gone, or another one, after most faults


@pytest.mark.parametrize("name", SAMPLES)
def test_values_are_named_by_place(name: str) -> None:
    """A problem of value says which number is wrong, and where it is."""
    sample = _sample(name)
    role = "nested_scale" if "nested" in name else "scale"
    tensors = dict(sample.tensors)
    VALUES["nan"](tensors, sample.keys[role])
    rule = "finite" if name in _SIGNED_SCALES else "finite and not negative"
    (problem,) = sample.problems(tensors)
    assert (problem.code, problem.key, problem.rule) == ("value", sample.keys[role], rule)
    assert str(problem.value).startswith("nan at [")


@pytest.mark.parametrize("name", [name for name in SAMPLES if "scale" in _sample(name).keys])
def test_a_dialect_judges_the_sign_of_scales_as_the_weight_does(name: str) -> None:
    """What ``validate`` says of a scale below zero is what the weight that is read says of it."""
    sample = _sample(name)
    tensors = dict(sample.tensors)
    if tensors[sample.keys["scale"]].dtype in {torch.float8_e8m0fnu, torch.uint8}:
        tensors[sample.keys["scale"]] = tensors[sample.keys["scale"]].clone()
        tensors[sample.keys["scale"]].view(torch.uint8).view(-1)[3] |= 0x80
    else:
        VALUES["negative"](tensors, sample.keys["scale"])
    (dialect,) = (item for item in q4.dialects() if item.name == sample.dialect)
    weight = dialect.read(sample.schema.layers["proj"], tensors.__getitem__)
    rules = []
    try:
        weight.check_values()
    except q4.WeightError as error:
        rules = [error.rule]
    assert [problem.rule for problem in sample.problems(tensors)] == rules


@pytest.mark.parametrize("name", SAMPLES)
def test_metadata_alone_has_no_values(name: str) -> None:
    """Meta tensors and infos are judged by dtype and shape only, by both functions, as tensors are."""
    sample = _sample(name)
    for bare in (
        {key: tensor.to("meta") for key, tensor in sample.tensors.items()},
        {key: q4.TensorInfo(tensor.dtype, tensor.shape) for key, tensor in sample.tensors.items()},
    ):
        assert sample.problems(bare) == ()
        assert sample.refused(bare) == ()
        key = sample.keys["scale"]
        changed = {**bare, key: q4.TensorInfo(torch.float64, (5,))}
        assert key in {problem.key for problem in sample.problems(changed)}


def test_values_that_are_lazy_are_not_read() -> None:
    """Entries that a loader would have to fetch are left alone, but for the small ones that decide the layout."""
    sample = _sample("torchao-nvfp4-linear")
    bare = {key: q4.TensorInfo(tensor.dtype, tensor.shape) for key, tensor in sample.tensors.items()}
    asked: list[str] = []

    def load(name: str) -> torch.Tensor:
        asked.append(name)
        return sample.tensors[name]

    assert q4.validate(sample.schema, bare, metadata=sample.metadata, load=load) == ()
    assert asked == []


def test_one_tensor_at_hand_is_enough() -> None:
    """The values of a real tensor are looked at where its neighbours are metadata only."""
    sample = _sample("modelopt-nvfp4")
    tensors: dict[str, Any] = {key: tensor.to("meta") for key, tensor in sample.tensors.items()}
    key = sample.keys["scale"]
    tensors[key] = sample.tensors[key].clone()
    VALUES["nan"](tensors, key)
    assert [problem.key for problem in sample.problems(tensors)] == [key]
    assert _facts(sample.problems(tensors)) == _facts(sample.refused(tensors))


def _experts(count: int) -> dict[str, torch.Tensor]:
    return {
        "proj._weight_qdata": torch.zeros(count, N, K // 2, dtype=torch.uint8),
        "proj._weight_scale": torch.ones(count, N, K // 16).to(torch.float8_e4m3fn),
        "proj._weight_per_tensor_scale": torch.tensor(1.0),
        "proj._weight_act_per_tensor_scale": torch.tensor(1.0),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"proj._weight_scale": torch.ones(4, N, 5).to(torch.float8_e4m3fn)},
        {"proj._weight_scale": torch.full((4, N, K // 16), NAN).to(torch.float8_e4m3fn)},
        {"proj._weight_qdata": None},
        {"proj._weight_scale": None},
        {"proj._weight_scale3": torch.ones(1)},
        {"proj._weight_per_tensor_scale": torch.tensor(NAN), "proj._weight_scale": None},
    ],
)
def test_faults_of_experts_are_reported_once_by_both(changes: dict[str, torch.Tensor | None]) -> None:
    """What is wrong with a tensor of all experts is one problem, not one for each, in both functions."""
    sample = _sample("torchao-nvfp4-linear")
    assert len(q4.detect_or_fail(_experts(4), metadata=sample.metadata).layers) == 4
    tensors = {key: tensor for key, tensor in {**_experts(4), **changes}.items() if tensor is not None}
    problems = sample.problems(tensors)
    assert _facts(problems) == _facts(sample.refused(tensors))
    assert sorted({problem.key for problem in problems}) == sorted(changes)
    assert len(problems) == len(changes)


@pytest.mark.parametrize("name", ["torchao-nvfp4-swizzled", "comfyui-nvfp4"])
def test_the_padding_of_swizzled_scales_holds_no_numbers(name: str) -> None:
    """Bytes of a tile beyond the weight's rows may be anything, as they are when the layer is read from a file."""
    sample = _sample(name)
    key = sample.keys["scale"]
    stored = sample.tensors[key].clone()
    # Row N of the tile, which no row of the weight fills.
    stored.view(torch.uint8).view(-1)[(N % 32) * 16 + (N // 32) * 4] = 0x7F
    assert sample.problems({**sample.tensors, key: stored}) == ()
