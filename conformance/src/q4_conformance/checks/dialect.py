"""Checks of a dialect: it finds its own layers and nothing else, reports every problem, and preserves every byte."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.layer import expect_same_weight
from q4_conformance.contract.case import check, expect
from q4_conformance.oracle.decoding import stored_bytes
from q4_conformance.oracle.exact import exact_weight
from q4_conformance.oracle.golden_vectors import Vector, golden_vectors
from q4_conformance.outcome import FailureError, NotDeclaredError
from q4_conformance.subjects.dialect import DialectSubject, samples
from q4core import Catalogue, WeightSpec, dialects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4_conformance.contract.case import Case
    from q4core import LayerSchema, PackedWeight, WrittenLayer

MODULES = ("proj", "model.layers.0.self_attn.q_proj", "lm_head")
DENSE = {"model.norm.weight": torch.ones(16), "model.embed.weight": torch.zeros(4, 16)}


def _expect_written(
    subject: DialectSubject, weight: PackedWeight, wanted: Mapping[str, torch.Tensor], what: str
) -> None:
    """Expect that a weight that was read in the dialect is written in it, as the very tensors that are wanted."""
    layer = subject.write("proj", weight)
    if layer is None:
        raise FailureError(f"{what}: what was read in this dialect is not written in it")
    got, what = layer.tensors, f"{what}: written again, other"
    expect(set(got) == set(wanted), f"{what} keys {sorted(set(got) ^ set(wanted))}")
    for key, tensor in wanted.items():
        forms = [f"{item.dtype} {list(item.shape)}" for item in (got[key], tensor)]
        expect(forms[0] == forms[1], f"{what} {key}: {forms[0]}, not {forms[1]}")
        expect(stored_bytes(got[key]) == stored_bytes(tensor), f"{what} bytes of {key}")


@check("dialect_detect")
def _check_detect(case: Case, subject: DialectSubject) -> str:
    kind, seen = case.format, []
    for name, weight, _ in subject.written(kind):
        layers = {module: subject.dialect.write(module, weight) for module in MODULES}
        full = subject.catalogue(layers, weight, DENSE)
        tensors = {key: item for layer in layers.values() for key, item in layer.tensors.items()} | DENSE
        alone = Catalogue(tensors, metadata=full.metadata)
        bare = Catalogue({key: item.to("meta") for key, item in tensors.items()}, metadata=full.metadata)
        for catalogue, how in ((full, "with config"), (alone, "with data"), (bare, "from names and shapes")):
            what = f"{name}, {how}"
            found = {layer.module: layer for layer in subject.find(catalogue)}
            if catalogue is bare and not found and _is_anothers(subject, catalogue):
                continue  # stored numbers alone decide between the two
            expect(set(found) == set(MODULES), f"{what}: found {sorted(found)}")
            for module, layer in found.items():
                if how != "with config" and _is_ambiguous(subject, layer, catalogue):
                    continue  # only the config decides between two readings, and neither was guessed
                _expect_layer(subject, layer, layers[module], catalogue, f"{what}, {module}")
                expect(layer.format == kind or catalogue is bare, f"{what}, {module}: format {layer.format!r}")
                expect(layer.shape in {weight.shape, None}, f"{what}, {module}: shape {layer.shape}")
                expect(layer.block_size in {weight.block_size, None}, f"{what}, {module}: block {layer.block_size}")
        seen.append(name)
    return f"{len(MODULES)} layers each: {'; '.join(seen)}"


def _is_ambiguous(subject: DialectSubject, layer: LayerSchema, catalogue: Catalogue) -> bool:
    return {item.code for item in subject.problems(layer, catalogue)} == {"ambiguous"}


def _is_anothers(subject: DialectSubject, catalogue: Catalogue) -> bool:
    """Return whether another dialect claims every layer of a catalogue."""
    others = (item for item in dialects() if item.name != subject.name)
    return any({layer.module for layer in other.find(catalogue)} >= {*MODULES} for other in others)


def _expect_layer(
    subject: DialectSubject, layer: LayerSchema, written: WrittenLayer, catalogue: Catalogue, what: str
) -> None:
    expect(layer.dialect == subject.name, f"{what}: dialect {layer.dialect!r}")
    expect(set(layer.keys.values()) == set(written.tensors), f"{what}: keys {sorted(layer.keys.values())}")
    expect("qdata" in layer.keys, f"{what}: no role 'qdata' among {sorted(layer.keys)}")
    problems = subject.problems(layer, catalogue)
    expect(not problems, f"{what}: problems of a layer that is right: {[str(item) for item in problems]}")


_HOSTILE: dict[str, Any] = {
    "scalars": {"proj.weight": torch.tensor(1.0), "proj.weight_scale": torch.tensor(1.0)},
    "no elements": {"proj.weight": torch.zeros(0, 0, dtype=torch.uint8), "proj.absmax": torch.zeros(0)},
    "seven dimensions": {"proj.weight": torch.zeros(1, 1, 1, 1, 1, 1, 2, dtype=torch.uint8)},
    "names of dots": {".": torch.zeros(2), "..": torch.zeros(2), "": torch.zeros(2), "a..weight": torch.zeros(2, 2)},
    "huge": {"proj.weight": torch.empty(1 << 40, 1 << 20, dtype=torch.uint8, device="meta")},
}


@check("dialect_foreign")
def _check_foreign(_case: Case, subject: DialectSubject) -> str:
    dense = {"a.weight": torch.zeros(8, 8), "a.bias": torch.zeros(8), "b.running_mean": torch.zeros(8), **DENSE}
    for name, tensors in {"a dense model": dense, "bytes": {"a.weight": torch.zeros(8, 8, dtype=torch.uint8)}}.items():
        claimed = [layer.module for layer in subject.find(Catalogue(tensors))]
        expect(not claimed, f"{name}: claims {claimed}")
    for name, tensors in _HOSTILE.items():
        catalogue = Catalogue(tensors)
        for layer in subject.find(catalogue):
            problems = subject.problems(layer, catalogue)
            expect(problems, f"{name}: {layer.module!r} is called right")
    claims = 0
    for vector in golden_vectors():
        claims += _expect_right_or_unclaimed(subject, vector)
    return f"{claims} of {len(golden_vectors())} golden layers claimed, and read right"


def _expect_right_or_unclaimed(subject: DialectSubject, vector: Vector) -> bool:
    """Judge what is read of a golden layer, where the dialect claims it without a problem; return whether it does."""
    catalogue = vector.catalogue()
    for layer in subject.find(catalogue):
        if subject.problems(layer, catalogue):
            continue
        wrong = _wrongly_read(subject.read(layer, vector.stored), vector)
        shared = subject.dialect.shares_keys and not layer.named
        expect(wrong is None or shared, f"{vector.name}: is claimed, and {wrong}")
        return wrong is None
    return False


def _wrongly_read(weight: PackedWeight, vector: Vector) -> str | None:
    """Return what is wrong with a golden layer as it was read, by the package's own float32, or None."""
    facts = vector.facts
    if (weight.format.name, weight.shape) != (facts["format"], (facts["n"], facts["k"])):
        return f"read as {weight.format.name} {list(weight.shape)}"
    if weight.block_size != facts["block"]:
        return f"read with blocks of {weight.block_size}, not {facts['block']}"
    expected = vector.expected
    exact = torch.from_numpy(exact_weight(weight)).to(expected.dtype)
    if vector.facts["drops_negative_zero"]:
        exact, expected = exact + 0.0, expected + 0.0
    tolerance = 0.0 if expected.dtype is torch.float32 else 2.0**-7  # of 16 bits: rounded twice by the package, perhaps
    same = torch.isclose(exact.float(), expected.float(), rtol=tolerance, atol=0.0, equal_nan=True)
    return None if bool(same.all()) else f"{int((~same).sum())} values are not the package's"


