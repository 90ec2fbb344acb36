"""What one layer takes in memory while it is read or written, beyond its tensors in the file."""

from __future__ import annotations

import pytest

from tests.support.footprint import run_child

_SMALL = 24 << 20
"""Bytes for temporaries of at most a few million codes, and for what the allocator holds."""
_CODE = """
import json, sys, torch, q4core as q4
import q4_dialects
from tests.support.footprint import PeakAnonymous, anonymous

torch.set_num_threads(1)
dialect = next(item for item in q4_dialects.q4_dialects() if item.name == sys.argv[1])

def made(rows, columns):
    numbers = torch.ones((rows, columns // 128), dtype=torch.bfloat16)
    return q4.PackedWeight(
        format=q4.find_format(sys.argv[2]), qdata=torch.full((rows, columns // 2), 0x91, dtype=torch.uint8),
        scale=numbers, offset=numbers if sys.argv[2] == "q4_1" else None, out_features=rows, in_features=columns,
        block_size=128, packing=q4.Packing.LOW_FIRST, dtype=torch.bfloat16,
    )

def taken(work, *arguments):
    before = anonymous()
    with PeakAnonymous() as peak:
        result = work(*arguments)
    return result, peak.bytes - before

def both(weight):
    written, writing = taken(dialect.write, "proj", weight)
    config = {"quantization_config": dialect.quantization_config({"proj": q4.WeightSpec.of(weight)}, ())}
    meta = {key: tensor.to("meta") for key, tensor in written.tensors.items()}
    small = {key: tensor for key, tensor in written.tensors.items() if tensor.nbytes < 1 << 16}
    found = q4.detect_or_fail({**meta, **small}, metadata=written.metadata, config=config, dialect=dialect.name)
    read, reading = taken(dialect.read, found.layers["proj"], written.tensors.__getitem__)
    return {"packed": weight.nbytes, "reading": reading, "writing": writing}

both(made(64, 2048))
print(json.dumps(both(made(8192, 8192))))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("modelopt-int4", "int4"),
        ("torchao-int4-tile-packed", "q4_1"),
        ("torchao-int4", "q4_1"),
        ("hqq", "int4"),
        ("gptq", "int4"),
        ("awq", "int4"),
    ],
)
def test_layer_takes_less_than_twice_its_packed_bytes(dialect: str, name: str) -> None:
    """No layer is unpacked to a byte a code as a whole: reading and writing make packed bytes a part at a time."""
    found = run_child(_CODE, dialect, name)
    for what in ("reading", "writing"):
        assert found[what] < 2 * found["packed"] + _SMALL, (what, found)