@check("dialect_golden")
def _check_golden(case: Case, subject: DialectSubject) -> str:
    subject.require_declared(case.format)
    seen = []
    for vector in golden_vectors():
        if vector.facts["format"] != case.format:
            continue
        catalogue = vector.catalogue()
        for layer in subject.find(catalogue):
            if subject.problems(layer, catalogue) or (subject.dialect.shares_keys and not layer.named):
                continue
            weight = subject.read(layer, vector.stored)
            wrong = _wrongly_read(weight, vector)
            expect(wrong is None, f"{vector.name}: {wrong}")
            _expect_written(subject, weight, {key: vector.stored[key] for key in layer.keys.values()}, vector.name)
            seen.append(vector.name)
    if not seen:
        raise NotDeclaredError(f"no golden layer of format {case.format!r} is in this dialect for certain")
    return ", ".join(seen)


@check("dialect_round")
def _check_round(case: Case, subject: DialectSubject) -> str:
    written = subject.written(case.format)
    for name, weight, layer in written:
        back = _read_back(subject, layer, weight, name)
        expect_same_weight(back, weight, f"{name}: written and read, it differs")
        _expect_written(subject, back, layer.tensors, name)
    return "; ".join(name for name, _, _ in written)


def _read_back(subject: DialectSubject, layer: WrittenLayer, weight: PackedWeight, what: str) -> PackedWeight:
    catalogue = subject.catalogue({"proj": layer}, weight, {})
    found = subject.find(catalogue)
    if len(found) != 1:
        raise FailureError(f"{what}: {len(found)} layers are found where one was written")
    problems = subject.problems(found[0], catalogue)
    expect(not problems, f"{what}: problems of what was just written: {[str(item) for item in problems]}")
    return subject.read(found[0], layer.tensors)


@check("dialect_convert")
def _check_convert(case: Case, subject: DialectSubject) -> str:
    subject.require_declared(case.format)
    ways = []
    for other in dialects():
        if other.name == subject.name or case.format not in other.formats:
            continue
        theirs = DialectSubject(other)
        for name, weight in samples(case.format):
            first = theirs.write("proj", weight)
            if first is None:
                continue
            here = subject.write("proj", _read_back(theirs, first, weight, f"{other.name}, {name}"))
            if here is None:
                continue
            what = f"{name} from {other.name}"
            back = _read_back(subject, here, weight, what)
            expect_same_weight(back, weight, f"{what}: differs")
            again = theirs.write("proj", back)
            if again is None:
                raise FailureError(f"{what}: refused on the way back")
            back = _read_back(theirs, again, weight, f"{what} and back")
            expect_same_weight(back, weight, f"{what} and back: differs")
            ways.append(what)
    if not ways:
        raise NotDeclaredError(f"no other dialect here exchanges weights of format {case.format!r} with it")
    return "; ".join(ways)


_FACTORS = {"input_channel_scale", "activation_scale"}
"""Roles of factors of x: a layer without them is another, and as right."""
_MISSING, _SHORT, _EMPTY = "missing", "one row short", "empty"


def _damages(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """Yield (what, key, the tensor that replaces it; None for nothing) for each way in which a tensor can be wrong."""
    for key, tensor in tensors.items():
        yield _MISSING, key, None
        if tensor.numel() < 2:  # noqa: PLR2004  # a scalar has no shape to lose
            continue
        yield _SHORT, key, tensor[:-1]
        yield _EMPTY, key, tensor[:0]
        yield "of two ranks more", key, tensor[None, None]
        yield "a scalar", key, torch.zeros((), dtype=tensor.dtype)
        other = torch.int64 if tensor.dtype != torch.int64 else torch.float32
        yield f"of dtype {other}", key, torch.zeros(tensor.shape, dtype=other)


_Look = tuple[list["LayerSchema"], dict[str, str]]


def _look(
    subject: DialectSubject,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
) -> _Look:
    """Return the layers that are found, and key → code of each problem that is reported of them."""
    catalogue = Catalogue(tensors, metadata=metadata, config=config)
    layers = subject.find(catalogue)
    return layers, {item.key: item.code for layer in layers for item in subject.problems(layer, catalogue)}


@check("dialect_validate")
def _check_validate(case: Case, subject: DialectSubject) -> str:
    count = 0
    for name, weight, layer in subject.written(case.format):
        metadata = subject.dialect.merge_metadata({"proj": layer}, ())
        config = {"quantization_config": subject.dialect.quantization_config({"proj": WeightSpec.of(weight)}, ())}
        tensors = dict(layer.tensors)
        whole = _look(subject, tensors, metadata, config)[0]
        optional = {key for found in whole for role, key in found.keys.items() if role in _FACTORS}
        damages = [item for item in _damages(tensors) if item[0] != _MISSING or item[1] not in optional]
        for changes in _alone_and_together(damages):
            ways = {way for way, _ in changes.values()}
            broken = {key: value for key, (_, value) in changes.items()}
            what = f"{name}: {', '.join(f'{key} is {way}' for key, (way, _) in changes.items())}"
            left = {key: tensor for key, tensor in {**tensors, **broken}.items() if tensor is not None}
            layers, reported = _look(subject, left, metadata)
            stated, further = _look(subject, left, metadata, config)  # that zero points must be there, for example
            reported |= further
            # One row less may be a smaller layer, and as right as the whole one.
            is_smaller = ways == {_SHORT} and all(item.shape not in {None, weight.shape} for item in layers or stated)
            is_gone = (_MISSING in ways or broken.keys() == tensors.keys()) and not layers
            expect(reported or is_gone or is_smaller, f"{what}, and nothing is reported of the layer")
            missed = _missed(changes, reported)
            expect(is_gone or not missed, f"{what}, and {missed} is not reported")
            count += 1
        unknown = tensors | {"proj.weight_scale_of_tomorrow": torch.ones(3)}
        layers, reported = _look(subject, unknown, metadata)
        expect(reported or not layers, f"{name}: an unknown scale key is passed over")
        count += 1
    return f"{count} damages"


_Damage = tuple[str, "torch.Tensor | None"]
"""What is wrong, and the tensor that is there instead."""


def _missed(changes: Mapping[str, _Damage], reported: Mapping[str, str]) -> list[str]:
    """Return the damaged keys that are passed over. Of sizes that disagree, either one may be called wrong."""
    gone = {key for key, (way, _) in changes.items() if way == _MISSING}
    wrong = {key for key, (way, _) in changes.items() if way not in {_MISSING, _SHORT, _EMPTY}}
    missing = [key for key, code in reported.items() if code == "missing_key"]
    # A name may depend on what is gone too (the format, for example), so that as many others are asked for.
    is_counted = len(missing) >= len(gone)
    return sorted((wrong if is_counted else wrong | gone) - set(reported))


def _alone_and_together(damages: list[tuple[str, str, torch.Tensor | None]]) -> Iterator[dict[str, _Damage]]:
    """Yield key → damage: each one alone, every two of different tensors, and each way for all tensors at once."""
    alone = [{key: (way, value)} for way, key, value in damages]
    yield from alone
    for one, other in itertools.combinations(alone, 2):
        if one.keys() != other.keys():
            yield one | other
    for way in dict.fromkeys(way for way, _, _ in damages):
        if way != _MISSING:  # with all of them gone there is no layer
            yield {key: (way, value) for item, key, value in damages if item == way}
